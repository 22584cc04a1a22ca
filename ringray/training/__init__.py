"""Training on a mesh of ranks: data, context (the ring), tensor and pipeline parallelism.

recipe       what is trained, on how many ranks of each kind, and whether that fits
mesh         the ranks in order, and the groups that they form
parallelize  a model on a mesh: groups, tensor parallelism, FSDP
gradients    the norm of gradients over all ranks of a mesh, and clipping by it
offload      inputs of layers that leave the device until their backward pass
corpus       documents in files, packed; each rank reads its own rows
trainer      steps of training
checkpoint   checkpoints that are complete or absent, for any mesh
checkpoint_files  one checkpoint's files, their digests, and a reader that runs nothing
"""
