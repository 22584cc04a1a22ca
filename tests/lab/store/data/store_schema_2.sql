-- A store as schema 2 left it, in the middle of a sweep.
PRAGMA application_id = 1919512167;
PRAGMA user_version = 2;
BEGIN TRANSACTION;
CREATE TABLE environments (
    id TEXT PRIMARY KEY,        -- sha256 of content
    content TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO "environments" VALUES('6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','{"hardware": {"cores": 2, "cpu": "x"}, "kernels": "k", "versions": {"torch": "2"}}');
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
, turn INTEGER NOT NULL DEFAULT 0, seal TEXT) WITHOUT ROWID;
INSERT INTO "sweeps" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','quick','latency','{"name":"quick"}','name: quick
','6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','interrupted',1.79537010255053424831e+09,1.79537010255090570447e+09,3,'0fa516c61499c61d');
INSERT INTO "sweeps" VALUES('ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34','older','latency','{"name":"older"}','name: older
','6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','running',1.79537010254140305524e+09,1.79537010254140305524e+09,1,'fd8407d43b9ccc85');
CREATE TABLE tracked (digest TEXT PRIMARY KEY, uri TEXT NOT NULL,
        experiment_id TEXT NOT NULL, run_id TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "tracked" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','sqlite:///m.db','1','r');
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
    environment TEXT REFERENCES environments (id), seal TEXT,
    PRIMARY KEY (digest, key)
) WITHOUT ROWID;
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000000',0,'{"seq_len":64}','{"flops":9}',2,'ok',NULL,'{"median_ms":1.5}','{"ms":[1.0,2.0]}','pppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppp',1,5.0,9.0,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','573e1ab68e797dc5');
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000001',1,'{"seq_len":65}','{"flops":9}',3,'ok',NULL,'{"median_ms":2.5}','{"ms":[1.0,2.0]}','pppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppp',1,5.0,9.0,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','633429373c4fa559');
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000002',2,'{"seq_len":66}','{"flops":9}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL,'979b9ac29bda5b38');
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000003',3,'{"seq_len":67}','{"flops":9}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL,'b87ea9dcf141e6b5');
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000004',4,'{"seq_len":68}','{"flops":9}',1,'pruned','too large','{}','{}','2feb2acf5f5f5baf2257b2c1837bbcd214e51b24c23cfa6a399f73ea6a390db8',0,1.79537010255053424831e+09,1.79537010255053424831e+09,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','d6a21c522d6a612d');
INSERT INTO "trials" VALUES('ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34','0000000000000000',0,'{"seq_len":64}','{"flops":9}',1,'failed','lost a rank','{}','{}','',3,0.0,1.0,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','dc4407081074bbca');
INSERT INTO "trials" VALUES('ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34','0000000000000001',1,'{"seq_len":65}','{"flops":9}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL,'8f1aea3b27d7527b');
CREATE INDEX trials_by_seq ON trials (digest, seq);
COMMIT;
