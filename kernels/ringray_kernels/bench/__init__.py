"""``python -m ringray_kernels.bench``: the kernels against every attention that is installed.

problems    cases, their exact FLOPs, and inputs
contenders  implementations of attention (flex: PyTorch's FlexAttention)
checks      references and error limits
timing      time of one call
source      digest of the sources
machine     device, versions, peak rates
measure     check and time of the contenders of one case
virtual     hops of a ring on one device
report      printed tables
watchdog    end of a run that hangs
session     a whole run in one process
stages      parts of a run in processes of their own
first_light their order and limits
"""
