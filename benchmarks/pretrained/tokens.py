"""Texts as token numbers. Needs dpopt[pretrained] (tokenizers)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import data
from benchmarks.data import imdb

AT_A_TIME = 1_000


class Texts(NamedTuple):
    """Token numbers of texts, all cut or padded to one length."""

    ids: np.ndarray  # (n, length) int32
    mask: np.ndarray  # (n, length) bool: False for padding


class Split(NamedTuple):
    """Reviews and their labels, 1 for a positive one."""

    train: Texts
    train_labels: np.ndarray
    test: Texts
    test_labels: np.ndarray


def encode(texts: Sequence[str], where: Path, length: int) -> Texts:
    """Token numbers by ``where/tokenizer.json``, which was made from other texts: each review is encoded alone.

    A long text is cut to ``length`` tokens: a quarter from its start and three quarters from its end, where reviews
    conclude (Sun et al. 2019, "How to fine-tune BERT for text classification", section 5.3.1).
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    start = length // 4
    ids, mask = np.zeros((len(texts), length), np.int32), np.zeros((len(texts), length), bool)
    for first in range(0, len(texts), AT_A_TIME):
        for row, found in enumerate(tokenizer.encode_batch(list(texts[first : first + AT_A_TIME])), first):
            kept = found.ids if len(found.ids) <= length else found.ids[:start] + found.ids[start - length :]
            ids[row, : len(kept)], mask[row, : len(kept)] = kept, True
    return Texts(ids, mask)


def reviews(where: str | Path | None, model: Path, length: int) -> Split:
    """The IMDB reviews, ``length`` tokens of each (see `encode`); cached after the first time.

    Raises:
        data.MissingData, data.DamagedData
    """
    path = data.find(where, imdb.NAMES, what="IMDB", address=imdb.ADDRESS)

    def build() -> dict[str, np.ndarray]:
        arrays = {}
        for part, (texts, labels) in imdb.texts(path).items():
            ids, mask = encode(texts, model, length)
            arrays |= {f"{part}_ids": ids, f"{part}_mask": mask, f"{part}_labels": np.array(labels, np.int32)}
        return arrays

    arrays = data.cached(path, f"imdb-{model.name}-{length}-ends", build)
    train, test = (Texts(arrays[f"{part}_ids"], arrays[f"{part}_mask"]) for part in ("train", "test"))
    return Split(train, arrays["train_labels"], test, arrays["test_labels"])
