"""The corpus, against documents joined by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ringray.attention.sharding import local_positions
from ringray.training.corpus import NO_LABEL, Corpus, CorpusError, RandomTokens

TEXTS = {"a.txt": "abcdef", "b.md": "0123456789", "sub/c.txt": "XYZ", "d.txt": "q"}
WHOLE = sum(map(len, TEXTS.values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def every(corpus: Corpus, number: int, seq_len: int) -> tuple[str, list[int], list[int]]:
    found = corpus.rows(number, seq_len, np.arange(seq_len))
    return bytes(found.tokens.astype(np.uint8)).decode(), found.labels.tolist(), found.ends.tolist()


def test_an_epoch_has_every_document_once_in_an_order_of_its_own(folder: Path) -> None:
    corpus = Corpus([folder])
    assert corpus.tokens == WHOLE
    texts = []
    for epoch in range(8):
        text, _, ends = every(corpus, epoch, WHOLE)
        pieces = [text[a:b] for a, b in pairwise(ends)]
        assert sorted(pieces) == sorted(TEXTS.values())
        texts.append(text)
    assert len(set(texts)) > 4
    assert every(Corpus([folder]), 3, WHOLE)[0] == texts[3]
    assert every(Corpus([folder], seed=1), 3, WHOLE)[0] != texts[3]


@pytest.mark.parametrize("seq_len", [1, 7, 50])
def test_sequences_follow_each_other_across_epochs(folder: Path, seq_len: int) -> None:
    corpus = Corpus([folder])
    count = -(-3 * WHOLE // seq_len)
    joined = "".join(every(corpus, number, seq_len)[0] for number in range(count))
    epochs = "".join(every(corpus, epoch, WHOLE)[0] for epoch in range(4))
    assert epochs.startswith(joined[: 3 * WHOLE])


@pytest.mark.parametrize("seq_len", [5, 7, 20, 50])
def test_labels_are_successors_within_documents(folder: Path, seq_len: int) -> None:
    corpus = Corpus([folder])
    for number in range(6):
        text, labels, ends = every(corpus, number, seq_len)
        assert (ends[0], ends[-1]) == (0, seq_len)
        following = text[1:] + every(corpus, number + 1, seq_len)[0][0]
        for i, label in enumerate(labels):
            last = any(text[i] == document[-1] for document in TEXTS.values())
            assert label == (NO_LABEL if last else ord(following[i])), (number, i)
            if i + 1 < seq_len:
                assert (i + 1 in ends) == last


@pytest.mark.parametrize("partition", ["zigzag", "striped"])
def test_ranks_read_their_own_rows(folder: Path, partition: str) -> None:
    corpus, seq_len = Corpus([folder]), 21
    whole = corpus.rows(2, seq_len, np.arange(seq_len))
    seen = []
    for rank in range(4):
        positions = local_positions(partition, seq_len, 4, rank).numpy()
        own = corpus.rows(2, seq_len, positions)
        inside = positions < seq_len
        assert own.tokens[inside].tolist() == whole.tokens[positions[inside]].tolist()
        assert own.labels[inside].tolist() == whole.labels[positions[inside]].tolist()
        assert set(own.labels[~inside].tolist()) <= {NO_LABEL}
        assert own.ends.tolist() == whole.ends.tolist()
        seen += positions[inside].tolist()
    assert sorted(seen) == list(range(seq_len))


def test_random_tokens_have_labels_up_to_the_padding() -> None:
    rows = RandomTokens(9).rows(0, 21, np.arange(24))
    assert (rows.labels[:20] == rows.tokens[1:21]).all()
    assert 0 <= rows.labels[20] < 9
    assert (rows.labels[21:] == NO_LABEL).all()


def test_token_files_may_hold_several_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000, 1010, dtype=np.uint16))
    np.save(tmp_path / "t.ends.npy", np.array([4, 10]))
    corpus = Corpus([tmp_path])
    assert (corpus.tokens, corpus.vocabulary) == (10, 1010)
    found = corpus.rows(0, 10, np.arange(10))
    assert sorted(np.diff(found.ends)) == [4, 6]
    assert (found.labels == NO_LABEL).sum() == 2


def test_text_is_tokenized_once_by_a_tokenizer_of_a_folder(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    words.train_from_iterator(["abc abc 012 012"] * 10, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    fast.save_pretrained(tmp_path / "words")
    files = [folder / "a.txt", folder / "b.md"]
    corpus = Corpus(files, tokenizer=tmp_path / "words", kept=tmp_path / "kept")
    assert corpus.vocabulary == len(fast)
    assert corpus.tokens < sum(len(TEXTS[name]) for name in ("a.txt", "b.md"))
    made = sorted((tmp_path / "kept").glob("*.npy"))
    times = [one.stat().st_mtime_ns for one in made]
    Corpus(files, tokenizer=tmp_path / "words", kept=tmp_path / "kept")
    assert [one.stat().st_mtime_ns for one in sorted((tmp_path / "kept").glob("*.npy"))] == times
    fast.add_tokens(["abc"])
    fast.save_pretrained(tmp_path / "words")
    Corpus(files, tokenizer=tmp_path / "words", kept=tmp_path / "kept")
    assert len(list((tmp_path / "kept").glob("*.npy"))) == 2 * len(made)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"latin\.txt is no UTF-8"):
        Corpus([tmp_path / "latin.txt"], tokenizer=tmp_path / "words", kept=tmp_path / "kept")


def floats(folder: Path) -> None:
    np.save(folder / "t.npy", np.ones(4))


def ends_that_fall(folder: Path) -> None:
    np.save(folder / "t.npy", np.arange(9))
    np.save(folder / "t.ends.npy", np.array([7, 3, 9], np.uint64))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda folder: None, "no .txt, .md, .jsonl or .npy file in"),
        (lambda folder: folder.rmdir(), "is neither a file nor a folder"),
        (lambda folder: (folder / "t.txt").touch(), r"t\.txt is empty"),
        (lambda folder: (folder / "t.txt").write_bytes(bytes(range(256))), r"t\.txt is binary"),
        (lambda folder: (folder / "t.txt").write_text("a"), "holds 1 tokens"),
        (lambda folder: (folder / "t.npy").write_bytes(b"nothing"), r"t\.npy is no \.npy array"),
        (floats, r"t\.npy has float64 of shape \(4,\), expected integers"),
        (ends_that_fall, "no ascending ends of documents up to the 9 tokens"),
    ],
)
def test_what_cannot_be_used_is_named(
    made: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    (place := tmp_path / "corpus").mkdir()
    made(place)
    with pytest.raises(CorpusError, match=says):
        Corpus([place])


def test_a_folder_without_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is no folder of a Hugging Face tokenizer"):
        Corpus([folder / "a.txt"], tokenizer=tmp_path / "x")
    pytest.importorskip("transformers")
    with pytest.raises(CorpusError, match="sub holds none"):
        Corpus([folder / "a.txt"], tokenizer=folder / "sub")
