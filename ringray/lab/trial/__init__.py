"""Trials and their outcomes: plain data.

config        one point of a sweep
lengths       tables of document lengths, and documents drawn from them
outcome       rows of sweeps and trials, and which of them a name or digest selects
faults        causes of failed trials
metrics       the table of metrics
machine_load  load of a rank and its host
ranking       the order of points, and what their samples decide
measurement   reports of ranks, and metrics from them
"""
