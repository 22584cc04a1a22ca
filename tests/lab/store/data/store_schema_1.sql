-- A store as schema 1 left it.
PRAGMA application_id = 1919512167;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE environments (
    id TEXT PRIMARY KEY,        -- sha256 of content
    content TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO "environments" VALUES('d887db8b81113b6fce4d5df82a899d455f4b83c91efe0d4e5db7ab9ef09f76af','{"code": "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc", "git": {"commit": "0123abc", "dirty": false}, "hardware": {"cores": 2, "cpu": "x", "gpus": []}, "kernels": "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk", "os": "Linux", "python": "3.11", "versions": {"ringray": "0.1", "torch": "2", "triton": "3"}}');
CREATE TABLE leases (
    digest TEXT NOT NULL,
    role TEXT NOT NULL,
    token TEXT NOT NULL,
    pid INTEGER NOT NULL,
    birth TEXT NOT NULL,
    host TEXT NOT NULL,
    beat REAL NOT NULL,
    PRIMARY KEY (digest, role)
) WITHOUT ROWID;
CREATE TABLE sweeps (
    digest TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    spec TEXT NOT NULL,
    source TEXT NOT NULL,
    environment TEXT NOT NULL REFERENCES environments (id),
    status TEXT NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL       -- when a driver last began or finished it
) WITHOUT ROWID;
INSERT INTO "sweeps" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','small','latency','{"version":1,"name":"small","kind":"latency","cluster":null,"problem":{"seq_len":64,"batch":1,"heads":2,"kv_heads":null,"head_dim":64,"value_head_dim":null,"softcap":null,"sinks":false,"alibi":false,"dropout_p":null,"dtype":"bfloat16","quantize":null,"causal":[true,false],"window":[null,3],"chunk":null,"prefix":null,"global_tokens":null,"shared_prefix":null,"documents":null,"direction":"forward+backward","new_tokens":null},"ring":{"size":2,"device":"auto","placement":"pack","order":"topology","threads":1,"concurrent":1,"idle_release":60.0},"strategy":{"partition":["contiguous","zigzag"],"transport":"ring","backward":"auto","backend":"auto","blocks":null},"measure":{"warmup":1,"repeats":2,"replicas":1,"seed":0,"baseline":{"name":"sdpa","threads":2}},"search":{"method":"grid","objectives":["median_ms"],"budget":null,"seed":null},"limits":{"trial_timeout":120.0,"retries":2,"rank_memory":null,"place_timeout":600.0},"tracking":{"experiment":"small","uri":null,"enabled":false}}','version: 1
name: small
kind: latency
problem:
  seq_len: 64
  heads: 2
  window: [null, 3]
  causal: [true, false]
strategy:
  partition: [contiguous, zigzag]
measure: {repeats: 2}
tracking: {enabled: false}
','d887db8b81113b6fce4d5df82a899d455f4b83c91efe0d4e5db7ab9ef09f76af','failed',1.79581902061463356021e+09,1.79581902068241405483e+09);
CREATE TABLE trials (
    digest TEXT NOT NULL REFERENCES sweeps (digest),
    key TEXT NOT NULL,
    idx INTEGER NOT NULL,
    config TEXT NOT NULL,
    predicted TEXT NOT NULL,
    seq INTEGER NOT NULL DEFAULT 0,     -- 0 until it ended, then growing within the sweep
    status TEXT,
    reason TEXT,
    metrics TEXT NOT NULL DEFAULT '{}',
    samples TEXT NOT NULL DEFAULT '{}',
    point TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    started REAL,
    ended REAL,
    environment TEXT REFERENCES environments (id),
    PRIMARY KEY (digest, key)
) WITHOUT ROWID;
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','07c45d979e97ce2c',2,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":true,"window":3,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"contiguous","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{"flops":448000,"sent_bytes":6144,"messages":6,"peak_memory_bytes":225792,"time_ms":1.510244549426762,"balance":0.9765625,"low_ms":0.755122274713381,"high_ms":3.020489098853524,"exposed_ms":0.8563706550171549,"inner_bytes":6144,"outer_bytes":0}',6,'failed','it broke','{}','{}','qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq',3,5.0,6.0,'d887db8b81113b6fce4d5df82a899d455f4b83c91efe0d4e5db7ab9ef09f76af');
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','23b7c72ca0a035ca',4,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":false,"window":null,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"contiguous","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{"flops":7340032,"sent_bytes":131072,"messages":12,"peak_memory_bytes":288256,"time_ms":1.6572864,"balance":1.0,"low_ms":0.8286432,"high_ms":3.3145728,"exposed_ms":0.8100949333333343,"inner_bytes":131072,"outer_bytes":0}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL);
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','5a5b1701b98908da',7,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":false,"window":3,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"zigzag","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{}',2,'pruned','problem.window: got 3 without causal, expected causal, or both sides, left and right: one number looks back from its query','{}','{}','f138f4b0f17eb1355044025046df0a2686c2b2625f4c7f94552ba7de71ed7644',0,1.79581902061463356021e+09,1.79581902061463356021e+09,'d887db8b81113b6fce4d5df82a899d455f4b83c91efe0d4e5db7ab9ef09f76af');
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','99c9613979dcfafc',0,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":true,"window":null,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"contiguous","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{"flops":3727360,"sent_bytes":65536,"messages":6,"peak_memory_bytes":284160,"time_ms":1.6572864,"balance":0.6701030927835051,"low_ms":0.8286432,"high_ms":3.3145728,"exposed_ms":0.865117866666667,"inner_bytes":65536,"outer_bytes":0}',5,'ok',NULL,'{"median_ms":11.0}','{"ms":[1.0,2.0]}','pppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppp',2,3.0,4.0,'d887db8b81113b6fce4d5df82a899d455f4b83c91efe0d4e5db7ab9ef09f76af');
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','be7c556fa4a93b26',5,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":false,"window":null,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"zigzag","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{"flops":7340032,"sent_bytes":131072,"messages":12,"peak_memory_bytes":288256,"time_ms":1.6572864,"balance":1.0,"low_ms":0.8286432,"high_ms":3.3145728,"exposed_ms":0.8100949333333343,"inner_bytes":131072,"outer_bytes":0}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL);
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','c27b598c0b3b36e3',1,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":true,"window":null,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"zigzag","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{"flops":3727360,"sent_bytes":98304,"messages":12,"peak_memory_bytes":284160,"time_ms":1.6240149800205257,"balance":1.0,"low_ms":0.8120074900102628,"high_ms":3.2480299600410514,"exposed_ms":0.865117866666667,"inner_bytes":98304,"outer_bytes":0}',4,'ok',NULL,'{"median_ms":12.34,"p20_ms":12.1,"p80_ms":12.9,"baseline_ms":13.0,"ratio":0.95,"tflops":0.161,"peak_memory_bytes":4194304.0}','{}','33a1c3e9498d9aabd48c23c0ec53f82ca36816d7985e5225e0cedfb8abdbd536',1,1.0,2.0,'d887db8b81113b6fce4d5df82a899d455f4b83c91efe0d4e5db7ab9ef09f76af');
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','d2a7bb7a7831f70e',6,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":false,"window":3,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"contiguous","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{}',1,'pruned','problem.window: got 3 without causal, expected causal, or both sides, left and right: one number looks back from its query','{}','{}','58235c3b5056612b71b75589ccc4165bec9ffa02634b88675c899c672ee3ae1b',0,1.79581902061463356021e+09,1.79581902061463356021e+09,'d887db8b81113b6fce4d5df82a899d455f4b83c91efe0d4e5db7ab9ef09f76af');
INSERT INTO "trials" VALUES('8d1407bc4113e949ddcbdda5f6a593f47724dce2a1b9a453874276f6a97af28f','f1f657332e03dbfe',3,'{"ring_size":2,"threads":1,"dtype":"bfloat16","seq_len":64,"batch":1,"heads":2,"kv_heads":2,"head_dim":64,"causal":true,"window":3,"documents":null,"direction":"forward+backward","transport":"ring","backward":"auto","backend":"auto","blocks":null,"partition":"zigzag","device":"auto","placement":"pack","warmup":1,"repeats":2,"seed":0,"baseline":"sdpa","baseline_threads":2,"replica":0}','{"flops":448000,"sent_bytes":12288,"messages":12,"peak_memory_bytes":228864,"time_ms":1.512791361988248,"balance":0.9765625,"low_ms":0.756395680994124,"high_ms":3.025582723976496,"exposed_ms":0.8563706550171549,"inner_bytes":12288,"outer_bytes":0}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL);
CREATE INDEX trials_by_seq ON trials (digest, seq);
COMMIT;
