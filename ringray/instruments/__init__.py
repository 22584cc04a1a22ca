"""Observation of one rank.

progress  phase and hop of the running trial
timeline  spans of computation, transfers and waits
hops      spans joined to hops; hidden and exposed communication
"""
