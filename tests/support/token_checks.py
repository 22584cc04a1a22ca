"""Checks of every rank of a real ring: log-probabilities, entropy and likeliest tokens, against
``torch.log_softmax`` of one process in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringray
from ringray.comm.batch import METER
from ringray.nn import (
    next_token_labels,
    sharded_linear_cross_entropy,
    token_entropy,
    token_log_probs,
    token_top_k,
)
from ringray.partition import NAMES
from tests.support.compile_checks import compiled
from tests.support.ranks import dealt

SEQ_LEN, HIDDEN, VOCABULARY = 37, 8, 24
CUTS = (0, 5, 5, 6, 20, SEQ_LEN)
EXACT: dict[str, Any] = {"atol": 1e-12, "rtol": 0}


def problem() -> tuple[Tensor, Tensor, nn.Linear, Tensor]:
    """Makes rows, labels, a head and a gradient of each row's number, in fp64."""
    torch.manual_seed(4)
    x = torch.randn(2, SEQ_LEN, HIDDEN, dtype=torch.float64) * 3
    labels = next_token_labels(torch.randint(0, VOCABULARY, (2, SEQ_LEN)), CUTS)
    head = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
    return x, labels, head, torch.randn(2, SEQ_LEN, dtype=torch.float64)


def in_one_process(logits: Tensor, labels: Tensor, temperature: float) -> dict[str, Tensor]:
    """Computes the definitions, with all logits at once."""
    log_probs = torch.log_softmax(logits / temperature, -1)
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return {
        "log_probs": picked.masked_fill(labels < 0, 0),
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "top": log_probs.topk(5).values.sum(-1),
    }


def here(x: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
    return {
        "log_probs": token_log_probs(x, labels, **options),
        "entropy": token_entropy(x, **options),
        "top": token_top_k(x, 5, **options)[0].sum(-1),
    }


def rows_are_exact(rank: int, size: int) -> None:
    """Values and gradients under every partition and a deal, which send nothing."""
    x, labels, head, upstream = problem()
    whole = x.clone().requires_grad_()
    want = in_one_process(head(whole), labels, 0.7)
    for name in NAMES:
        partition = dealt(name, SEQ_LEN, cu_seqlens=CUTS)
        where: dict[str, Any] = {"dim": 1, "partition": partition}
        mine, own = (ringray.shard(some, **where).requires_grad_() for some in (x, upstream))
        wanted = ringray.shard(labels, pad_value=-100, **where)
        before = METER.snapshot()
        for options in ({"head": head, "rows": 5}, {"rows": None}, {"rows": 5}):
            rows = mine if "head" in options else head(mine)
            got = here(rows, wanted, temperature=0.7, **options)
            for what, values in got.items():
                (grad,) = torch.autograd.grad(values, mine, own, retain_graph=True)
                (dwhole,) = torch.autograd.grad(want[what], whole, upstream, retain_graph=True)
                sent = METER.since(before)
                assert (sent.sent_bytes, sent.messages) == (0, 0)
                for mine_of, whole_of in ((values, want[what]), (grad, dwhole)):
                    full = ringray.unshard(mine_of.detach(), seq_len=SEQ_LEN, **where)
                    torch.testing.assert_close(
                        full, whole_of, **EXACT, msg=lambda text, w=(name, what): f"{w}: {text}"
                    )
            before = METER.snapshot()
    padding = ringray.shard(torch.zeros(2, SEQ_LEN), dim=1, pad_value=1) == 1
    rows = ringray.shard(labels, dim=1, pad_value=-100)
    logits = ringray.shard(head(x).detach(), dim=1)
    assert (token_log_probs(logits, rows)[padding] == 0).all()


def vocabulary_is_sharded(rank: int, size: int) -> None:
    """Columns of all ranks: what each gathers is three numbers a row, or k tokens; its gradient is
    that of its own columns."""
    x, labels, head, upstream = problem()
    logits = head(x).detach()
    logits[0, 3, :15] = -torch.inf  # on three ranks, all columns of the first
    labels[0, 3] = 20
    whole = logits.clone().requires_grad_()
    want = in_one_process(whole, labels, 0.7)
    # 0 * -inf of the definition
    want["entropy"] = torch.distributions.Categorical(logits=whole / 0.7).entropy()
    columns = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    mine = logits[..., columns].clone().requires_grad_()
    options: dict[str, Any] = {"vocab_group": dist.group.WORLD, "temperature": 0.7}
    gathered: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counting(dist.all_gather, gathered))
        got = here(mine, labels, rows=10, **options)
        if size > 1:
            rows = labels.numel()
            candidates = min(5, VOCABULARY // size)
            assert gathered == [
                3 * rows * 8,
                8,  # to compare labels
                3 * rows * 8,
                (2 + candidates) * rows * 8,
                candidates * rows * 8,
            ]
        gathered.clear()
        for what, values in got.items():
            (grad,) = torch.autograd.grad(values, mine, upstream)
            torch.testing.assert_close(values, want[what], **EXACT)
            (dwhole,) = torch.autograd.grad(want[what], whole, upstream, retain_graph=True)
            some = torch.isfinite(dwhole[..., columns])
            torch.testing.assert_close(grad[some], dwhole[..., columns][some], **EXACT)
        assert not gathered  # no message in a backward pass, nor in what it computes again
    values, tokens = token_top_k(mine, 5, **options)
    expected = torch.log_softmax(logits / 0.7, -1).topk(5)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(values, expected.values, **EXACT)
    # A head of these columns, of which some rows exist at a time.
    part = nn.Linear(HIDDEN, columns.stop - columns.start, dtype=torch.float64)
    part.load_state_dict({name: w[columns] for name, w in head.state_dict().items()})
    log_probs = token_log_probs(x, labels, head=part, rows=7, vocab_group=dist.group.WORLD)
    (dweight,) = torch.autograd.grad(log_probs, part.weight, upstream)
    expected_probs = in_one_process(head(x), labels, 1.0)["log_probs"]
    torch.testing.assert_close(log_probs, expected_probs, **EXACT)
    (dwhole,) = torch.autograd.grad(expected_probs, head.weight, upstream)
    torch.testing.assert_close(dweight, dwhole[columns], atol=1e-11, rtol=0)


def mistakes_are_told(rank: int, size: int) -> None:
    """On every rank: heads that are none on the last one, and labels that it has alone."""
    x, labels, _, _ = problem()
    head, last = nn.Linear(HIDDEN, 5, dtype=torch.float64), rank == size - 1
    same: dict[str, Any] = {"x": x, "labels": labels % 5, "head": head}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"head": head.weight}, "head: got Parameter, expected a module that makes logits"),
        ({"head": nn.Linear(7, 5)}, "head: got one of 7 features, expected 8"),
        ({"head": torch.sum}, "head: got .. from it, expected logits .2, 37, 'V'."),
        ({"head": lambda rows: [head(rows)]}, "head: got list from it"),
        ({"labels": (labels % 5).flip(1)}, "ranks of vocab_group got different ones"),
    ]
    for change, says in cases:
        both, call = "labels" in change, same | change if last else same
        with pytest.raises(ValueError, match=says if both or last else "were refused"):
            token_log_probs(**call, rows=None, vocab_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="head: got one of 7 features"):
        sharded_linear_cross_entropy(x, nn.Linear(7, 5), labels)


def counting(gather: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
    def counted(parts: list[Tensor], tensor: Tensor, **options: Any) -> Any:
        sizes.append(tensor.nbytes)
        return gather(parts, tensor, **options)

    return counted


def rows_are_compiled(rank: int, size: int) -> None:
    """Compiles one graph, with and without a group; behind it all is in fp32."""
    x, labels, head, _ = problem()
    head.float()

    def alone(x: Tensor) -> Tensor:
        return token_entropy(x, head=head, rows=20) + token_top_k(x, 3, head=head)[0].sum(-1)

    def together(x: Tensor) -> Tensor:
        wanted = labels % VOCABULARY
        return token_log_probs(x, wanted, head=head, rows=20, vocab_group=dist.group.WORLD)

    for function in (alone, together):
        both = []
        for run in (function, compiled(function)):
            mine = x.float().requires_grad_()
            out = run(mine)
            out.sum().backward()
            both.append((out.detach(), mine.grad))
        for got, want in zip(*both, strict=True):
            torch.testing.assert_close(got, want)
    with torch.autocast("cpu", torch.bfloat16):
        got = token_log_probs(x.float(), labels, head=head, rows=10)
        rounded = head(x.float())
    assert (got.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    want = -F.cross_entropy(rounded.float().flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(got.flatten(), want)
