"""Calibration: the rates and links of this machine, measured as rings use them.

machine  the ranks that measure, and what follows from their samples: an entry of hardware
hops     messages around a ring, timed
rank     what one of them times: attention calls, products, messages, the op
"""
