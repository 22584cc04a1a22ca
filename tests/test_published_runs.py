"""Trainings that others measured, rings as other systems compute them, and striped rows: figures of
``experiments/published`` beside what it predicts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pytest

from ringray.lab.predict import hardware, rates
from tests.support import records

RING = {
    "ring_size": 4, "seq_len": 65536, "batch": 1, "heads": 8, "kv_heads": 2, "head_dim": 128,
    "transport": "ring", "partition": "zigzag", "causal": True,
}  # fmt: skip


class Module(Protocol):
    def __call__(self, name: str) -> Any: ...


@pytest.fixture(scope="module")
def module() -> Iterator[Module]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(records.ROOT / "experiments" / "published"))
        yield importlib.import_module


def test_trainings_take_the_time_and_memory_that_are_published(module: Module) -> None:
    shown = module("runs").trl()
    seconds = [run.errors.seconds for run in shown if run.errors.seconds is not None]
    gigabytes = [run.errors.gigabytes for run in shown if run.errors.gigabytes is not None]
    assert len(seconds) == 7
    assert len(gigabytes) == 6
    assert max(map(abs, seconds)) <= 0.2
    assert max(map(abs, gigabytes)) <= 0.1


def test_context_parallelism_is_in_the_published_order(module: Module) -> None:
    """Ulysses before the ring at 64k, memory by the degree."""
    runs = module("runs").prime()
    rate = {(run.cp, run.style): run.predicted for run in runs}
    assert rate[2, "ulysses"] > 1.1 * rate[2, "ring"] > 1.1 * rate[4, "ring"]
    assert rate[4, "ulysses"] > 1.1 * rate[4, "ring"]
    assert max(abs(run.predicted / run.published - 1) for run in runs) < 0.15
    memory = {run.cp: run.rows_gibibytes for run in runs}
    assert memory[1] > memory[2] > memory[4]


def test_striped_rows_are_as_much_faster_as_the_paper_prints(module: Module) -> None:
    ratios = module("striped").ratios()
    assert len(ratios) == 6
    assert max(abs(ratio.error) for ratio in ratios) <= 0.12


def test_tiles_without_a_visible_pair_are_skipped(module: Module) -> None:
    """Of four ranks, each of 4 x 4 tiles: ten of sixteen have a visible pair."""
    striped = module("striped")
    work = striped.work(4, 64, [4, 4], 0.0)
    assert work == ((10 + 3 * 16, 6), (4 * 10, 4 * 6), 0)
    assert work.ratio(0.0) == 58 / 40
    assert work.ratio(1.0) == 1
    assert striped.skipping(work, work.ratio(0.25)) == pytest.approx(0.25)
    assert striped.work(4, 64, [4, 8], 0.0).striped == (4 * 6, 4 * 2)


@pytest.mark.parametrize("name", ["runs", "striped"])
def test_records_hold_what_the_commands_print(module: Module, name: str) -> None:
    assert records.rows(f"published-{name}.json") == module(name).lines()


def test_offloaded_inputs_leave_the_device(module: Module) -> None:
    runs = module("runs")
    facts = runs.read()["trl"]
    run = next(run for run in facts["runs"] if run["model"] == "qwen3-0.6b")
    held, gone = (runs.trained(run | {"offload": flag}, facts) for flag in (False, True))
    of_layer = (run["context"] // run["gpus"]) * 1024 * 2
    # All of 28 layers but the one that computes.
    assert held.gigabytes - gone.gigabytes == pytest.approx(27 * of_layer / 1e9)
    host = hardware.table()[facts["hardware"]].host
    assert gone.seconds - held.seconds == pytest.approx(2 * 28 * of_layer / host)


def test_layers_save_what_transformers_saves(module: Module) -> None:
    """Counted on a layer without memory, attention keeping its inputs and its result."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    qwen = importlib.import_module("transformers.models.qwen3.modeling_qwen3")

    class Kernel(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
            ctx.save_for_backward(*inputs, out)
            return out

    rows, saved = 4096, {}

    def pack(tensor: Any) -> Any:
        saved[tensor.untyped_storage()._cdata] = tensor  # holds it, so that no other has its name
        return tensor

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(**sizes, head_dim=128, intermediate_size=768)
    config._attn_implementation = "counted"
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    functions["counted"] = lambda _, q, k, v, *__, **___: (Kernel.apply(q, k, v).transpose(1, 2), 0)
    with torch.device("meta"):
        layer = qwen.Qwen3DecoderLayer(config, 0).to(torch.bfloat16)
        x = torch.empty(1, rows, 256, dtype=torch.bfloat16, requires_grad=True)
        rotation = torch.empty(1, rows, 128, dtype=torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x, position_embeddings=(rotation, rotation))
    large = (one.untyped_storage().nbytes() for one in saved.values() if rows in one.shape)
    widths = module("runs").Widths(256, 512, 256, 768, 0, 0)
    # Beside it: the layer's input, which checkpointing keeps; a number of each norm; cos and sin.
    counted = sum(large) / rows + 2 * 256
    assert counted == pytest.approx(widths.saved + 4 * (2 + 4 + 2) + 2 * 128, rel=0.01)


def test_steps_cost_a_call_and_the_bytes_beside_it(module: Module) -> None:
    theirs = module("theirs")
    on = hardware.table()["h100"]
    fields = {"forward": {"q": {"first": 3, "step": 5, "half": 7, "end": 11}, "kv": {"begin": 2}}}
    plain = theirs.Implementation.read({"forward": {"q": {}, "kv": {}}})
    counted = theirs.Implementation.read(fields)
    rows, q, kv = 65536 // 4, 8 * 128, 2 * 2 * 128

    def seconds(how: Any, **changed: Any) -> float:
        return float(theirs.seconds(RING | changed, "forward", on, how))

    further = seconds(counted) - seconds(plain)
    # The last rank: three steps see half of other keys. Another: its half of queries costs more.
    steps = max(3 * 5, *(earlier * 5 + (3 - earlier) * (5 + 7) / 2 for earlier in range(3)))
    moved = rows * (q * (3 + steps + 11) + 2 * kv)
    assert further == pytest.approx(moved / (theirs.STREAMED * on.memory_bandwidth), rel=0.02)
    alone = seconds(counted, ring_size=1, seq_len=rows)
    curve = rates.find(on, "bfloat16", 128, "forward", heads=8, kv_heads=2)
    length = np.full(1, float(rows))
    pairs = length * (length + 1) / 2
    (call,) = curve.seconds(4 * 128 * 8 * pairs, length, length, pairs)
    assert alone == pytest.approx(on.call + call)
    full = seconds(plain, ring_size=1, seq_len=rows, causal=False)
    contiguous = seconds(plain, partition="contiguous")
    assert contiguous == pytest.approx(alone + 3 * full)
    assert contiguous > 1.4 * seconds(plain)


def test_keys_that_take_longer_than_a_step_are_waited_for(module: Module) -> None:
    theirs = module("theirs")
    on = hardware.table()["h100"]
    slow = on.model_copy(update={"inner": on.inner.model_copy(update={"bandwidth": 1e9})})
    how = theirs.Implementation.read({"gradients": 4, **{
        way: {"q": {}, "kv": {}} for way in ("forward", "backward")
    }})  # fmt: skip
    chunk = 65536 // 4 * 2 * 2 * 128
    for way, sent in (("forward", 3 * 2), ("backward", 3 * 2 + 4 * 4)):
        waited = theirs.seconds(RING, way, slow, how)
        assert waited == pytest.approx(sent * chunk / 1e9, rel=0.1)
        assert theirs.seconds(RING, way, on, how) < 0.2 * waited


def test_striped_rows_and_exchanges_of_heads_are_counted(module: Module) -> None:
    theirs = module("theirs")
    on = hardware.table()["h100"]
    streamed = theirs.STREAMED * on.memory_bandwidth
    own = 65536 // 4 * 8 * 128  # elements of Q of a rank; of K and V half as many

    def seconds(q: dict[str, float], **changed: Any) -> float:
        how = theirs.Implementation.read({"forward": {"q": q, "kv": {}}})
        return float(theirs.seconds(RING | changed, "forward", on, how))

    striped = [seconds(q, partition="striped") for q in ({"shifted": 900}, {})]
    assert striped[0] - striped[1] == pytest.approx(3 * 900 * own / streamed, rel=1e-3)
    ulysses = [seconds(q, transport="ulysses", kv_heads=4) for q in ({"exchange": 900}, {})]
    assert ulysses[0] - ulysses[1] == pytest.approx(900 * own / streamed)
    slow = on.model_copy(update={"inner": on.inner.model_copy(update={"bandwidth": 1e9})})
    plain = theirs.Implementation.read({"forward": {"q": {}, "kv": {}}})
    waited = theirs.seconds(RING | {"transport": "ulysses", "kv_heads": 4}, "forward", slow, plain)
    assert waited - ulysses[1] == pytest.approx(2 * 3 * own * 3 / 4 / 1e9, rel=0.02)
