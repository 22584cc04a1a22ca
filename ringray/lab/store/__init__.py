"""The durable record of sweeps: sqlite.

store        sweeps and trials
schema       tables and migrations
rows         rows as plain data
value_types  types of the values in rows
place        a store that is deleted or replaced while it is open
memory_copy  a store that is only read
snapshot     a whole copy beside the store
recover      a new store from a damaged one
jsonl        records as JSON Lines
traces       traces beside the store
"""
