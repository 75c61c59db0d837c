"""Documents in windows: every token is a target exactly once, and no window holds two documents."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks import data
from benchmarks.data import documents


def targets(windows):
    """The targets, document by document."""
    rows = windows(np.arange(len(windows)))
    assert rows.shape == (len(windows), windows.length + 1) and rows.dtype == np.int32
    found = [[] for _ in range(windows.documents)]
    for row, document in zip(rows, windows.document, strict=True):
        found[document] += [int(t) for t in row[1:] if t != documents.PAD]
    return found


@pytest.mark.parametrize("length", [1, 3, 4, 5, 100])
def test_every_token_with_a_predecessor_in_its_document_is_a_target_once(length, tmp_path):
    texts = ["abcde", "", "x", "\u00e9t\u00e9 " * 3]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    windows = documents.read(tmp_path, length)
    kept = [text.encode() for text in texts if text]
    assert windows.documents == 3 and windows.vocabulary == 257
    assert targets(windows) == [[*raw[1:], documents.BYTES_END] for raw in kept]


def test_a_text_file_is_a_document(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"abcd")
    windows = documents.read(tmp_path / "one.txt", 3)
    expected = [[97, 98, 99, 100], [100, 256, -1, -1]]
    assert windows(np.arange(2)).tolist() == expected and windows.document.tolist() == [0, 0]


@pytest.mark.parametrize("chunk", [1, 3, 1 << 24])
def test_a_file_of_tokens_is_cut_at_its_ends(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_CHUNK", chunk)
    np.save(tmp_path / "t.npy", np.array([5, 6, 0, 7, 0, 0, 8, 9], np.uint16))
    windows = documents.read(tmp_path / "t.npy", 4, vocabulary=10, end=0)
    assert targets(windows) == [[6, 0], [0], [9]]  # a lone end is no document; the last needs none
    assert isinstance(windows._tokens, np.memmap)


def test_what_cannot_be_read_is_refused(tmp_path):
    def read(name, content=None, **options):
        if content is not None:
            np.save(tmp_path / name, content)
        return documents.read(tmp_path / name, 4, **options)

    with pytest.raises(data.MissingData, match=r"expected a text file, a folder of \.txt files"):
        read("nothing.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(data.MissingData, match=r"holds no \.txt file"):
        read("empty")
    (tmp_path / "empty" / "a.txt").write_text("")
    with pytest.raises(data.DamagedData, match="no document of at least one token"):
        read("empty")
    with pytest.raises(ValueError, match="leave both out"):
        read("empty", vocabulary=10)
    with pytest.raises(ValueError, match="the one that ends"):
        read("t.npy", vocabulary=10)
    options = dict(vocabulary=10, end=0)
    with pytest.raises(data.DamagedData, match="0 to 9; it holds 10"):
        read("t.npy", np.array([1, 10, 0]), **options)
    with pytest.raises(data.DamagedData, match="0 to 9; it holds -1"):
        read("t.npy", np.array([1, -1, 0]), **options)
    with pytest.raises(data.DamagedData, match=r"must hold integers \(tokens,\); it holds float64 \(3,\)"):
        read("t.npy", np.ones(3), **options)
    with pytest.raises(data.DamagedData, match=r"it holds int64 \(2, 2\)"):
        read("t.npy", np.ones((2, 2), int), **options)
    with pytest.raises(data.DamagedData, match="no document"):
        read("t.npy", np.zeros(0, int), **options)
    with pytest.raises(ValueError, match="below the vocabulary, 10; got 10"):
        read("t.npy", np.ones(3, int), vocabulary=10, end=10)
    with pytest.raises(ValueError, match="at least 1 token"):
        documents.read(tmp_path / "t.npy", 0, **options)
    raw = (tmp_path / "t.npy").read_bytes()
    (tmp_path / "t.npy").write_bytes(raw[:-3])
    with pytest.raises(data.DamagedData, match="truncated"):
        read("t.npy", **options)
