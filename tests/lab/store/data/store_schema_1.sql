-- A store as schema 1 left it, in the middle of a sweep.
PRAGMA application_id = 1919512167;
PRAGMA user_version = 1;
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
) WITHOUT ROWID;
INSERT INTO "sweeps" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','quick','latency','{"name":"quick"}','name: quick
','6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','running',1.79529760098197627062e+09,1.79529760098197627062e+09);
INSERT INTO "sweeps" VALUES('ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34','older','latency','{"name":"older"}','name: older
','6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a','failed',1.79529760097991585724e+09,1.79529760098194146157e+09);
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
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000000',0,'{"seq_len":64}','{"flops":9}',1,'ok',NULL,'{"median_ms":1.5}','{"ms":[1.0,2.0]}','pppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppp',1,5.0,9.0,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a');
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000001',1,'{"seq_len":65}','{"flops":9}',2,'ok',NULL,'{"median_ms":2.5}','{"ms":[1.0,2.0]}','pppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppppp',1,5.0,9.0,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a');
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000002',2,'{"seq_len":66}','{"flops":9}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL);
INSERT INTO "trials" VALUES('ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12ab12','0000000000000003',3,'{"seq_len":67}','{"flops":9}',0,NULL,NULL,'{}','{}',NULL,0,NULL,NULL,NULL);
INSERT INTO "trials" VALUES('ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34','0000000000000000',0,'{"seq_len":64}','{"flops":9}',2,'failed','lost a rank','{}','{}','',3,1.5,2.5,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a');
INSERT INTO "trials" VALUES('ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34ab34','0000000000000001',1,'{"seq_len":65}','{"flops":9}',1,'pruned','too large','{}','{}','1bcdba2c96c5c98a12fe29ca9615698474b65bc73602af7f0be596c20d463a5f',0,1.79529760097991585724e+09,1.79529760097991585724e+09,'6bb93d402008f61d94f8f0de8d391c33b20ee96280c2eb60f357682b8404175a');
CREATE INDEX trials_by_seq ON trials (digest, seq);
COMMIT;
