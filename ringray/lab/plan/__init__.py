"""Plans: the points of a spec, counted, predicted and pruned. No torch, no Ray.

plan         the frozen plan, and the deadlines of its trials
expand       the search space of a spec
kernel_cuts  block sizes that kernel-tune tries
limits       bounds on a plan's size; searches that its trials cannot answer
pruning      points that can never run
cost_model   FLOPs, bytes, messages and predicted time
peak_memory  predicted memory of a rank
"""
