"""Compiled code of the default configurations, for GPUs that are not there.

Compiled in a process of their own: this one may have triton's interpreter switched on.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import triton

from ringray_kernels.config import TARGETS
from ringray_kernels.defaults import CANDIDATES, SPECIALISED
from ringray_kernels.inspect.compiled import Case
from ringray_kernels.inspect.report import HEAD_DIMS, default_cases

RECORDS = """
import json
from ringray_kernels.config import BlockConfig
from ringray_kernels.inspect.compiled import Case
from ringray_kernels.inspect.report import compile_all, record
from tests.kernels.sass import hazards, whole_loops
for case, made in compile_all(CASES):
    line = record(case, made)
    if not isinstance(made, str):
        line |= {"hazards": hazards(made), "fp8": "E4M3" in made.listing}
        line |= {"tcgen05 of 8 bits": "UTCQMMA" in made.listing}
        if "specialised" in line["config"]:
            line["whole"] = [loop._asdict() for loop in whole_loops(made)]
    with path.open("a") as file:
        file.write(json.dumps(line) + "\\n")
"""
ROOT = Path(__file__).parents[2]
PRODUCTS = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}

# Bytes a thread moves to and from its stack in the inner loops; none where nothing is said. By
# triton version; another version is held to compile, and to the products.
CEILINGS: dict[str, dict[tuple[str, str, int, str], int]] = {
    "3.6": {
        ("sm_90", "forward", 128, "bfloat16"): 48,
        ("sm_90", "forward", 256, "bfloat16"): 340,
        ("sm_90", "dkv", 128, "bfloat16"): 712,
        ("sm_90", "dq", 256, "bfloat16"): 4,
        ("sm_90", "dkv", 256, "bfloat16"): 628,
        ("sm_90", "forward", 256, "float32"): 56,
        ("sm_90", "dq", 256, "float32"): 368,
        ("sm_90", "dkv", 256, "float32"): 680,
    },
    "3.9": {
        ("sm_90", "forward", 128, "bfloat16"): 480,
        ("sm_90", "forward", 256, "bfloat16"): 760,
        ("sm_90", "dkv", 128, "bfloat16"): 812,
        ("sm_90", "dq", 256, "bfloat16"): 4,
        ("sm_90", "dkv", 256, "bfloat16"): 84,
        ("sm_100", "dkv", 128, "bfloat16"): 24,
        ("sm_100", "dkv", 256, "bfloat16"): 164,
        ("sm_80", "dq", 256, "float32"): 72,
        ("sm_80", "dkv", 256, "float32"): 192,
        ("sm_90", "forward", 256, "float32"): 32,
        ("sm_90", "dq", 256, "float32"): 332,
        ("sm_90", "dkv", 256, "float32"): 676,
        ("sm_100", "forward", 256, "float32"): 32,
        ("sm_100", "dq", 256, "float32"): 284,
        ("sm_100", "dkv", 256, "float32"): 684,
    },
}
# The specialised kernels, by triton version: the most instructions and spilled bytes of a loop over
# whole tiles, and the most instructions of it beside no product.
WHOLE = {
    "3.6": {
        ("forward", 64): (420, 0, 85), ("forward", 128): (470, 0, 120),
        ("forward", 256): (415, 16, 172), ("dq", 64): (215, 0, 36), ("dq", 128): (265, 0, 36),
        ("dkv", 64): (255, 0, 15), ("dkv", 128): (320, 60, 18),
    },
    "3.9": {
        ("forward", 64): (425, 0, 85), ("forward", 128): (470, 0, 120),
        ("forward", 256): (430, 20, 172), ("dq", 64): (220, 0, 36), ("dq", 128): (275, 0, 36),
        ("dkv", 64): (275, 0, 15), ("dkv", 128): (320, 0, 15),
    },
}  # fmt: skip

INSTALLED = ".".join(triton.__version__.split(".")[:2])


def targets() -> list[str]:
    """The targets that are held: all, or those of images with an older triton."""
    return ["sm_90"] if INSTALLED in ("3.6", "3.7", "3.8") else list(PRODUCTS)


def written(tmp_path: Path, code: str) -> list[dict[str, Any]]:
    """The JSON lines that ``code`` writes to ``path``."""
    path = tmp_path / "compiled.jsonl"
    program = f"""
from pathlib import Path
path = Path({str(path)!r})
{code}"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


def compiled(tmp_path: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns the records of some cases, each of which has neither hazards nor serial products."""
    lines = written(tmp_path, RECORDS.replace("CASES", repr(cases)))
    assert len(lines) == len(cases)
    for line in lines:
        assert (line["status"], line["serialised"], line["hazards"]) == ("ok", False, []), line
    return lines


def of_hopper() -> list[Case]:
    """Returns every specialised default and candidate."""
    every = [
        (d, default) for d in SPECIALISED for default in (SPECIALISED[d], *CANDIDATES.get(d, ()))
    ]
    chosen = {
        (kernel, d, config) for d, default in every for kernel, config in default.given.items()
    }
    return [
        Case("sm_90", kernel, head_dim, config=config)
        for kernel, head_dim, config in sorted(chosen, key=str)
        if config.path == "specialised"
    ]


DEFAULTS = default_cases([target for target in targets() if target in ("sm_90", "gfx942")], [128])
EIGHT_BITS = [
    Case(target, "forward", 128, quantized=True)
    for target in targets()
    if target in ("sm_90", "sm_100")
]
SLOPES = [Case("sm_90", kernel, 64, bias=(1, 2)) for kernel in ("forward", "dkv")]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """Returns the records of all quick cases, compiled together: it keeps each core busy."""
    cases = [*of_hopper(), *DEFAULTS, *EIGHT_BITS, *SLOPES]
    lines = compiled(tmp_path_factory.mktemp("compiled"), cases)
    return dict(zip(cases, lines, strict=True))


@pytest.mark.exhaustive
def test_every_default(tmp_path: Path) -> None:
    cases = default_cases(targets(), HEAD_DIMS)
    assert len(cases) == len(targets()) * 3 * (6 + 2)
    hold(compiled(tmp_path, cases))


def test_the_defaults(records: dict[Case, dict[str, Any]]) -> None:
    assert len(DEFAULTS) == 3 * len({case.target for case in DEFAULTS}) > 0
    hold([records[case] for case in DEFAULTS])


def hold(lines: list[dict[str, Any]]) -> None:
    """Fails where a default does not fit its GPU, leaves tensor cores unused, or spills."""
    for line in lines:
        case = (line["target"], line["kernel"], line["head_dim"], line["dtype"])
        assert 0 < line["shared_bytes"] <= TARGETS[line["target"]].shared_bytes, line
        half = line["dtype"] != "float32"
        instructions = line["instructions"]
        # fp32 takes tensor cores too (tf32), if small tiles leave Hopper's large ones unused.
        assert instructions[PRODUCTS[line["target"]]] > 0 or (
            not half and instructions["mma"] > 0
        ), line
        ceilings = CEILINGS.get(INSTALLED)
        if ceilings is not None:
            assert line["inner_spilled"] <= ceilings.get(case, 0), line


def test_softmax_runs_beside_products_on_hopper(records: dict[Case, dict[str, Any]]) -> None:
    """In the loops over whole tiles every exponential of forward and dkv; of dq all but the two
    whose rows are at hand."""
    lines = [records[case] for case in of_hopper()]
    assert {line["kernel"] for line in lines} == {"forward", "dq", "dkv"}
    for line in lines:
        assert line["instructions"]["wgmma"] > 0, line
        assert line["instructions"]["bulk"] > 0, line
        instructions, spilled, outside = WHOLE.get(INSTALLED, {}).get(
            (line["kernel"], line["head_dim"]), (10**6,) * 3
        )
        assert len(line["whole"]) == 2, line  # one per warp group
        for loop in line["whole"]:
            missed = 2 if line["kernel"] == "dq" else 0
            assert 0 < loop["exponentials"] - missed <= loop["overlapped"], line
            assert loop["instructions"] <= instructions, line
            assert loop["spilled"] <= spilled, line
            assert loop["outside"] <= outside, line


@pytest.mark.exhaustive
def test_what_models_ask_for_compiles_without_spills_in_loops(tmp_path: Path) -> None:
    """MLA's head dims, a soft cap, a head dim beyond 256, ALiBi and learned biases."""
    features: list[dict[str, Any]] = [
        {"head_dim": 192, "value_dim": 128}, {"head_dim": 128, "softcap": 50.0}, {"head_dim": 512},
        {"head_dim": 128, "bias": (1, 2)}, {"head_dim": 128, "bias": (1, 2, 257)},
        {"head_dim": 128, "bias": (1, 2, 4096, 4096)},
    ]  # fmt: skip
    each = itertools.product(("sm_90", "gfx942"), ("forward", "dq", "dkv"), features)
    asked = [Case(target, kernel, **feature) for target, kernel, feature in each]
    for line in compiled(tmp_path, asked):
        most = {(1, 2, 257): 80, (1, 2, 4096, 4096): 1536}.get(tuple(line["bias"]), 0)
        assert line["inner_spilled"] <= most, line


# As ``CEILINGS``: the integers of Philox take registers beside the tiles.
DROPPED = {"3.9": {("sm_90", "dkv", 64): 16, ("sm_90", "forward", 128): 168}}


@pytest.mark.exhaustive
def test_dropout_fits_the_defaults(tmp_path: Path) -> None:
    """Registers for one block at least, products on tensor cores, and little on the stack."""
    each = itertools.product(("sm_80", "sm_90"), ("forward", "dq", "dkv"), (64, 128))
    for line in compiled(tmp_path, [Case(*case, dropout_p=0.1) for case in each]):
        assert line["registers"] <= 255, line
        assert line["instructions"][PRODUCTS[line["target"]]] > 0, line
        if ceilings := DROPPED.get(INSTALLED):
            case = (line["target"], line["kernel"], line["head_dim"])
            assert line["inner_spilled"] <= ceilings.get(case, 0), line


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
    lines = written(tmp_path, VARIANTS)
    assert len(lines) == 4 * 3
    for line in lines:
        assert line["variants"] == [1], line


def test_products_in_8_bits_and_slopes(records: dict[Case, dict[str, Any]]) -> None:
    """Instructions of e4m3, without spills in loops. Triton before 3.8 cannot compare a tuple that
    holds None with None."""
    assert all(case in records for case in SLOPES)  # without hazards or serial products
    for line in (records[case] for case in EIGHT_BITS):
        assert line["fp8"] if line["target"] == "sm_90" else line["tcgen05 of 8 bits"], line
        assert line["inner_spilled"] == 0, line
        assert line["instructions"][PRODUCTS[line["target"]]] > 0, line
