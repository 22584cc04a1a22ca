"""Targets that cannot be verified: told before any comparison, or as a finding; nothing is
left behind."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import ringray
from ringray.verification import HangError, TargetError, defaults, target, world
from ringray.verification.process import TargetProcess
from tests.support import odd_targets
from tests.support.place import lives, wait_until

ODD = "tests.support.odd_targets"
# Seconds of a step that hangs: milliseconds on an idle machine are enough for one that does not.
LIMIT = 10.0
REQUIRED = ["logits"]
IDS = torch.zeros(2, 3, dtype=torch.int64, device="cpu")
LOGITS = torch.ones(2, 3, 5, dtype=torch.float32, device="cpu")
BATCH = {"input_ids": IDS, "shift_labels": IDS}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fails if a folder or a process outlives a verification."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = psutil.Process().children()  # those that other tests keep
    yield
    assert list(folder.iterdir()) == []
    after = [x for x in psutil.Process().children() if x not in before]
    assert [x for x in after if "verification" in " ".join(x.cmdline())] == []


def refusal(name: str, **options: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        ringray.verify(f"{ODD}:{name}", limit=LIMIT, probes=REQUIRED, **options)
    assert str(caught.value).startswith(f"{ODD}:{name}: ")
    return caught.value


def alone(text: str) -> TargetProcess:
    """Returns the process that runs alone, as a part of this one."""
    process = TargetProcess(world.ALONE, "cpu")
    process.import_target(text, None)
    return process


def local() -> Any:
    def build() -> None: ...

    return build


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        ("nowhere.py", {}, "nowhere.py: there is no file /"),
        (lambda: None, {}, "build: got .*<lambda>, expected a function of a module or a file"),
        (local(), {}, "build: got local.<locals>.build, expected"),
        (odd_targets.TinyTarget.forward, {}, "build: got TinyTarget.forward, expected"),
        (3, {}, "build: got int, expected"),
        (odd_targets.good, {"ranks": 0}, "ranks: got 0, expected an integer from 2 to 64"),
        (odd_targets.good, {"ranks": 1}, "ranks: got 1"),
        (odd_targets.good, {"ranks": -1}, "ranks: got -1"),
        (odd_targets.good, {"ranks": True}, "ranks: got True"),
        (odd_targets.good, {"ranks": 1000}, "ranks: got 1000"),
        (odd_targets.good, {"probes": ["logit"]}, "did you mean 'logits'?"),
        (odd_targets.good, {"adapter": "rings"}, "did you mean 'ring'?"),
        (odd_targets.good, {"device": "tpu"}, "device: got 'tpu', expected one of cpu, cuda"),
        (odd_targets.good, {"limit": 0.0}, "limit: got 0.0, expected seconds above 0"),
        (odd_targets.good, {"limit": float("nan")}, "limit: got nan"),
    ],
)
def test_wrong_arguments_start_no_process(
    build: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "World", None)
    with pytest.raises(TargetError, match=message):
        ringray.verify(build, **options)


def test_a_function_of_no_file_is_refused() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def build(): ...", space)
    module = SimpleNamespace()  # as a notebook's or that of python -c
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(target.sys.modules, "__main__", module)
        with pytest.raises(TargetError, match="build: got build, expected a function"):
            ringray.verify(space["build"])


def test_a_function_of_the_program_is_found_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd_targets.good, "__module__", "__main__")
    main = SimpleNamespace(__file__="/somewhere/train.py")
    monkeypatch.setitem(target.sys.modules, "__main__", main)
    assert target.importable_name(odd_targets.good) == "/somewhere/train.py:good"


def test_a_target_without_the_function_names_those_that_it_has() -> None:
    with pytest.raises(TargetError, match=r"it has no function built\(\); it has .*good, .*hangs"):
        target.load(f"{ODD}:built")
    with pytest.raises(TargetError, match=r"build\(\) returned list, expected a torch.nn.Module"):
        alone(f"{ODD}:is_no_module").build()


def test_verify_within_a_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(world.INSIDE, "1")
    with pytest.raises(TargetError, match="while a rank imports its target"):
        ringray.verify(odd_targets.good)


def test_one_rank_that_cannot_build_is_named() -> None:
    message = str(refusal("raises_in_build"))
    assert "rank 1 raises ValueError: no odd ranks in build(), which the process alone" in message
    assert "odd_targets.py" in message


def test_weights_that_differ_by_rank_are_told() -> None:
    message = str(refusal("seeded_by_rank"))
    what = "different weights in the process alone and rank 1: embedding.weight and 4 others of 5"
    assert what in message


def test_a_buffer_of_the_state_dict_is_a_weight() -> None:
    """Leaves out a table that is not in the state dict: it may be a rank's own."""

    def build(value: float, persistent: bool) -> nn.Module:
        model = odd_targets.good()
        table = torch.full((2,), value, dtype=torch.float32, device="cpu")
        model.register_buffer("table", table, persistent=persistent)
        return model

    process = alone(f"{ODD}:good")
    for persistent in (True, False):
        weights = []
        for value in (1.0, 2.0):
            process.target.build = partial(build, value, persistent)
            weights.append(process.build()["weights"])
        assert (weights[0] != weights[1]) == persistent


def test_a_training_leaves_running_means_to_the_next_batch() -> None:
    process = alone(f"{ODD}:good")
    process.build()
    norm = nn.BatchNorm1d(3, dtype=torch.float32, device="cpu")
    process.model = nn.Sequential(nn.Embedding(4, 3, dtype=torch.float32, device="cpu"), norm)
    process.target.step = lambda model, batch: {"loss": model(batch["input_ids"]).sum()}
    process.step({"input_ids": IDS.numpy()}, training=True, backward=False)
    assert not norm.running_mean.any()


def test_unequal_shards_are_named_where_ranks_fail() -> None:
    verdict = ringray.verify(odd_targets.needs_equal_shards, probes=["padding"])
    (finding,) = verdict.findings
    assert finding.mistake == "fails"
    assert "shard() deals 24, 23 tokens to the ranks (" in finding.sentence


def test_a_hang_is_told_with_the_stack_of_each_rank() -> None:
    error = refusal("hangs")
    assert isinstance(error, HangError)
    first, second = error.details.split("-- rank 1:")
    assert "in sleep_for_ever" in second
    assert "in sleep_for_ever" not in first
    assert "in agree" in first  # where the other one waits
    assert "_follow" not in error.details


def test_a_process_that_ends_is_the_cause_of_what_others_raise() -> None:
    assert "rank 1 ends with exit code 3 in step()" in str(refusal("exits"))


def test_nothing_to_compare_is_told() -> None:
    process = alone(f"{ODD}:good")
    process.build()
    process.target.step = lambda model, batch: {"logits": None}
    with pytest.raises(
        TargetError, match=r"step\(\) returned dict, expected a dict with a tensor logits"
    ):
        process.step({"input_ids": IDS.numpy()})
    process.target.step = lambda model, batch: {"logits": LOGITS.flatten(0, 1)}
    with pytest.raises(TargetError, match=r"logits \(6, 5\) of step\(\): expected \(B, R, V\)"):
        process.step({"input_ids": IDS.numpy()})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("LOSS = 'avg'", "LOSS: got 'avg', expected one of mean, sum"),
        ("UNIT = 0", "UNIT: got 0, expected an integer from 1"),
        ("BATCH = True", "BATCH: got True, expected"),
        ("VOCABULARY = 1", "VOCABULARY: got 1, expected an integer from 4"),
        ("SEQ_LEN = '48'", "SEQ_LEN: got '48', expected an integer from 8"),
        ("SEQ_LEN = -3", "SEQ_LEN: got -3"),
        ("VOCAB = 64", "VOCAB is ignored, did you mean VOCABULARY"),
        ("SEQ_LENGTH = 64", "SEQ_LENGTH is ignored, did you mean SEQ_LEN"),
        ("def reduse(model): ...", "reduse is ignored, did you mean reduce"),
        ("def shards(batch): ...", "shards is ignored, did you mean shard"),
        ("from functools import wraps\ndel build", r"no function build\(\); it has good_one$"),
    ],
)
def test_wrong_constants_and_misspelled_names_are_told(
    line: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "one.py").write_text(f"def build(): ...\ndef good_one(): ...\n{line}\n")
    with pytest.raises(TargetError, match=message):
        target.load(str(tmp_path / "one.py"))


def test_helpers_have_other_names(tmp_path: Path) -> None:
    source = """
from bisect import insort as shards
BATCH_SIZE = VOCAB_SIZE = B = 8
_VOCAB = 3
def build(): ...
def shard_batch(batch): ...
def save_all(): ...
def _reduse(): ...
def reduced(): ...
def reduce(model): ...
"""
    (tmp_path / "one.py").write_text(source)
    assert target.load(str(tmp_path / "one.py")).BATCH == defaults.BATCH


def test_a_file_deals_its_batches_if_it_has_shard(tmp_path: Path) -> None:
    for line, expected in (("", False), ("def shard(batch): ...", True)):
        (tmp_path / "one.py").write_text(f"def build(): ...\n{line}\n")
        assert target.load(str(tmp_path / "one.py"), alone=True).own_shard is expected


def test_ids_are_right_for_each_embedding() -> None:
    process = alone(f"{ODD}:good")
    sizes = 48, 1000, 2  # positions come first, and kinds of tokens last
    process.target.build = lambda: nn.ModuleList(
        nn.Embedding(x, 4, dtype=torch.float32, device="cpu") for x in sizes
    )
    assert process.build()["vocabulary"] == 48


def test_a_weight_that_is_not_finite_is_named() -> None:
    process = alone(f"{ODD}:good")
    model = odd_targets.good()
    with torch.no_grad():
        model.qkv.bias[3] = float("nan")
    process.target.build = lambda: model
    with pytest.raises(TargetError, match=r"the weight qkv.bias that build\(\) makes is not fin"):
        process.build()


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_are_those_before_the_target_clips_them(exact: bool) -> None:
    process = alone(f"{ODD}:good")
    process.build()
    process.target.step = lambda model, ids: {"loss": model(ids["input_ids"]).square().mean()}
    process.target.reduce = lambda model: None
    process.target.grad_norm = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    batch = {name: x.numpy() for name, x in BATCH.items()}
    result = process.step(batch, exact=exact)
    assert result.norm > 1e-3
    assert max(abs(x).max() for x in result.gradients.values()) > 1e-3


def test_a_model_of_no_vocabulary_is_told() -> None:
    process = alone(f"{ODD}:good")
    process.target.build = lambda: nn.Linear(2, 2, dtype=torch.float32, device="cpu")
    with pytest.raises(TargetError, match=r"the model has 0 tokens .* set VOCABULARY"):
        process.build()


def test_a_rank_that_fails_at_one_batch_is_a_finding() -> None:
    verdict = ringray.verify(
        odd_targets.fails_on_documents, limit=LIMIT, probes=["logits", "documents", "causality"]
    )
    assert verdict.probes["logits"] == "right"
    assert verdict.probes["documents"] == "wrong"
    assert verdict.probes["causality"] == "right"  # of whole sequences
    (finding,) = verdict.findings  # told once
    assert (finding.probe, finding.mistake, finding.rank) == ("documents", "fails", 1)
    assert "rank 1 raises ValueError: no odd ranks" in finding.sentence
    assert "-- rank 0:" in finding.details  # the stack of the one that waits


PECULIAR = """\
import os, subprocess, sys, threading, time, wave
from pathlib import Path
import torch
import torch.distributed as dist
import neighbour
from tests.support.odd_targets import TinyTarget

HERE = Path(__file__).parent
print("line\\n" * 200_000)
dist.init_process_group("gloo")
torch.set_default_dtype(torch.bfloat16)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
sleeping = subprocess.Popen(["sleep", "1000"])
(HERE / "sleeping" / f"{sleeping.pid}").touch()
assert sys.argv == ["verify"]
assert "TORCHELASTIC_RUN_ID" not in os.environ
os.chdir("/")

def build():
    assert (dist.get_rank(), dist.get_world_size()) == (
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    )
    return TinyTarget()
"""


def test_a_target_may_behave_peculiarly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeping").mkdir()
    (tmp_path / "types.py").write_text(PECULIAR)
    (tmp_path / "wave.py").write_text("raise ImportError('not the one of Python')")
    (tmp_path / "neighbour.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "outer"}.items():
        monkeypatch.setenv(name, value)  # as a rank of torchrun has them
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    verdict = ringray.verify("types.py", probes=["logits", "gradients"])
    assert verdict.probes == {"logits": "right", "gradients": "right"}
    started = [int(x.name) for x in (tmp_path / "sleeping").iterdir()]
    assert len(started) == 3
    wait_until("the target's processes have ended", lambda: not any(map(lives, started)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("crashes", "rank 1 ends with exit code -11 in step()\nFatal Python error"),
        ("leaves", "rank 1 ends with exit code 0 in step()"),
        ("hangs_in_shard", "rank 0, rank 1 did not end shard() within 10 s"),
        ("hangs_in_backward", "in _engine_run_backward"),
    ],
)
def test_other_ends_are_told(name: str, expected: str) -> None:
    assert expected in str(refusal(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def build(:", "cannot be imported: SyntaxError: .*line 1"),
        (
            "import nothing_here",
            "cannot be imported: ModuleNotFoundError: .*expected a Python file",
        ),
        ("raise SystemExit('too few arguments')", "exit code 1 in import_target\\(\\)\n.*too few"),
        (
            "import os\nbuild = print\nif os.environ['RANK'] == '1': 1 / 0",
            "rank 1 raises ZeroDivisionError",
        ),
        ("import ringray\nringray.verify(__file__)", "call it below if __name__"),
    ],
)
def test_files_that_cannot_be_imported(source: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(TargetError, match=expected):
        ringray.verify(str(tmp_path / "bad.py"))


@pytest.mark.slow
def test_a_start_that_the_system_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(world.subprocess, "Popen", refuse)
    with pytest.raises(
        TargetError, match="the process alone cannot be started: resource temporarily"
    ):
        ringray.verify(odd_targets.good)
