"""Kind train: plans, bad specs, and trainings that end, are interrupted and go on."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ringray.base.errors import SpecError
from ringray.lab.plan.plan import build
from ringray.lab.predict.hardware import parse_fleet
from ringray.lab.specs.model import parse
from ringray.lab.trial.training import from_config
from ringray.training.recipe import Degrees
from tests.support import place as drive
from tests.support.place import Place

DOCS = Path(__file__).parents[3] / "docs"
SPEC = """
version: 1
name: tiny-train
kind: train
ring: {{size: {size}, device: cpu}}
problem: {{seq_len: 254, batch: 4, dtype: float32{problem}}}
training: {{model: llama-tiny, steps: {steps}, mlp_rows: 64{train}}}
"""


def spec(size: int = 2, steps: int = 6, train: str = "", problem: str = "", more: str = "") -> str:
    return SPEC.format(size=size, steps=steps, train=train, problem=problem) + more


def test_a_plan_counts_steps_of_the_whole_model() -> None:
    made = build(parse(spec(size=4, train=", dp: [1, 2, 4]")))
    assert [from_config(trial.config)[1] for trial in made.runnable] == [
        Degrees(1, 4), Degrees(2, 2), Degrees(4, 1),
    ]  # fmt: skip
    costs = [trial.predicted for trial in made.runnable]
    model, _, recipe = from_config(made.runnable[0].config)
    for cost in costs:
        assert cost.flops == 3 * 4 * model.forward_flops(recipe.seq_len)
    sent = [cost.sent_bytes for cost in costs if cost]
    assert sent[0] > sent[1] > sent[2] == 0
    config = made.runnable[0].config
    assert (config.problem.heads, config.problem.kv_heads, config.problem.head_dim) == (4, 2, 16)
    assert (config.measure.warmup, config.measure.repeats, config.measure.baseline) == (0, 6, None)
    # A larger model on a cluster: the ring's own limits and times.
    large = build(parse(spec(size=64, train=", tp: 4").replace("llama-tiny", "llama3-8b")
                        .replace("254", "256k").replace("float32", "bfloat16")),
                  parse_fleet("h100:8x8"))  # fmt: skip
    (trial,) = large.runnable
    assert 1e3 < trial.predicted.time_ms < 1e6
    assert 2e9 < trial.predicted.peak_memory_bytes < 80e9


def test_a_pool_has_the_ranks_and_sequences_of_its_replicas() -> None:
    text = spec(size=4, train=", dp: [2, 4], pool: [false, true]")
    made = build(parse(text)).runnable
    assert len(made) == 4
    for trial, cost in ((trial, trial.predicted) for trial in made):
        config = trial.config
        _, degrees, recipe = from_config(config)
        dp, strategy = config.training.dp, config.strategy
        if config.training.pool:
            assert (degrees, recipe.pool) == (Degrees(cp=4), dp)
            assert (strategy.partition, strategy.transport) == ("balanced", "direct")
        else:
            assert (degrees, recipe.pool) == (Degrees(dp, 4 // dp), 1)
            assert (strategy.partition, strategy.transport) == ("zigzag", "ring")
        # Sequences of equal length share ranks as they do in rings of their own.
        (twin,) = (t for t in made if t.config.training.dp == dp and t is not trial)
        assert cost.flops == twin.predicted.flops
        assert cost.peak_memory_bytes == pytest.approx(twin.predicted.peak_memory_bytes, rel=0.05)
        assert cost.sent_bytes == pytest.approx(twin.predicted.sent_bytes, rel=0.05)
        assert (cost.sent_bytes == 0) == (dp == 4)
        assert config.inner == twin.config.inner == 1
    asked = build(parse(text + "strategy: {partition: striped, transport: 'hybrid:2'}")).trials
    assert {trial.config.strategy.partition for trial in asked} == {"striped"}
    assert [trial.config.inner for trial in asked] == [2, 2, 1, 2]
    for train in ("", ", pool: false"):  # as before there were pools
        assert parse(spec(train=train)).digest.startswith("df5fee063496")
    assert "pool" not in build(parse(spec())).trials[0].config.as_dict()


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"train": ", dp: 2, pool: true, micro_batch: 2"}, "training.micro_batch", "or a pool"),
        (
            {"kind": "retrieval", "size": 4,
             "train": ", dp: 2, tp: 2, pool: true, examined: [132, 130]"},
            "training.examined", "whose 65 rows of a rank are no multiple of tp = 2",
        ),
        ({"size": 4, "train": ", dp: 2, pp: 2, pool: true"}, "training.pp", "with a pool"),
        ({"size": 3, "train": ", dp: 2"}, "ring.size", "multiple of dp x tp x pp = 2"),
        ({"size": 4, "train": ", tp: 4"}, "training.tp", "expected a divisor of kv_heads = 2"),
        ({"size": 4, "more": "strategy: {transport: ulysses}"}, "strategy.transport", "4"),
        ({"train": ", scores: whole"}, "training.scores", "need cp 1"),
        ({"problem": ", window: 7"}, "problem.window", "a decoder trains without it"),
        ({"train": ", dp: [1, 2], checkpoints: x"}, "training.checkpoints", "a spec of one point"),
        ({"more": "search: {method: halving}"}, "search.method", "kind train measures every"),
        ({"kind": "retrieval", "train": ", corpus: x"}, "training.corpus", "makes its own data"),
        ({"kind": "retrieval", "train": ", examined: [256, 99]"}, "training.examined", "got 99"),
        ({"kind": "in-context-rl", "train": ", vocab: 200"}, "training.vocab", "at least 206"),
    ],
)  # fmt: skip
def test_bad_trainings_are_known_before_anything_starts(
    changes: dict[str, Any], field: str, says: str
) -> None:
    kind = changes.pop("kind", "train")
    with pytest.raises(SpecError) as raised:
        build(parse(spec(**changes).replace("kind: train", f"kind: {kind}")))
    assert raised.value.field == field
    assert says in str(raised.value)


def test_data_that_cannot_be_used_is_known_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    np.save(tmp_path / "large.npy", np.array([1, 2, 300]))
    for train, field, says in (
        ("corpus: [nowhere]", "training.corpus", "nowhere is neither a file nor a folder"),
        (f"corpus: {tmp_path / 'empty.txt'}", "training.corpus", "is empty"),
        (f"corpus: {tmp_path / 'large.npy'}", "training.vocab", "got 256, expected at least 301"),
        (f"corpus: {DOCS}, tokenizer: x", "training.tokenizer", "expected the folder"),
    ):
        with pytest.raises(SpecError) as raised:
            build(parse(spec(train=f", {train}")), machine=1 << 34)
        assert raised.value.field == field
        assert says in str(raised.value)
        build(parse(spec(train=f", {train}")))  # a cluster may have it


REACH = """
version: 1
name: reach
kind: max-context
ring: {size: [1, 2], device: cpu}
problem: {seq_len: [256, 64k], dtype: float32}
training: {model: llama-tiny, steps: 1, mlp_rows: 64, layers: 16, kept: all}
limits: {rank_memory: 64MiB}
"""


def test_a_reach_has_lengths_between_two_and_is_searched_by_bisection() -> None:
    made = build(parse(REACH))
    assert made.spec.search.method == "bisect"
    lengths = [trial.config.problem.seq_len for trial in made.trials if trial.config.ring.size == 1]
    assert (lengths[0], lengths[-1]) == (256, 65536)
    assert all(1 < b / a < 1.27 for a, b in pairwise(lengths))
    assert all(length % 64 == 0 for length in lengths)
    alone = [trial for trial in made.trials if trial.config.ring.size == 1]
    pruned = [trial.config.problem.seq_len for trial in alone if trial.pruned]
    assert pruned == lengths[-len(pruned) :], "what surely does not fit is not tried"
    for wrong, says in (
        (REACH.replace("[256, 64k]", "4k"), "expected two lengths"),
        (REACH.replace("[256, 64k]", "[4k, 1k]"), "expected two lengths"),
        (REACH + "search: {method: grid}", "expected bisect, for kind max-context"),
        (REACH + "search: {objectives: median_ms}", "expected context, for kind max-context"),
        (spec(more="search: {method: bisect}"), "for kind train"),
    ):
        with pytest.raises(SpecError, match=says):
            build(parse(wrong))


@pytest.mark.exhaustive
def test_twice_the_ranks_reach_about_twice_the_context(place: Place) -> None:
    done = place.run("run", place.spec(REACH), "--no-tracking")
    assert done.code == 0, done.out + done.err
    rows = [row for row in place.trials("reach") if row.status in ("ok", "oom")]
    longest = {}
    for ranks in (1, 2):
        some = [row for row in rows if row.config["ring_size"] == ranks]
        works = [row.config["seq_len"] for row in some if row.status == "ok"]
        fails = [row.config["seq_len"] for row in some if row.status == "oom"]
        longest[ranks] = max(works)
        assert max(works) < min(fails, default=1 << 30) <= max(fails, default=1 << 30)
        assert len(some) < 9
        (last,) = (row for row in some if row.config["seq_len"] == max(works))
        assert last.metrics["context"] == max(works)
        assert last.metrics["peak_memory_bytes"] <= 64 << 20
    assert longest[2] >= 1.8 * longest[1]


@pytest.mark.exhaustive
def test_a_task_is_examined_the_same_on_every_ring(place: Place) -> None:
    text = spec(train=", examined: [200, 131], micro_batch: 2, rope_theta: 500, kept: all")
    text = text.replace("size: 2", "size: [1, 3]").replace("kind: train", "kind: retrieval")
    text += "measure: {replicas: 2}\nlimits: {rank_memory: 16MiB}\n"
    done = place.run("run", place.spec(text))
    assert done.code == 0, done.out + done.err
    rows = place.trials("tiny-train")
    assert [row.status for row in rows] == ["ok"] * 4
    by_seed = [[row for row in rows if row.config["replica"] == seed] for seed in (0, 1)]
    for alone, ring in by_seed:
        assert ring.samples["loss"] == pytest.approx(alone.samples["loss"], rel=1e-4)
        for length in (131, 200):
            scores = [row.samples[f"score {length}"] for row in (alone, ring)]
            assert scores[1] == pytest.approx(scores[0], abs=0.05)  # close calls
            assert len(scores[0]) == 7
        assert alone.metrics["score"] == pytest.approx(np.mean(alone.samples["score 200"]))
    assert by_seed[0][0].samples["loss"] != by_seed[1][0].samples["loss"]
    for row in rows:
        assert row.metrics["sent_bytes"] == row.predicted["sent_bytes"]
        assert row.metrics["peak_memory_bytes"] == pytest.approx(
            row.predicted["peak_memory_bytes"], rel=0.25
        )


@pytest.mark.exhaustive
def test_a_training_that_ended_is_told_without_a_step(place: Place) -> None:
    folder = place.home / "kept"
    train = f", checkpoints: {folder}, save_every: 3, examined: 140"
    text = spec(train=train).replace("kind: train", "kind: retrieval")
    assert place.run("run", place.spec(text), "--no-tracking").code == 0
    (row,) = place.trials("tiny-train")
    again = place.run("run", place.spec(text), "--no-tracking", "--again")
    assert again.code == 0, again.out + again.err
    (told,) = place.trials("tiny-train")
    assert told.started > row.started
    for name in ("loss", "gradient_norm", "score"):
        assert told.metrics[name] == pytest.approx(row.metrics[name])
    assert told.samples["loss"] == row.samples["loss"]
    fewer = place.run("run", place.spec(text.replace("steps: 6", "steps: 4")), "--no-tracking")
    assert fewer.code == 1
    assert "holds a training of 6 steps: give as many, or another folder" in fewer.out


@pytest.mark.exhaustive
def test_losses_memory_and_traffic_are_as_planned(place: Place) -> None:
    text = spec(size=4, train=f", corpus: [{DOCS}], dp: [1, 2], tp: [1, 2]")
    lines = place.home / "a.jsonl"
    done = place.run("run", place.spec(text), "--json", lines)
    assert done.code == 0, done.out + done.err
    rows = place.trials("tiny-train")
    assert len(rows) == 4
    losses = [row.samples["loss"] for row in rows]
    assert [len(some) for some in losses] == [6] * 4
    for some in losses[1:]:
        assert some == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    for row in rows:
        assert row.metrics["sent_bytes"] == row.predicted["sent_bytes"]
        assert row.metrics["loss"] == row.samples["loss"][-1]
        assert 0 < row.metrics["mfu"] < 1
        assert row.metrics["gradient_norm"] > 0
    assert place.run("run", place.spec(text), "--json", lines).code == 0
    assert len(place.lines(lines)) == 4, "nothing is measured again"


@pytest.mark.exhaustive
def test_a_pool_sends_what_is_planned(place: Place) -> None:
    """Random tokens, whose sequences are the documents, and a task, which is examined."""
    for kind in ("train", "retrieval"):
        text = spec(size=4, train=", dp: 2, pool: [false, true]").replace(
            "kind: train", f"kind: {kind}"
        )
        done = place.run("run", place.spec(text.replace("tiny-train", kind)), "--no-tracking")
        assert done.code == 0, done.out + done.err
        apart, pool = place.trials(kind)
        assert pool.samples["loss"] == pytest.approx(apart.samples["loss"], rel=1e-4)
        assert pool.metrics["sent_bytes"] == pool.predicted["sent_bytes"] > 0
        assert pool.metrics["peak_memory_bytes"] == pytest.approx(
            pool.predicted["peak_memory_bytes"], rel=0.25
        )


@pytest.mark.chaos
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(place: Place) -> None:
    folder = place.home / "kept"
    train = f", corpus: [{DOCS}], save_every: 5, checkpoints: {folder}"
    driver = place.start("run", place.spec(spec(steps=40, train=train)), "--no-tracking")
    drive.wait_until("two checkpoints", lambda: len(list(folder.glob("*/.metadata"))) >= 2)
    place.ranks()[1].kill()
    done = place.end(driver)
    assert done.code == 0, done.out + done.err
    (row,) = place.trials("tiny-train")
    assert row.attempts == 2
    assert len(row.samples["loss"]) == 40
    assert len(row.samples["ms"]) < 35, "it did not begin again"
    steps = json.loads(next(folder.glob("*40/facts.json")).read_text())
    assert steps["losses"] == row.samples["loss"]


@pytest.mark.exhaustive
def test_curves_reach_mlflow_while_a_training_runs(place: Place) -> None:
    text = spec(size=1, steps=3000).replace("seq_len: 254", "seq_len: 60")
    driver = place.start("run", place.spec(text))
    uri = f"sqlite:///{place.home / 'mlflow.db'}"

    def seen() -> list[Any]:
        with suppress(MlflowException):
            client = MlflowClient(uri)
            found = client.search_runs([e.experiment_id for e in client.search_experiments()])
            for run in found:
                history = client.get_metric_history(run.info.run_id, "live/loss/1")
                if len(history) >= 2:
                    return history
        return []

    history = drive.wait_until("two points", seen)
    assert driver.poll() is None
    steps = [one.step for one in history]
    assert steps == sorted(set(steps))
    assert 0 < steps[-1] < 3000
    assert all(0 < one.value < 10 for one in history)
    driver.send_signal(signal.SIGINT)
    assert place.end(driver).code == 130
    assert not list(place.home.rglob("progress/*"))
