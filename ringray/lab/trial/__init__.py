"""What a trial is and what came of it: plain data.

config        one point of a sweep
outcome       what came of it
faults        what went wrong, where
measurement   what ranks report, summarised
machine_load  foreign load while it ran
"""
