"""The durable record of sweeps: sqlite.

store     sweeps and trials
schema    tables and migrations
rows      rows as plain data
lease     one driver a sweep
jsonl     records as JSON Lines
traces    traces beside the store
recovery  what is saved from a damaged store
"""
