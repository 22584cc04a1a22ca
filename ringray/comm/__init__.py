"""Communication of the ranks of a ring: torch.distributed behind one object.

ring          the ranks of a ring, and their exchanges
batch         messages that begin and end together
host_staging  CPU copies for groups that cannot send GPU memory
replay        a recorded pass, played again without its compute
"""
