"""Trials and their outcomes: plain data.

config        one point of a sweep
outcome       rows of sweeps and trials, and which of them a name or digest selects
faults        causes of failed trials
metrics       the table of metrics
machine_load  load of a rank and its host
ranking       the order of points, and what their samples decide
measurement   reports of ranks, and metrics from them
"""
