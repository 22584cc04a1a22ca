"""Measures the trials of a plan.

run       the sweep: open, resume, measure, conclude
trials    one trial on its ring, with retries
schedule  which trial is next
studies   what a search has found
observer  who is told what happens
signals   interruption
"""
