"""Measures the trials of a plan.

run       the sweep: open, resume, announce, measure, conclude
resume    its state before the first trial: what stands, what is left
trials    one trial on its ring: attempts, retries, outcome
schedule  the order of trials, as the search asks for them
dispatch  which ring takes which trial
studies   results of searches, and the tuned choices that follow
events    what listeners are told; the summary
json_lines, event_log, exporter  listeners
"""
