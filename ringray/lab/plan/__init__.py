"""Plans: the points of a spec, counted, predicted and pruned. No torch, no Ray.

trial        one point with its prediction, or the reason why it never runs
plan         the frozen plan, and the deadlines of its trials
expand       the search space of a spec
kernel_cuts  block sizes that kernel-tune tries
problems     the points of one problem, which a search compares
limits       bounds on a plan's size; searches that its trials cannot answer
pruning      points that can never run
forecast     points that their prediction rules out
"""
