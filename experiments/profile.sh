#!/bin/sh
# Counts, with Nsight Compute, what the default and the specialised kernels wait for, into
# PREFIX.ncu-rep and tables made of it.
#
#   PYTHONPATH=.:kernels sh experiments/profile.sh PREFIX
set -eu
prefix=$1
ncu -f -o "$prefix" --set full --clock-control none --target-processes all --launch-count 10 \
  --kernel-name-base function -k 'regex:forward_kernel|dkv_kernel|dq_kernel' \
  "${PYTHON:-python3}" - <<'PYTHON'
import torch
from ringray_kernels.bench.contenders import CONTENDERS
from ringray_kernels.bench.problems import Point, make_inputs

device = torch.device("cuda", 0)
for point in (Point("causal", 8192), Point("causal", 8192, direction="backward")):
    for name in ("ringray", "ringray-portable"):
        if CONTENDERS[name].unsupported(point, device) is None:
            CONTENDERS[name].prepare(point, make_inputs(point, device, 0))()
torch.cuda.synchronize()
PYTHON
ncu -i "$prefix.ncu-rep" --csv --page details > "$prefix.ncu.csv"
ncu -i "$prefix.ncu-rep" --csv --page source --print-units base | gzip > "$prefix.ncu-source.csv.gz"
