"""Plans: which trials, in which order, what they cost."""

from __future__ import annotations

import itertools
import json

import pytest

from ringray.base.errors import SpecError
from ringray.lab.plan import plan
from ringray.lab.report import words
from ringray.lab.specs import model as spec
from ringray.lab.trial.config import TrialConfig
from tests.support import brute_force

HEAD = "version: 1\nname: p\nkind: latency\n"
EVERY_PARTITION = "strategy: {partition: [contiguous, striped, zigzag, zigzag-token]}\n"


def build(body: str, head: str = HEAD) -> plan.Plan:
    return plan.build(spec.parse(head + body, "p.yaml"))


def test_every_point_once_in_order() -> None:
    made = build(
        "ring: {size: [2, 4]}\n"
        "problem: {seq_len: [64, 128, 256], direction: [forward, forward+backward]}\n"
        "measure: {replicas: 3}\n" + EVERY_PARTITION
    )
    points = [
        (
            c.ring.size,
            c.problem.seq_len,
            c.problem.direction,
            c.measure.replica,
            c.strategy.partition,
        )
        for c in (trial.config for trial in made.trials)
    ]
    assert points == list(
        itertools.product(
            (2, 4), (64, 128, 256), ("forward", "forward+backward"), (0, 1, 2),
            ("contiguous", "striped", "zigzag", "zigzag-token"),
        )
    )  # fmt: skip
    assert [trial.index for trial in made.trials] == list(range(len(points)))
    assert made.runnable == made.trials
    assert set(made.varying) == {"ring_size", "seq_len", "direction", "partition", "replica"}


def test_shared_work_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = "problem: {seq_len: [96, 1000, 4097]}\n"
    read = spec.parse(HEAD + "ring: {size: [2, 3]}\n" + lengths + EVERY_PARTITION, "p.yaml")
    alone = plan.build(read)
    monkeypatch.setattr(plan, "_MANY", 2)
    assert plan.build(read, processes=2) == alone


def test_keys_name_points_and_nothing_else() -> None:
    body = "ring: {size: [2, 4]}\nproblem: {seq_len: [64, 128]}\nmeasure: {replicas: 2}\n"
    made = build(body)
    keys = [trial.key for trial in made.trials]
    assert len(set(keys)) == 8
    assert keys == [trial.key for trial in build(body).trials]
    # Known keys stay known when the sweep grows, and do not depend on its name or limits.
    grown = build(
        body.replace("[64, 128]", "[32, 64, 128]") + "limits: {retries: 7}\n",
        HEAD.replace("name: p", "name: q"),
    )
    assert set(keys) < {trial.key for trial in grown.trials}
    by_partition = build(body + EVERY_PARTITION).trials
    assert len({trial.key for trial in by_partition}) == 32
    assert {
        trial.key for trial in by_partition if trial.config.strategy.partition == "zigzag"
    } == set(keys)


def test_a_config_is_what_its_dict_says() -> None:
    for documents, blocks in (
        ("null", "64"),
        ("3", "null"),
        ("{lengths: [60, 0, 4]}", "dq=64x64/4/2"),
    ):
        text = f"problem: {{seq_len: 64, documents: {documents}}}\nstrategy: {{blocks: {blocks}}}\n"
        config = build(text).trials[0].config
        assert TrialConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
        later = {"chunk", "prefix", "global_tokens", "shared_prefix"}
        assert not later & set(config.as_dict())  # digests of earlier versions hold
    masks = "causal: false, window: [{left: 3, right: 5}, {right: 5}], chunk: 9"
    for trial in build(f"problem: {{seq_len: 64, {masks}}}\n").trials:
        assert TrialConfig.from_dict(json.loads(json.dumps(trial.config.as_dict()))) == trial.config
        assert trial.config.problem.mask.chunk == 9
        assert trial.config.problem.mask.window in {(3, 5), (None, 5)}


def test_impossible_points_are_pruned_with_their_field() -> None:
    made = build(
        "problem: {seq_len: 64, heads: [8, 6], kv_heads: [4, 3], causal: [true, false], "
        "window: [null, 7]}\n"
    )
    for trial in made.trials:
        c = trial.config.problem
        divides = c.heads % c.kv_heads == 0
        means = c.causal or c.window is None
        assert (trial.pruned is None) == (divides and means), c
        assert (trial.predicted is None) == (trial.pruned is not None)
        if trial.pruned is not None:
            expected = "problem.window" if divides else "problem.kv_heads"
            assert trial.pruned.field == expected
            assert str(trial.pruned).startswith(f"{expected}: ")
    said = {str(trial.pruned) for trial in made.trials if trial.pruned}
    assert "problem.kv_heads: 8 heads is not a multiple of 3 K/V heads" in said
    assert len(made.runnable) == 6


@pytest.mark.parametrize(
    ("problem", "line", "field", "says"),
    [
        ("heads: 8\n  kv_heads: 3", 7, "problem.kv_heads", "8 heads is not a multiple of 3"),
        (
            "heads: 8\n  kv_heads: [3, 5]", 7, "problem.kv_heads",
            r"not a multiple of 3.*no other of 2 points can run",
        ),
        ("causal: false\n  window: 5", 7, "problem.window", "got 5 without causal, expected"),
        (
            "window: 3\n  prefix: 9\n  global_tokens: 5", 8, "problem.global_tokens",
            "got 5 with prefix 9, expected one or the other",
        ),
        (
            "heads: 8\n  documents: {lengths: [10, 20]}", 7, "problem.documents",
            "sum to 30, expected seq_len 64",
        ),
    ],
)  # fmt: skip
def test_a_spec_of_which_nothing_can_run(problem: str, line: int, field: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        build(f"problem:\n  seq_len: 64\n  {problem}\n")
    assert (caught.value.line, caught.value.field) == (line, field)
    assert str(caught.value).startswith(f"p.yaml:{line}: {field}: ")
    assert caught.value.exit_code == 2


def test_flops_are_those_of_the_pairs_that_see_each_other() -> None:
    made = build(
        "ring: {size: [1, 3, 4]}\n"
        "problem: {seq_len: [37, 48], batch: 2, heads: 4, kv_heads: 2, head_dim: 24, "
        "value_head_dim: [null, 40], "
        "causal: [true, false], window: [null, 5], documents: [null, 3], "
        "direction: [forward, forward+backward]}\n" + EVERY_PARTITION
    )
    assert len(made.runnable) == 3 * 2 * 2 * (2 * 2 * 2 - 2) * 2 * 4
    more = build(
        "ring: {size: [3]}\n"
        "problem: {seq_len: 37, heads: 2, head_dim: 24, causal: [true, false], chunk: [null, 7], "
        "window: [null, {left: 4, right: 2}, {left: 4, right: 0}], prefix: [null, 9], "
        "documents: [null, 3]}\n" + EVERY_PARTITION
    )
    assert len(more.runnable) == 2 * 2 * (2 * 2 + 3) * 4
    for trial in (*made.runnable, *more.runnable):
        c, ranks = trial.config.problem, trial.config.ring.size
        pairs = int(brute_force.seen(c.mask, c.seq_len).sum())
        keys, values = (2 * pairs * dim * c.heads * c.batch for dim in (24, c.value_dim))
        backward = 3 * keys + 2 * values if c.has_backward else 0
        assert trial.predicted.flops == keys + values + backward, c
        assert 0 < trial.predicted.balance <= 1
        width = 24 + c.value_dim
        shard = -(-c.seq_len // ranks) * c.batch * width * (c.heads + c.kv_heads)
        assert trial.predicted.peak_memory_bytes >= shard * 2, c  # q, k, v, out in bfloat16
        if ranks == 1:
            assert trial.predicted.sent_bytes == trial.predicted.messages == 0
            assert trial.predicted.balance == 1


def test_the_timeout_grows_with_the_longest_trial() -> None:
    small = build("problem: {seq_len: 64}\n")
    assert small.spec.limits.trial_timeout == 120.0
    large = build("problem: {seq_len: [64, 128k]}\n")
    longest = max(trial.measuring_s for trial in large.trials)
    assert large.spec.limits.trial_timeout == pytest.approx(10 * longest)
    assert words.warnings(small) == words.warnings(large) == []
    tight = build("problem: {seq_len: [64, 128k]}\nlimits: {trial_timeout: 2s}\n")
    assert tight.digest == large.digest
    (warned,) = words.warnings(tight)
    assert warned.startswith(
        "warning: 1 of 2 trials will probably exceed limits.trial_timeout (2.0 s): up to "
    )
