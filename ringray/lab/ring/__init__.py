"""A ring of Ray actors.

group         actors and their placement group as one unit
actor         one rank
monitor       waits for ranks and classifies their faults
pool          rings kept between trials
memory_limit  the memory limit of a CPU rank
"""
