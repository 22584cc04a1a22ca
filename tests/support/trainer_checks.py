"""Checks of every rank of a real ring: trainers of transformers and TRL beside one process."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import ringray.models.huggingface as hf
from ringray.plugins.trainer import RingCallback

VOCABULARY, PAD = 97, 0
FIGURE = 1e-4  # relative difference of losses from one process
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
Rows = list[dict[str, Tensor]]

hf.register()


@contextmanager
def started(rank: int, size: int) -> Iterator[None]:
    """Sets what ``torchrun`` sets, from which trainers know the ranks; size 1: nothing."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    try:
        if size > 1:
            os.environ.update({name: str(number) for name, number in names.items()})
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def shared_folder() -> Path:
    """Makes a folder, the same on every rank."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    assert names[0] is not None
    return Path(names[0])


def tiny(attention: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def rows(count: int = 37, longest: int = 61, shortest: int = 20) -> Rows:
    """Sequences in which each token says the next, of odd lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    begins = torch.randint(94, (count,), generator=generator)
    return [
        {"input_ids": 3 + (begin + 5 * torch.arange(length)) % 94}
        for begin, length in zip(begins, lengths, strict=True)
    ]


def padded(batch: Rows, *, left: bool = False, labelled: bool = False) -> dict[str, Tensor]:
    """Pads a batch on the right, as collators do."""
    ids = [row["input_ids"] for row in batch]
    ones = [torch.ones_like(x) for x in ids]
    side = {"batch_first": True, "padding_side": "left" if left else "right"}
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, padding_value=PAD, **side),
        "attention_mask": pad(ones, **side),
        "labels": pad(ids, padding_value=PAD if labelled else -100, **side),
    }


def arguments(folder: Path | str, **changes: Any) -> dict[str, Any]:
    """Returns arguments of a short training that logs each step."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 4,
    } | changes


def trainer(
    ring: RingCallback | None,
    folder: Path | str = "unused",
    *,
    attention: str | None = None,
    data: Rows | None = None,
    evaluated: int = 7,
    collate: Any = padded,
    of: str = "",
    init: Any = None,
    model: Any = None,
    **changes: Any,
) -> transformers.Trainer:
    """Makes a trainer of one process, or on a ring. ``init``: of its constructor."""
    attention = attention or ("sdpa" if ring is None else "ringray")
    kind = getattr(transformers, f"{of}TrainingArguments")
    data = rows() if data is None else data
    options: dict[str, Any] = {
        "train_dataset": data,
        "eval_dataset": data[:evaluated],
        "callbacks": [] if ring is None else [ring],
    }
    return getattr(transformers, f"{of}Trainer")(
        model=model or tiny(attention),
        args=kind(**arguments(folder, **changes)),
        data_collator=collate,
        **options | (init or {}),
    )


# What depends on the clock, and on how many processes a ring has.
_TIMES = ("runtime", "per_second", "preparation_time")


def history(trained: transformers.Trainer) -> list[dict[str, float]]:
    """Returns what was logged, but for times."""
    return [
        {key: x for key, x in entry.items() if not any(time in key for time in _TIMES)}
        for entry in trained.state.log_history
    ]


def compare(got: list[dict[str, float]], want: list[dict[str, float]], but: str = "") -> float:
    """Returns the largest relative difference of losses; all else, ``but`` one number, is equal to
    rounding."""
    worst = 0.0
    for mine, theirs in zip(got, want, strict=True):
        for entry in (mine, theirs):
            entry.pop(but, None)
        assert mine == pytest.approx(theirs, rel=FIGURE), f"{mine} beside {theirs}"
        losses = [name for name in mine if name.endswith("loss")]
        worst = max([worst, *(abs(mine[x] - theirs[x]) / abs(theirs[x]) for x in losses)])
    return worst


def like_alone(
    make: Callable[[RingCallback | None], transformers.Trainer],
    rank: int,
    size: int,
    ring_size: int | None = None,
    but: str = "",
) -> tuple[float, list[dict[str, float]]]:
    """Trains on a ring as in one process, whose trainer ``make`` makes of no ring.

    Returns the largest relative difference of losses, and what the one process logged.
    """
    alone = make(None)
    alone.train()
    with started(rank, size):
        shared = make(RingCallback(ring_size=ring_size))
        shared.train()
    want = history(alone)
    return compare(history(shared), want, but), want


def like_one_process(steps: int, rank: int, size: int) -> None:
    """Padded batches, several epochs, and evaluations."""
    options: dict[str, Any] = {"max_steps": steps, "include_num_input_tokens_seen": "non_padding"}
    options |= {"eval_strategy": "steps", "eval_steps": max(1, steps // 2)}
    worst, logged = like_alone(partial(trainer, **options), rank, size)
    assert logged[-1]["train_loss"] < 0.8 * logged[0]["loss"] or steps < 50
    if rank == 0:
        print(f"Trainer: {steps} steps, losses differ by {worst:.1e} at most")


def streamed(rank: int, size: int) -> None:
    """Trains on streams, whose length nobody knows: every rank of a ring reads all of one."""
    datasets = importlib.import_module("datasets")
    data = datasets.Dataset.from_list(rows(13)).with_format("torch")
    stream = data.to_iterable_dataset(num_shards=3)
    options = {"max_steps": 7, "eval_strategy": "steps", "eval_steps": 4}  # of two epochs

    def trained(ring: RingCallback | None) -> list[dict[str, float]]:
        init = {"train_dataset": stream, "eval_dataset": stream}
        training = trainer(ring, init=init, **options)
        training.train()
        return history(training)

    want = trained(None)
    with started(rank, size):
        compare(trained(RingCallback()), want)


def words() -> Any:
    """Makes a tokenizer with a word for each token."""
    tokenizers = importlib.import_module("tokenizers")
    vocabulary = {"<pad>": PAD, "</s>": 1, "<s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<s>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )


def tuner(ring: RingCallback | None, *, completions: bool, **changes: Any) -> Any:
    """TRL's trainer of one process, or on a ring. ``completions``: loss of the second part only."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    texts = [[f"w{int(token)}" for token in row["input_ids"]] for row in rows()]
    samples = [{"text": " ".join(text)} for text in texts]
    if completions:
        samples = [
            {"prompt": " ".join(text[:9]), "completion": " " + " ".join(text[9:])} for text in texts
        ]
    data = datasets.Dataset.from_list(samples)
    return trl.SFTTrainer(
        model=tiny("sdpa" if ring is None else "ringray"),
        processing_class=words(),
        args=trl.SFTConfig(**arguments("unused", bf16=False, **changes)),
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        callbacks=[] if ring is None else [ring],
    )


def tuned_like_one_process(steps: int, rank: int, size: int) -> None:
    """Packed documents without padding, checkpointed layers; then the loss of completions."""
    packed = {"packing": True, "max_length": 64, "completions": False}
    for options in (packed, {"completions": True}):
        options |= {"max_steps": steps if options is packed else 2, "eval_strategy": "steps"}
        options |= {"eval_steps": max(1, steps // 2)}
        worst, _ = like_alone(partial(tuner, **options), rank, size)
        if rank == 0:
            print(f"SFTTrainer: {options['max_steps']} steps, losses differ by {worst:.1e} at most")


def replicas(rank: int, size: int) -> None:
    """Rings of two as replicas train as one process with batches as large as all of theirs."""
    sized = ("per_device_train_batch_size", "per_device_eval_batch_size")
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    options |= {"data": rows(4 * size), "evaluated": 2 * size}

    def make(ring: RingCallback | None) -> transformers.Trainer:
        return trainer(ring, **options, **dict.fromkeys(sized, 2 if ring else size))

    # One process pads more rows to one length.
    like_alone(make, rank, size, ring_size=2, but="total_flos")


def averaged_by_rank(rank: int, size: int) -> None:
    """Losses that are not averaged over the tokens of all replicas, of accumulated batches, whose
    last one of an epoch is alone."""
    options = {"max_steps": 3, "average_tokens_across_devices": False, "data": rows(9)}
    options |= {"gradient_accumulation_steps": 2}
    like_alone(partial(trainer, **options), rank, size)


def resumed(rank: int, size: int) -> None:
    """Continues from a checkpoint as if the training was never interrupted."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    with started(rank, size):
        folder = shared_folder()
        first = trainer(RingCallback(), folder, **options)
        first.train()
        second = trainer(RingCallback(), folder, **options)
        second.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    ends = [
        [entry["loss"] for entry in history(x) if entry.get("step", 0) > 4 and "loss" in entry]
        for x in (first, second)
    ]
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]
    # One process goes on from it, too: the folder knows nothing of rings.
    alone = trainer(None, folder, **options)
    alone.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    compare(history(alone)[-3:-1], history(first)[-3:-1])


def predictions(rank: int, size: int) -> None:
    """Logits and labels of all sequences, for metrics, and generated tokens."""

    def accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
        hits = predicted.predictions.argmax(-1)[:, :-1] == predicted.label_ids[:, 1:]
        return {"hits": float(hits.sum())}

    def whole(ring: RingCallback | None) -> tuple[Any, Any]:
        init = {"compute_metrics": accuracy}
        predicting = trainer(ring, init=init, of="Seq2Seq")
        same = [{"input_ids": row["input_ids"][:13]} for row in rows(5)]
        outputs = predicting.predict(rows(7)), predicting.evaluate()
        options = {"predict_with_generate": True, "generation_max_length": 19}
        generating = trainer(ring and RingCallback(), of="Seq2Seq", **options)
        return outputs, generating.predict(same)

    (want, metrics), tokens = whole(None)
    with started(rank, size):
        (got, evaluated), mine = whole(RingCallback())
    assert got.predictions.shape == want.predictions.shape
    real = want.label_ids != -100  # what padding predicts means nothing
    np.testing.assert_allclose(got.predictions[real], want.predictions[real], atol=1e-5)
    np.testing.assert_array_equal(got.label_ids, want.label_ids)
    assert got.metrics["test_loss"] == pytest.approx(want.metrics["test_loss"], rel=1e-5)
    assert got.metrics["test_hits"] == want.metrics["test_hits"]
    assert evaluated["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5)
    assert (tokens.predictions[:, 13:19] != PAD).any()
    np.testing.assert_array_equal(mine.predictions, tokens.predictions)


def classified(rank: int, size: int) -> None:
    """Compares the loss of a head that pools the last token, which one rank holds."""

    def labelled(batch: Rows) -> dict[str, Tensor]:
        inputs = padded(batch)
        return inputs | {"labels": inputs["input_ids"][:, 0] % 2}

    def make(ring: RingCallback | None) -> transformers.Trainer:
        attention = "sdpa" if ring is None else "ringray"
        torch.manual_seed(0)
        model = transformers.LlamaForSequenceClassification._from_config(
            transformers.LlamaConfig(**TINY), attn_implementation=attention
        )
        options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        return trainer(ring, collate=labelled, model=model, **options)

    like_alone(make, rank, size)


def short(rank: int, size: int) -> None:
    """Trains on fewer samples than ranks, and on fewer tokens than a ring has chunks."""
    options = {"data": rows(1, 3, 3), "evaluated": 1, "max_steps": 2, "eval_strategy": "epoch"}
    like_alone(partial(trainer, **options), rank, size)
