"""The durable record of sweeps: sqlite.

store        sweeps and trials
schema       tables, and steps from older ones
rows         rows as plain data
memory_copy  a store that is only read
snapshot     a whole copy beside the store
recover      a new store from a damaged one
jsonl        records as JSON Lines
traces       traces beside the store
"""
