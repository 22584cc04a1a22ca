"""A ring of Ray actors.

group         actors and their placement group as one unit
actor         one rank, and its memory limit
calls         one call to all ranks: answers and heartbeats
monitor       waits for a call and decides which fault ended it
pool          rings kept between trials
order         the order of ranks along a ring
links         links between nodes, measured by an actor on each
quarantine    nodes on which rings fail
"""
