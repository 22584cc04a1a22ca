"""The partition ``balanced`` in specs, plans and trials: dealt for the mask of each point."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist

from ringray.base.errors import SpecError
from ringray.lab.kinds import correctness, decode, latency, overlap
from ringray.lab.kinds.base import RankContext
from ringray.lab.plan import plan
from ringray.lab.plan.expand import expand
from ringray.lab.predict import calibration, cost_model
from ringray.lab.specs.model import parse
from ringray.lab.trial import lengths
from ringray.lab.trial.config import TrialConfig
from ringray.partition import BALANCED, NAMES, PARTITIONS
from ringray.traffic import deal
from tests.support import ranks
from tests.support.point import point

LENGTHS = Path(__file__).parents[3] / "experiments" / "lengths"


def spec(kind: str, problem: str, strategy: str = "partition: balanced", size: int = 3) -> str:
    shape = "" if kind == "train" else "heads: 2, head_dim: 16, "
    return (
        f"version: 1\nname: b\nkind: {kind}\nring: {{size: {size}, device: cpu}}\n"
        f"problem: {{{shape}dtype: float32, {problem}}}\nstrategy: {{{strategy}}}\n"
        "measure: {warmup: 0, repeats: 2, baseline: null}\n"
    )


def test_each_point_is_dealt_for_its_own_mask() -> None:
    documents = "documents: [null, {lengths: [70, 10, 20]}, {lengths: [20, 10, 70]}]"
    text = spec("latency", f"seq_len: 100, {documents}", "partition: [zigzag, balanced]")
    made = plan.build(parse(text))
    configs = [trial.config for trial in made.runnable]
    assert [config.strategy.partition for config in configs] == ["zigzag", BALANCED] * 3
    dealt = [config.partition for config in configs if config.strategy.partition == BALANCED]
    assert dealt == [deal.deal(config.problem.mask, 3) for config in configs[::2]]
    assert len(set(dealt)) == 3
    assert [config.partition for config in configs[::2]] == ["zigzag"] * 3
    # Predicted by what is dealt: zigzag is even without documents only.
    balances = [trial.predicted.balance for trial in made.trials if trial.predicted]
    assert all(x > y for x, y in zip(balances[3::2], balances[2::2], strict=True))
    assert made.trials[3].predicted != made.trials[5].predicted


def test_trainings_deal_each_batch() -> None:
    """Stages take the same rows in each micro-batch, so a pipeline does not."""
    text = spec("train", "seq_len: 64, batch: 2", size=2).partition("measure")[0]
    assert len(plan.build(parse(text)).runnable) == 1
    with pytest.raises(SpecError, match="deal each micro-batch anew"):
        plan.build(parse(text + "training: {pp: 2}\n"))


@pytest.mark.parametrize(
    ("mask", "searched"),
    [
        ("window: 5", tuple(PARTITIONS)),
        ("documents: 4", NAMES),
        ("documents: {lengths: [40, 24]}", NAMES),
        ("chunk: 16", NAMES),
    ],
)
def test_open_partitions_are_dealt_where_documents_or_chunks_are(
    mask: str, searched: tuple[str, ...]
) -> None:
    text = spec("strategy-tune", f"seq_len: 64, {mask}", "partition: auto, transport: ring")
    tried = {config.strategy.partition for config in expand(parse(text), "cpu")}
    assert tried == {*searched}


def causal(per_rank: int, size: int, partition: str, transport: str, **mask: object) -> TrialConfig:
    return cost_model.causal_pass(
        ring_size=size, seq_len=per_rank * size, heads=32, kv_heads=8, head_dim=128,
        dtype="bfloat16", backward="planned", device="cuda", partition=partition,
        transport=transport, **mask,
    )  # fmt: skip


@pytest.mark.parametrize(("fleet", "size"), [("h100:8", 8), ("h100:8x8", 64)])
@pytest.mark.parametrize("transport", ["ring", "direct", "bidirectional"])
def test_one_long_document_takes_no_longer_than_in_zigzag(
    fleet: str, size: int, transport: str
) -> None:
    on = calibration.fleet(fleet)
    for rows in (8192, 32768):
        zigzag, dealt = (
            cost_model.predict(causal(rows, size, name, transport), on)
            for name in ("zigzag", BALANCED)
        )
        assert dealt.time_ms <= zigzag.time_ms
        assert dealt.sent_bytes <= zigzag.sent_bytes


@pytest.mark.parametrize("table", sorted(LENGTHS.glob("*.csv")), ids=lambda path: path.stem)
@pytest.mark.parametrize(("fleet", "size"), [("h100:8", 8), ("h100:4x8", 32), ("h100:8x8", 64)])
def test_packed_documents_are_faster_dealt_and_sent_straight(
    table: Path, fleet: str, size: int
) -> None:
    on, ratios = calibration.fleet(fleet), []
    for seed in range(3):
        documents = lengths.drawn(lengths.read(table), 16384 * size, seed)
        ring, straight = (
            cost_model.predict(causal(16384, size, *names, documents=documents), on)
            for names in (("zigzag", "ring"), (BALANCED, "direct"))
        )
        ratios.append(straight.time_ms / ring.time_ms)
        assert straight.balance > 0.92
    assert mean(ratios) < 0.65
    assert max(ratios) < 0.75


def test_calls_are_as_large_as_those_of_any_rank() -> None:
    config = point(ring_size=4, seq_len=8000, documents=(3000, 2500, 2500), partition=BALANCED)
    dealt = deal.deal(config.problem.mask, 4)
    pieces = [[len(piece) for piece in dealt.ranges(rank)] for rank in range(4)]
    assert (len(pieces[0]), max(pieces[0])) == (3, 1000)
    sizes = cost_model._sizes(config, calibration.fleet("cpu:2"))
    assert (sizes.runs, sizes.longest) == (4, max(max(some) for some in pieces)) == (4, 1375)
    for name, runs, longest in (("zigzag", 2, 1000), ("contiguous", 1, 2000), ("striped", 1, 2000)):
        ruled = config.changed(partition=name)
        sizes = cost_model._sizes(ruled, calibration.fleet("cpu:2"))
        assert (sizes.runs, sizes.longest) == (runs, longest)


# On real ranks


def trials_of_all_kinds_compute_what_was_planned(rank: int, size: int) -> None:
    context = RankContext(rank, torch.device("cpu"), dist.group.WORLD)
    mask = "seq_len: 101, documents: {lengths: [50, 7, 3, 20, 21]}"
    for module in (correctness, latency, overlap):
        kind = module.__name__.rpartition(".")[2]
        text = spec(kind, mask, "partition: balanced, transport: [ring, direct]", size)
        for trial in plan.build(parse(text)).runnable:
            report = module.run(trial.config, context)
            assert report.failure is None
            assert all(share <= 1 for share in report.errors.values()), report.errors
            sent = torch.tensor([report.values["sent_bytes"][0], report.messages])
            dist.all_reduce(sent)
            planned = trial.predicted
            assert sent.tolist() == [planned.sent_bytes, planned.messages], (kind, trial.config)
    (trial,) = plan.build(
        parse(spec("decode", "seq_len: 101, new_tokens: 2, direction: forward", size=size))
    ).runnable
    assert trial.config.partition.seq_len == 99  # type: ignore[union-attr]  # the context
    sent = torch.tensor(decode.run(trial.config, context).values["sent_bytes"][0])
    dist.all_reduce(sent)
    assert int(sent) == trial.predicted.sent_bytes


def test_trials() -> None:
    ranks.on_ring(3, (trials_of_all_kinds_compute_what_was_planned,))
