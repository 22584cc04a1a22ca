"""The points of a spec: counted, predicted, pruned. No torch, no Ray.

plan         the frozen plan
expand       the points of a spec
cost_model   FLOPs, bytes, messages and predicted time
peak_memory  predicted memory of a rank
kernel_cuts  block sizes that a kernel can have
limits       what a plan may not ask
pruning      points that can never run
deadline     how long a trial may take
"""
