"""Tuned choices: where they hold, where they do not and why, and how they travel."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ringray
from ringray.attention.arguments import resolve
from ringray.attention.call import DEFAULTS
from ringray.attention.tensor_arguments import TensorArguments
from ringray.base.errors import UserError
from ringray.comm.ring import connect
from ringray.partition import BALANCED
from ringray.traffic.mask import Mask
from ringray.tuning import lookup
from ringray.tuning import table as tuned

PLACE = tuned.Place("NVIDIA H200", "k" * 64, "2.11", "3.6")
CHOICE = {
    "partition": "striped", "transport": "hybrid:2", "backward": "query-side", "backend": "triton",
    "blocks": "forward=128x64/8/2",
}  # fmt: skip


def buckets(**other: Any) -> tuned.Buckets:
    given: dict[str, Any] = {
        "ring_size": 4, "threads": 0, "dtype": "bfloat16", "seq_len": 16000, "batch": 1, "heads": 8,
        "kv_heads": 2, "head_dim": 128, "backward": True,
    }  # fmt: skip
    given |= other
    mask = {item.name: given.pop(item.name) for item in fields(Mask) if item.name in given}
    return tuned.buckets(Mask(**mask), **given)


def bucket(**other: Any) -> tuned.Bucket:
    return buckets(**other).strategy


def entry(use: tuned.Use = "strategy", **other: Any) -> tuned.Entry:
    given: dict[str, Any] = {
        "place": PLACE, "bucket": bucket(), "choice": CHOICE, "sweep": "abcdef0123", "when": 1.0,
    }  # fmt: skip
    return tuned.Entry(use, **(given | other))


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    lookup.anything_tuned.cache_clear()
    lookup.for_process.cache_clear()
    yield
    lookup.anything_tuned.cache_clear()
    lookup.for_process.cache_clear()


def test_shapes_of_one_bucket_share_a_choice() -> None:
    assert bucket() == bucket(seq_len=16384)
    assert bucket() == bucket(seq_len=8193)
    assert bucket(window=20000) == bucket()  # reaches over everything
    assert bucket(window=100) == bucket(window=127) == bucket(window=(100, 0))
    assert bucket(chunk=16000) == bucket(prefix=0) == bucket()
    assert bucket(window=20000, global_tokens=4) == bucket()
    assert bucket(window=100, global_tokens=4) == bucket(window=100, global_tokens=3)
    assert bucket(window=100, global_tokens=4) != bucket(window=100)
    assert bucket(window=100, shared_prefix=4) != bucket(window=100)
    assert bucket(causal=False, window=(20000, None)) == bucket(causal=False)
    for other in (
        {"seq_len": 16385}, {"seq_len": 8192}, {"ring_size": 8}, {"heads": 16}, {"kv_heads": 8},
        {"head_dim": 64}, {"dtype": "float16"}, {"causal": False}, {"window": 100},
        {"documents": (0, 5000, 16000)}, {"backward": False}, {"batch": 2}, {"chunk": 4096},
        {"prefix": (9,)},
        {"causal": False, "window": (100, None)}, {"causal": False, "window": (None, 100)},
    ):  # fmt: skip
        assert bucket(**other) != bucket(), other


def test_everything_open_takes_the_tuned_strategy() -> None:
    tuned.add([entry()])
    found = lookup.strategy(buckets(), PLACE, backend="triton")
    assert (found.partition, found.transport, found.backward, found.blocks) == (
        "striped", "hybrid:2", "query-side", "forward=128x64/8/2",
    )  # fmt: skip
    assert "abcdef01" in found.source


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"hardware": "NVIDIA H100"}, "NVIDIA H200, now NVIDIA H100"),
        ({"kernels": "other"}, "kernels (kkkkkkkkkkkk, now other)"),
        ({"torch": "2.12"}, "torch (2.11, now 2.12)"),
        ({"triton": None}, "triton (3.6, now None)"),
    ],
)
def test_an_entry_of_another_place_is_not_used(where: dict[str, Any], said: str) -> None:
    tuned.add([entry()])
    found = lookup.strategy(buckets(), replace(PLACE, **where), backend="triton")
    assert (found.partition, found.transport, found.blocks) == ("zigzag", "ring", None)
    assert said in found.source


def test_what_is_given_stays() -> None:
    tuned.add([entry()])
    same = lookup.strategy(buckets(), PLACE, partition="striped", backend="triton")
    assert same.transport == "hybrid:2"
    other = lookup.strategy(buckets(), PLACE, partition="contiguous", backend="triton")
    assert (other.partition, other.transport) == ("contiguous", "ring")
    assert "tuned with partition=striped" in other.source
    walk = lookup.strategy(buckets(), PLACE, backward="query-side", backend="triton")
    assert (walk.transport, walk.backward) == ("hybrid:2", "query-side")
    # Ulysses, say, has no other walk back than the one that it was tuned with.
    walk = lookup.strategy(buckets(), PLACE, backward="reverse", backend="triton")
    assert (walk.transport, walk.backward) == ("ring", "reverse")
    assert "tuned with backward=query-side" in walk.source
    cut = lookup.strategy(buckets(), PLACE, blocks="forward=64x64/4/2", backend="triton")
    assert cut.blocks == "forward=64x64/4/2"


def test_blocks_of_another_backend_are_not_used() -> None:
    choice = {"backend": "triton", "blocks": "forward=64x64/4/3"}
    tuned.add([entry(), entry("kernel", bucket=buckets().kernel, choice=choice)])
    assert lookup.strategy(buckets(), PLACE, backend="aten").blocks is None
    zigzag = lookup.strategy(buckets(), PLACE, partition="zigzag", backend="aten")
    assert zigzag.blocks is None


def test_auto_takes_another_backend_that_was_compared() -> None:
    choice = {"backend": "flash", "blocks": None, "compared": ["flash", "triton"]}
    tuned.add([entry("kernel", bucket=buckets().kernel, choice=choice)])
    found = lookup.strategy(buckets(), PLACE, backend="triton", backend_open=True)
    assert (found.backend, found.blocks) == ("flash", None)
    assert "backend and blocks: backend=flash compared=flash+triton (tuned by" in found.source
    # What is fastest on Hopper need not be elsewhere: cuDNN's kernels are slower on an A100.
    elsewhere = replace(PLACE, hardware="NVIDIA A100-SXM4-80GB")
    other = lookup.strategy(buckets(), elsewhere, backend="triton", backend_open=True)
    assert other.backend == "triton"
    named = lookup.strategy(buckets(), PLACE, backend="triton")
    assert (named.backend, named.blocks) == ("triton", None)
    alone = lookup.strategy(buckets(), PLACE, backend="aten", backend_open=True)
    assert alone.backend == "aten"
    blocks = "dq=16x16/4/1"
    cut = lookup.strategy(buckets(), PLACE, backend="triton", backend_open=True, blocks=blocks)
    assert (cut.backend, cut.blocks) == ("triton", blocks)


def test_blocks_of_a_kernel_hold_for_every_ring_of_such_hops() -> None:
    hop = bucket(ring_size=1, seq_len=4096, heads=4, kv_heads=1)
    choice = {"backend": "triton", "blocks": "forward=64x64/4/3"}
    tuned.add([entry("kernel", bucket=hop, choice=choice)])
    for wanted in (
        buckets(), buckets(ring_size=2, seq_len=8192), buckets(heads=32, kv_heads=8),
        buckets(ring_size=6, seq_len=6 * 4096), buckets(window=9000),
    ):  # fmt: skip
        found = lookup.strategy(wanted, PLACE, backend="triton")
        assert (found.partition, found.blocks) == ("zigzag", "forward=64x64/4/3")
    assert lookup.strategy(buckets(ring_size=8), PLACE, backend="triton").blocks is None


def test_the_younger_of_two_stays(tmp_path: Path) -> None:
    older = entry(choice={**CHOICE, "partition": "contiguous"}, when=0.5)
    for first, second in ((entry(), older), (older, entry())):
        path = tmp_path / f"{first.when}.json"
        tuned.add([first], path)
        tuned.add([second], path)
        assert tuned.read(path) == [entry()]


def test_who_add_at_the_same_time_do_not_undo_each_other(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    sizes = range(2, 10)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        one_each = [[entry(bucket=bucket(ring_size=size))] for size in sizes]
        list(pool.map(tuned.add, one_each, [path] * len(one_each)))
    assert {one.bucket.ring_size for one in tuned.read(path)} == set(sizes)


def test_an_exported_table_is_used_where_it_is_put(tmp_path: Path) -> None:
    tuned.write([entry()], tmp_path / "shipped.json")
    tuned.folder().mkdir(parents=True)
    (tmp_path / "shipped.json").rename(tuned.folder() / "ours.json")
    assert lookup.strategy(buckets(), PLACE, backend="triton").partition == "striped"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use": "luck"}, "entries[1].use: got 'luck', expected 'strategy' or 'kernel'"),
        ({"choice": {"partition": "zig"}}, "entries[1].choice.partition: got 'zig', expected one"),
        ({"choice": {"colour": 1}}, "entries[1].choice.colour: unknown field, expected some of"),
        ({"place": {"hardware": "x"}}, "entries[1].place.kernels: Field required"),
        ({"metrics": {"a": float("nan")}}, "entries[1].metrics.a: got nan, expected a finite"),
    ],
)
def test_a_mistake_is_told_with_entry_field_given_and_expected(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    tuned.write([entry(), entry()], path)
    data = json.loads(path.read_text())
    data["entries"][1] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        tuned.read(path)
    assert f"t.json: is not a table of tuned choices: {said}" in str(caught.value)


def test_a_file_keeps_what_an_entry_says(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned.write([entry(choice={"transport": "ring", "partition": "zigzag"})], path)
    assert tuned.read(path) == [entry(choice={"transport": "ring", "partition": "zigzag"})]
    data = json.loads(path.read_text())
    del data["entries"][0]["place"]["device"], data["entries"][0]["metrics"]
    data["entries"][0] |= {"note": "ignored", "sweep": "a\x1b[1m"}
    path.write_text(json.dumps(data))
    (read,) = tuned.read(path)
    assert (read.place.device, read.metrics, read.sweep) == ("cuda", {}, "a\ufffd[1m")


def test_a_broken_table_does_not_stop_the_op(caplog: pytest.LogCaptureFixture) -> None:
    tuned.folder().mkdir(parents=True)
    (tuned.folder() / "broken.json").write_text("?")
    assert not lookup.anything_tuned()
    assert "broken.json" in caplog.text


def test_the_op_takes_what_was_tuned_for_its_call(caplog: pytest.LogCaptureFixture) -> None:
    here = bucket(
        ring_size=1, threads=torch.get_num_threads(), dtype="float32", seq_len=50, heads=4,
        kv_heads=2, head_dim=16, backward=False,
    )  # fmt: skip
    choice = {"partition": "striped", "transport": "bidirectional", "backward": "planned"}
    choice |= {"backend": "aten", "blocks": 32}  # type: ignore[dict-item]
    tuned.add([entry(place=tuned.here(), bucket=here, choice=choice)])
    q, k, v = (torch.randn(1, heads, 50, 16) for heads in (4, 2, 2))
    settings = DEFAULTS | {"partition": "auto", "transport": "auto"}
    with caplog.at_level("INFO", logger="ringray"):
        job, _ = resolve(q, k, v, TensorArguments(), settings, connect(None), needs_grad=False)
    assert (job.layout.partition, job.call.strategy.blocks) == ("striped", 32)
    assert "abcdef01" in caplog.text
    out = ringray.ring_attention(q, k, v, partition="auto", transport="auto")
    assert torch.equal(out, ringray.ring_attention(q, k, v, blocks=32))
    q, k, v = (x.repeat(1, 1, 2, 1) for x in (q, k, v))
    longer, _ = resolve(q, k, v, TensorArguments(), settings, connect(None), needs_grad=False)
    assert (longer.layout.partition, longer.call.strategy.blocks) == ("zigzag", None)


def test_the_op_deals_for_a_tuned_balanced_and_keeps_what_is_dealt() -> None:
    cu = (0, 10, 60)
    here = bucket(
        ring_size=1, threads=torch.get_num_threads(), dtype="float32", seq_len=60, heads=4,
        kv_heads=2, head_dim=16, backward=False, documents=cu,
    )  # fmt: skip
    choice = {"partition": BALANCED, "transport": "direct", "backward": "planned"}
    tuned.add([entry(place=tuned.here(), bucket=here, choice=choice)])
    q, k, v = (torch.randn(1, heads, 60, 16) for heads in (4, 2, 2))

    def strategy(partition: Any) -> Any:
        settings = DEFAULTS | {"partition": partition, "transport": "auto"}
        packed = TensorArguments(cu_seqlens=torch.tensor(cu))
        job, _ = resolve(q, k, v, packed, settings, connect(None), needs_grad=False)
        return job.layout.partition, job.call.strategy.transport

    even, weighted = (ringray.deal(60, 1, cu_seqlens=cu, weights=x) for x in (None, [2.0]))
    assert strategy("auto") == strategy(BALANCED) == strategy(even) == (even, "direct")
    assert even != weighted
    assert strategy(weighted) == (weighted, "direct")
    assert strategy("zigzag") == ("zigzag", "ring")
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "backward": False}
    name = ringray.tuned_strategy(
        ring_size=1, seq_len=60, documents=True, threads=torch.get_num_threads(), **shape
    ).partition
    assert name == BALANCED
    with pytest.raises(ValueError, match=r"got .balanced. alone, expected ringray"):
        ringray.local_positions(name, 60, 2, 0)


@pytest.mark.parametrize(("tuned_one", "taken"), [("reference", "reference"), ("cudnn", "aten")])
def test_the_op_takes_the_tuned_backend_where_it_can(
    tuned_one: str, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = 2 * len(tuned_one)  # another problem each time
    q = torch.randn(1, 4, rows, 16)
    here = buckets(
        ring_size=1, threads=torch.get_num_threads(), dtype="float32", seq_len=rows, heads=4,
        kv_heads=4, head_dim=16, backward=False,
    )  # fmt: skip
    choice = {"backend": tuned_one, "blocks": None, "compared": ["aten", tuned_one]}
    tuned.add([entry("kernel", place=tuned.here(), bucket=here.kernel, choice=choice)])

    def backend(**other: Any) -> str:
        job, _ = resolve(
            q, q, q, TensorArguments(), DEFAULTS | other, connect(None), needs_grad=False
        )
        return job.call.strategy.backend

    assert backend() == taken
    assert ("the tuned backend is not used" in caplog.text) == (tuned_one == "cudnn")
    assert backend(backend="aten") == backend(softcap=20.0) == "aten"


def test_auto_is_settled_before_it_is_compiled() -> None:
    q = torch.randn(1, 2, 16, 16)
    compiled = torch.compile(ringray.ring_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="tuned_strategy returns them"):
        compiled(q, q, q, transport="auto")


def test_lookups_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.add([entry()])
    monkeypatch.setenv("RINGRAY_TUNED", "0")
    assert not lookup.anything_tuned()
    found = lookup.strategy(buckets(), PLACE, backend="triton")
    assert (found.partition, found.transport, found.blocks) == ("zigzag", "ring", None)
    assert "RINGRAY_TUNED" in found.source
