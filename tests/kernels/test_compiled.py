"""Compiled code of the default configurations, for GPUs that are not there.

Compiled in a process of their own: this one may have triton's interpreter switched on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from ringray_kernels.config import TARGETS
from ringray_kernels.inspect.listing import (
    GCN,
    SASS,
    gcn_instructions,
    inner_loops,
    overlapped,
    repetition,
    sass_instructions,
    spilled_bytes,
)

MAIN = "from ringray_kernels.inspect.report import main\n"
PRODUCTS = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}

# Bytes a thread moves to and from its stack in the inner loops; none where nothing is said. By
# triton version; another version is held to compile, and to the products.
CEILINGS: dict[str, dict[tuple[str, str, int, str], int]] = {
    "3.9": {
        ("sm_90", "dkv", 128, "bfloat16"): 300,
        ("sm_90", "dkv", 256, "bfloat16"): 84,
        ("sm_100", "dkv", 128, "bfloat16"): 24,
        ("sm_100", "dkv", 256, "bfloat16"): 164,
        ("sm_80", "dq", 256, "float32"): 72,
        ("sm_80", "dkv", 256, "float32"): 192,
        ("sm_90", "forward", 256, "float32"): 32,
        ("sm_90", "dq", 256, "float32"): 300,
        ("sm_90", "dkv", 256, "float32"): 676,
        ("sm_100", "forward", 256, "float32"): 32,
        ("sm_100", "dq", 256, "float32"): 284,
        ("sm_100", "dkv", 256, "float32"): 684,
    }
}
# Products that more warps compute than there are rows for: operations over those that are needed.
# What would repeat nothing spills more in its loops (see docs/kernels.md).
REPEATED = {
    ("sm_80", "forward", 256, "float32"): 2.5,
    ("sm_80", "dq", 256, "float32"): 3.0,
    ("sm_80", "dkv", 256, "float32"): 2.5,
    ("sm_90", "forward", 256, "float32"): 2.5,
    ("sm_90", "dq", 256, "float32"): 3.0,
    ("sm_90", "dkv", 256, "float32"): 2.5,
    ("sm_100", "forward", 256, "float32"): 2.5,
    ("sm_100", "dq", 256, "float32"): 3.0,
    ("sm_100", "dkv", 256, "float32"): 2.5,
    ("gfx942", "dq", 96, "bfloat16"): 1.12,
    ("gfx942", "dkv", 96, "bfloat16"): 1.17,
}
# All of it in the loops over edge tiles, but 120 bytes of the last.
SPECIALISED_CEILINGS = {
    "3.9": {("forward", 128): 216, ("forward", 256): 284, ("dkv", 128): 636},
}


def compiled(tmp_path: Path, code: str) -> list[dict[str, Any]]:
    """The JSON lines that ``code`` writes to ``path``."""
    path = tmp_path / "compiled.jsonl"
    program = f"from pathlib import Path\npath = Path({str(path)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "kernels")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


def hold(line: dict[str, Any]) -> None:
    """The promises of one default configuration."""
    assert line["status"] == "ok", line
    case = (line["target"], line["kernel"], line["head_dim"], line["dtype"])
    target = TARGETS[line["target"]]
    assert 0 < line["shared_bytes"] <= target.shared_bytes, line
    assert line["resident"] >= 1, line
    assert not line["serialised"], line
    half = line["dtype"] != "float32"
    found = line["instructions"]
    # fp32 takes tensor cores too (tf32), if small tiles leave Hopper's large ones unused.
    assert found[PRODUCTS[line["target"]]] > 0 or (not half and found["mma"] > 0), line
    ceilings = CEILINGS.get(".".join(triton.__version__.split(".")[:2]))
    if ceilings is not None:
        assert line["inner_spilled"] <= ceilings.get(case, 0), line
        assert line["repeated"] <= REPEATED.get(case, 1.0) + 0.01, line


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_usual_head_dims(tmp_path: Path, head_dim: int) -> None:
    lines = compiled(tmp_path, MAIN + f"main(head_dims=[{head_dim}], json_path=path)")
    assert len(lines) == 4 * 3 * (2 if head_dim == 64 else 1)
    for line in lines:
        hold(line)


@pytest.mark.slow
def test_every_default(tmp_path: Path) -> None:
    lines = compiled(tmp_path, MAIN + "main(json_path=path)")
    assert len(lines) == 4 * 3 * (6 + 2)
    for line in lines:
        hold(line)


SPECIALISED = """
import json
from ringray_kernels.inspect.report import record
from ringray_kernels.inspect.compiled import Case, compile_case
from ringray_kernels.config import BlockConfig
for kernel, head_dim, text in (
    ("forward", 64, "128x128/8/3"), ("forward", 128, "128x128/8/2"), ("forward", 256, "128x64/8/2"),
    ("dkv", 64, "64x128/8/2"), ("dkv", 128, "64x128/8/2"),
):
    config = BlockConfig.parse(text + "/specialised")
    case = Case("sm_90", kernel, head_dim, config=config)
    with path.open("a") as file:
        file.write(json.dumps(record(case, compile_case(case))) + "\\n")
"""


def test_softmax_runs_beside_products_on_hopper(tmp_path: Path) -> None:
    """In the loops over whole tiles every exponential; forward's loop over edge tiles waits."""
    ceilings = SPECIALISED_CEILINGS.get(".".join(triton.__version__.split(".")[:2]))
    for line in compiled(tmp_path, SPECIALISED):
        inside, exponentials = line["overlapped"]
        assert inside * (2 if line["kernel"] == "forward" else 1) == exponentials > 0, line
        assert not line["serialised"], line
        assert line["instructions"]["wgmma"] > 0, line
        assert line["instructions"]["bulk"] > 0, line
        if ceilings is not None:
            assert line["inner_spilled"] <= ceilings.get((line["kernel"], line["head_dim"]), 0)


VARIANTS = """
import json, torch, triton
from ringray_kernels.api import BackwardOperands, Operands, State
from ringray_kernels.backends.triton import launch as launches
from ringray_kernels.inspect.compiled import _Absent
from ringray_kernels.config import Blocks, target_named

def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

target = target_named("sm_80")
triton.runtime.driver.set_active(_Absent(target))
for batch, rows, scale in ((1, 256, 0.5), (2, 256, 1), (2, 333, 2), (2, 1, 0.1)):
    q, k, v, dout, dq, dk, dv = (meta(batch, 2, rows, 64, dtype=torch.bfloat16) for _ in range(7))
    lse, delta = (meta(batch, 2, rows) for _ in range(2))
    start, end = (meta(batch, rows, dtype=torch.int32) for _ in range(2))
    operands = Operands(q, k, v, start, end, scale, Blocks())
    given, more = BackwardOperands(dout, None, lse, delta, dq, dk, dv), (target, q.dtype)
    for one in (
        launches.forward_launch(operands, State(dq, lse), None, *more),
        launches.dq_launch(operands, given, *more),
        *launches.dkv_launches(operands, given, start, end, *more),
    ):
        one.kernel.run(*one.arguments, grid=one.grid, warmup=True, **one.options)
        found = [len(cache[0]) for cache in one.kernel.device_caches.values()]
        with path.open("a") as file:
            file.write(json.dumps({"kernel": one.kernel.fn.__name__, "variants": found}) + "\\n")
"""


def test_bounds_by_batch_entry_and_whole_scales_compile_nothing_again(tmp_path: Path) -> None:
    lines = compiled(tmp_path, VARIANTS)
    assert len(lines) == 4 * 3
    for line in lines:
        assert line["variants"] == [1], line


LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   STL.64 [R1], R2 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   MUFU.EX2 R3, R3 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   MUFU.EX2 R3, R3 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   MUFU.EX2 R3, R3 ;
        /*0080*/                   LDL R3, [R1] ;
        /*0090*/              @P0  BRA 0x20 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*00c0*/                   BRA 0x40 ;
"""


def test_listings_are_read_by_loop() -> None:
    code = sass_instructions(LISTING)
    (loop,) = inner_loops(code, SASS.product)
    assert len(loop) == 8
    assert overlapped(loop) == (2, 3)
    assert spilled_bytes(code, SASS.spill_store) == 8
    assert spilled_bytes(loop, SASS.spill_store) == 0
    assert spilled_bytes(loop, SASS.spill_load) == 4


TTGIR = """
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 8]}>
#mma1 = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 64, 16]}>
#mma2 = #ttg.amd_mfma<{version = 3, warpsPerCTA = [4, 1], instrShape = [32, 32, 8], isTransposed = true}>
  %s = tt.dot %q, %k, %z : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma}>> * tensor<32x64xbf16, #ttg.dot_op<{opIdx = 1, parent = #mma}>> -> tensor<64x64xf32, #mma> loc(#loc1)
"""  # noqa: E501
WGMMA = """
  %o = ttng.warp_group_dot %p, %v, %a {isAsync = true} : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma1}>> * !ttg.memdesc<32x128xbf16, #shared, #smem, mutable> -> tensor<64x128xf32, #mma1> loc(#loc2)
"""  # noqa: E501
MFMA = """
  %o = tt.dot %p, %v, %a : tensor<16x64xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma2}>> * tensor<64x32xbf16, #ttg.dot_op<{opIdx = 1, parent = #mma2}>> -> tensor<16x32xf32, #mma2> loc(#loc2)
"""  # noqa: E501


def test_products_that_are_computed_more_than_once_are_found() -> None:
    assert repetition(TTGIR) == 2.0
    assert repetition(TTGIR + WGMMA) == pytest.approx(4 / 3)
    assert repetition(TTGIR.replace("[8, 1]", "[4, 2]")) == 1.0
    assert repetition(TTGIR.partition("  %s")[0] + MFMA) == 8.0
    assert repetition("") == 1.0


def test_listings_of_amd_are_read_by_loop() -> None:
    text = """
        scratch_store_dwordx4 off, v[0:3], s32 ; 16-byte Folded Spill
    .LBB0_1:
        v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
        scratch_load_dword v1, off, s32
        s_cbranch_scc1 .LBB0_1
        s_endpgm
    """
    code = gcn_instructions(text)
    (loop,) = inner_loops(code, GCN.product)
    assert len(loop) == 3
    assert spilled_bytes(code, GCN.spill_store) == 16
    assert spilled_bytes(loop, GCN.spill_load) == 4
