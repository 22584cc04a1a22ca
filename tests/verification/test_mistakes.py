"""Comparisons, and the names of mistakes: a model of a few lines in place of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringray.verification import Verdict, batches
from ringray.verification.compare import cross_entropy
from ringray.verification.observation import Array, Observation
from ringray.verification.probes import Evidence, run_probes
from ringray.verification.world import FailedRank, Refused
from tests.support.verification import verified

RANKS, VOCABULARY = 2, 8
HEAD = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
Batch = dict[str, Array]
Model = Callable[[Batch], Array]


def attend(batch: Batch, seen: Array) -> Array:
    """Returns logits (B, S, V): each row is the mean of the tokens that it sees, (S, S)."""
    return seen / seen.sum(1, keepdims=True) @ np.eye(VOCABULARY)[batch["input_ids"]] @ HEAD


def leaking(batch: Batch) -> Array:
    """Takes no boundaries of documents."""
    return attend(batch, np.tri(batch["input_ids"].shape[1]))


def apart(batch: Batch) -> Array:
    document = batches.document_of(batch)
    return attend(batch, np.tri(len(document)) * (document[:, None] == document))


def scaled(batch: Batch) -> Array:
    return 1.5 * leaking(batch)


def mixing(batch: Batch) -> Array:
    """Mixes rows of the batch."""
    logits = leaking(batch)
    return logits + 0.1 * logits[::-1]


def overflowing(batch: Batch) -> Array:
    return leaking(batch) * np.inf


def mean_loss(logits: Array, labels: Array) -> float:
    """Returns the mean over labels, NaN without any; a model rounds otherwise than the oracle."""
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.ravel()) * (1 + 1e-8)


class StandIn:
    """Processes whose models are functions; ``dim``: the dimension that is dealt to ranks."""

    ranks = RANKS

    def __init__(self, single: Model, split: Model, dim: int = 1, loss: Any = None) -> None:
        self.single, self.split, self.dim, self.loss = single, split, dim, loss
        constants = {"LOSS": "mean", "UNIT": 1, "BATCH": 4, "SEQ_LEN": 32}
        self.facts: dict[str, Any] = {
            "constants": constants,
            "vocabulary": VOCABULARY,
            "dtype": "torch.float32",
        }

    def alone(self, batch: Batch, **options: Any) -> Observation:
        logits, labels = self.single(batch), batch["shift_labels"]
        rows = np.arange(labels.size).reshape(labels.shape)
        return Observation(rows, logits, mean_loss(logits, labels))

    def together(self, batch: Batch, **options: Any) -> list[Observation]:
        if options.get("training"):
            raise Refused("ValueError: ranks draw other seeds\nTraceback")
        logits, labels = self.split(batch), batch["shift_labels"]
        rows = np.arange(labels.size).reshape(labels.shape)
        parts = (np.split(x, RANKS, self.dim) for x in (rows, logits, labels))
        loss = self.loss or (lambda *_: self.alone(batch).loss)
        return [Observation(row, x, loss(x, label)) for row, x, label in zip(*parts, strict=True)]


def probed(world: Any, *probes: str) -> tuple[dict[str, str], list[str]]:
    """Returns what probes come to, and the kinds of mistakes."""
    evidence = Evidence(world)
    results = dict(run_probes(evidence, probes))
    return results, [x.mistake for x in evidence.findings if x.mistake != "follows"]


NO_BOUNDARIES = "skipped: the model takes no boundaries of documents: nothing to compare"


@pytest.mark.parametrize(
    ("single", "split", "result", "mistakes"),
    [
        (apart, apart, "right", []),
        (leaking, apart, "right", []),  # ours keeps documents apart, whatever the model says
        (leaking, leaking, NO_BOUNDARIES, []),
        (apart, leaking, "wrong", ["documents"]),
        (leaking, scaled, "wrong", ["attention"]),
    ],
)
def test_documents_are_compared_with_what_the_model_can(
    single: Model, split: Model, result: str, mistakes: list[str]
) -> None:
    results, kinds = probed(StandIn(single, split), "documents", "causality")
    assert results["documents"] == result
    assert kinds == mistakes
    assert (results["causality"] == "right") == (mistakes != ["documents"])


@pytest.mark.parametrize(("single", "split"), [(leaking, mixing), (mixing, leaking)])
def test_rows_of_the_batch_that_see_each_other_are_told(single: Model, split: Model) -> None:
    results, kinds = probed(StandIn(single, split), "logits", "causality")
    assert kinds == ["batch"]
    assert set(results.values()) == {"wrong"}
    assert probed(StandIn(mixing, mixing), "logits", "causality")[1] == []


def test_a_target_that_deals_rows_gets_packed_documents_in_as_many() -> None:
    evidence = Evidence(StandIn(apart, apart, dim=0))  # type: ignore[arg-type]
    assert len(evidence.packed.batch["input_ids"]) == 4
    assert len(Evidence(StandIn(apart, apart)).packed.batch["input_ids"]) == 1  # type: ignore[arg-type]


def test_numbers_of_one_process_that_are_not_finite_are_no_reference() -> None:
    with pytest.raises(Refused, match="one process computes numbers in float64 that are not fin"):
        _ = Evidence(StandIn(overflowing, overflowing)).plain  # type: ignore[arg-type]


def local_mean(logits: Array, labels: Array) -> float:
    """Returns the mean over a rank's labels, or 0."""
    return float(np.nan_to_num(mean_loss(logits, labels)))


@pytest.mark.parametrize(
    ("loss", "kind"), [(local_mean, "mean-of-means"), (mean_loss, "no-labels")]
)
def test_a_rank_without_labels_is_a_matter_of_labels(loss: Any, kind: str) -> None:
    """Gives rows as many labels each, so that means differ only where a rank has none."""
    results, kinds = probed(StandIn(leaking, leaking, dim=0, loss=loss), "loss", "uneven")
    assert results == {"loss": "right", "uneven": "wrong"}
    assert kinds == [kind]


def placed(batch: Batch) -> Array:
    """Looks at each token and its position."""
    return HEAD[batch["input_ids"]] * np.cos(batch["position_ids"])[..., None]


class Grid(StandIn):
    """Four ranks: each has half of the batch's rows, and half of each, as if that were all."""

    ranks = 4

    def together(self, batch: Batch, **options: Any) -> list[Observation]:
        labels = batch["shift_labels"]
        places = np.arange(labels.size).reshape(labels.shape)
        results = []
        for part in [x for half in np.split(places, 2) for x in np.split(half, 2, axis=1)]:
            own = {name: x.ravel()[part] for name, x in batch.items() if x.ndim == 2}
            own["position_ids"] = np.broadcast_to(np.arange(part.shape[1]), part.shape)
            results.append(Observation(part, self.split(own), self.alone(batch).loss))
        return results


@pytest.mark.parametrize(
    ("model", "mistake"), [(leaking, "own-shard"), (placed, "positions-restart")]
)
def test_ranks_may_hold_other_rows_of_the_batch_too(model: Model, mistake: str) -> None:
    assert probed(Grid(model, model), "logits")[1] == [mistake]


class Summed(StandIn):
    """A target whose loss is a sum over labels."""

    def alone(self, batch: Batch, **options: Any) -> Observation:
        result = super().alone(batch, **options)
        result.loss *= (batch["shift_labels"] != batches.IGNORED).sum()
        return result


class FailsWithDocuments(StandIn):
    def together(self, batch: Batch, **options: Any) -> list[Observation]:
        if "cu_seqlens" in batch:
            raise FailedRank("rank 1 raises IndexError", 1, "")
        return super().together(batch, **options)


def test_whole_sequences_are_compared_where_documents_fail() -> None:
    evidence = Evidence(FailsWithDocuments(leaking, leaking, loss=local_mean))  # type: ignore[arg-type]
    results = dict(run_probes(evidence, ["documents", "causality", "loss"]))
    assert results == {"documents": "wrong", "causality": "right", "loss": "wrong"}
    assert [x.mistake for x in evidence.findings] == ["fails", "mean-of-means"]


@pytest.mark.parametrize("split", [leaking, apart])
def test_a_sum_of_losses_is_right_with_documents(split: Model) -> None:
    def total(logits: Array, labels: Array) -> float:
        return mean_loss(logits, labels) * int((labels != batches.IGNORED).sum())

    world = Summed(leaking, split, loss=total)
    world.facts["constants"]["LOSS"] = "sum"
    assert probed(world, "loss", "labels") == ({"loss": "right", "labels": "right"}, [])


def test_dropout_that_needs_one_seed_is_told() -> None:
    results, _ = probed(StandIn(leaking, leaking), "dropout")
    assert results["dropout"] == (
        "skipped: with dropout, and another seed on each rank, it raises ValueError: ranks draw "
        "other seeds"
    )


def test_a_verdict_counts_what_was_compared() -> None:
    verdict = Verdict("model.py", "ring", 2, {"logits": "right", "documents": "skipped: none"})
    assert str(verdict).endswith("1 of 2 probes compared, 1 skipped, in 0 s")


@pytest.mark.parametrize(
    ("model", "mistake"), [("lost", "positions-restart"), ("misplaced", "local")]
)
def test_what_stands_above_attention_is_no_matter_of_keys(model: str, mistake: str) -> None:
    verdict = verified(f"tests.support.verified:{model}", probes=["logits"])
    (finding,) = verdict.findings
    assert (finding.mistake, finding.layer) == (mistake, "places")
