"""Training on a mesh of ranks: data, context (the ring), tensor and pipeline parallelism.

degrees      how many ranks each kind of parallelism has
recipe       what is trained and how, and whether that fits a mesh
mesh         the ranks in order, and the groups that they form
parallelize  a model on a mesh: groups, tensor parallelism, FSDP
corpus       documents in files, packed; each rank reads its own rows
trainer      steps of training
checkpoint   checkpoints that are complete or absent, for any mesh
checkpoint_files  one checkpoint's files, their digests, and a reader that runs nothing
pickled      pickles read as data
"""
