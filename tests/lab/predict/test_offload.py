"""Predicted trainings whose layers' inputs leave the device: memory, copies, advice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringray.base.errors import UserError
from ringray.lab.plan import plan
from ringray.lab.predict import advise, layouts, rank_memory, transformer
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet, parse_fleet
from ringray.lab.predict.rank_memory import Training
from ringray.lab.specs import model as specs
from ringray.models.sizes import named
from ringray.training.recipe import Degrees

MODEL, FLEET = named("llama3-8b", {}), parse_fleet("h100:8")
CONTEXT = 1 << 20
STREAM = CONTEXT // 8 * MODEL.hidden * 2  # bytes of a layer's input on a ring of 8
LARGE = 20e9  # bytes of attention: more than the loss takes


def costs(degrees: Degrees, context: int = CONTEXT, on: Fleet = FLEET) -> tuple[Cost, Cost]:
    """Of the attention of a layer: forward, and both passes."""
    request = layouts.TrainingRequest(MODEL, on, context, 1)
    both = request.attention(degrees)
    return request.cost(degrees, both.changed(direction="forward")), request.cost(degrees, both)


@pytest.mark.parametrize("kept", ["input", "attention"])
def test_inputs_of_all_but_two_layers_leave(kept: Any) -> None:
    degrees, how = Degrees(cp=8), Training(CONTEXT, kept=kept)
    here, away = (
        rank_memory.memory(MODEL, degrees, replace(how, offload=some), LARGE)
        for some in (False, True)
    )
    assert here.kept - away.kept == (MODEL.layers - 2) * STREAM
    assert here.working == away.working
    assert rank_memory.away_bytes(MODEL, degrees, how) == MODEL.layers * STREAM
    # The loss meets none of them.
    how = replace(how, loss_rows=None)
    here, away = (
        rank_memory.memory(MODEL, degrees, replace(how, offload=some), 1e9)
        for some in (False, True)
    )
    assert here.total - away.total == MODEL.layers * STREAM


def test_ranks_and_stages_share_what_leaves() -> None:
    how = Training(CONTEXT, 4, offload=True)
    whole = rank_memory.away_bytes(MODEL, Degrees(), how)
    for degrees, share in ((Degrees(tp=2), 2), (Degrees(pp=2), 1), (Degrees(dp=4, pp=2), 2)):
        assert rank_memory.away_bytes(MODEL, degrees, how) == whole / share


def test_copies_hide_behind_layers_but_for_the_first_of_a_backward_pass() -> None:
    degrees, how = Degrees(cp=8), Training(CONTEXT)
    forward, both = costs(degrees)
    here = transformer.step(MODEL, degrees, how, FLEET, forward, both)
    away = replace(how, offload=True)
    parts = transformer.step(MODEL, degrees, away, FLEET, forward, both)
    assert here.offload == 0
    assert parts.offload == pytest.approx(STREAM / FLEET.hardware.host)
    assert parts.total == pytest.approx(here.total + parts.offload)
    # Over a link on which nothing hides, all copies there and back are waited for.
    slow = replace(FLEET, hardware=FLEET.hardware.model_copy(update={"host": 1e3}))
    parts = transformer.step(MODEL, degrees, away, slow, forward, both)
    copies = (2 * MODEL.layers + 1) * STREAM / 1e3
    assert parts.offload == pytest.approx(copies, rel=1e-3)


def test_advice_sends_inputs_away_where_nothing_else_fits() -> None:
    request = layouts.TrainingRequest(MODEL, FLEET, CONTEXT, 1, fixed={"cp": 8})
    (best,) = advise.advise(request, 1)
    assert not best.training.offload
    longer = replace(request, context=2_500_000)
    (best,) = advise.advise(longer, 1)
    assert best.training.offload
    says = advise.assumptions(longer, best)[-1]
    # 610 GiB, each input in a block of pinned memory whose bytes are a power of two
    assert says.startswith("inputs of layers wait in 1.00 TiB of a node's memory, of 1.82 TiB; 52.")
    # The memory of the host is a limit, too.
    small = FLEET.hardware.model_copy(update={"host_memory": 600e9})
    with pytest.raises(UserError, match=r"63.7 GiB more than can be used .*in 1.00 TiB"):
        advise.advise(replace(longer, on=replace(FLEET, hardware=small)), 1)
    unknown = FLEET.hardware.model_copy(update={"host_memory": None})
    longest = layouts.max_context(replace(request, on=replace(FLEET, hardware=unknown)))
    assert longest.training.offload
    assert longest.training.context > 2_500_000


def test_a_spec_is_planned_with_it() -> None:
    text = (
        "version: 1\nname: away\nkind: train\nring: {size: 2, device: cpu}\n"
        "problem: {seq_len: 4k}\ntraining: {layers: 16, mlp_rows: 64, offload: [false, true]}\n"
    )
    here, away = (
        trial.predicted.peak_memory_bytes for trial in plan.build(specs.parse(text)).trials
    )
    assert here - away == 14 * 2048 * 64 * 2
