"""Predictions: what ranks compute and links carry, and what a trial costs. No torch, no Ray.

hardware     ranks and links as data, and fleets of them
calibration  hardware that was measured here
fitting      hardware, corrected by the trials of a store
links        links between the nodes of clusters, measured
rates        seconds of attention calls, from curves
simulator    ranks and ports, step by step
ring_time    the time of a trial, from both
cost_model   FLOPs, bytes, messages, memory and time of a trial
long_ring    the same of rings of hundreds of ranks
peak_memory  predicted memory of a rank
layers       kinds of layers that a model has, their attention on a ring
rank_memory  memory of a rank in a step of training
transformer  time of a step around the attention
layouts      degrees that a fleet allows, what their ranks need, the longest context
advise       degrees and rings that train a model fastest
pooling      packed documents on these rings, and on one pool
"""
