"""The Large Movie Review Dataset, from its official folder ``aclImdb`` or archive, as words, bags of words or TF-IDF.

For privacy it matters which reviews are counted, so nothing is counted implicitly: a vocabulary is an argument, and the
functions that make one (`most_frequent`) take the reviews to count.
"""

import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from benchmarks import data

ADDRESS = "https://ai.stanford.edu/~amaas/data/sentiment/ (aclImdb_v1.tar.gz)"
NAMES = ("aclImdb", "aclImdb_v1.tar.gz", "aclImdb_v1.tar.xz", "aclImdb.tar.gz", "aclImdb.tar.xz")
_MEMBER = re.compile(r"(?:^|/)(train|test)/(pos|neg)/\d+_\d+\.txt$")
_BREAK = re.compile(r"<br\s*/?>")
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)*")


class Reviews(NamedTuple):
    """Reviews as words, one after another."""

    tokens: np.ndarray  # (all words,) int32: indices into `Imdb.words`
    starts: np.ndarray  # (n + 1,) int64: review i is tokens[starts[i] : starts[i + 1]]
    labels: np.ndarray  # (n,) int32: 1 for a positive review

    def __len__(self) -> int:  # of reviews, not of fields
        return len(self.labels)

    def take(self, rows: np.ndarray) -> "Reviews":
        """The reviews at ``rows``."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self.starts[rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return Reviews(self.tokens[places], starts, self.labels[rows])


class Imdb(NamedTuple):
    """The data set. ``words`` is in alphabetical order, which is independent of how often they occur."""

    words: np.ndarray  # all words of all reviews
    train: Reviews
    test: Reviews
    shipped: np.ndarray  # indices into `words` of the words in imdb.vocab, in its order: the most frequent first


def load(where: str | Path | None = None) -> Imdb:
    """Reads the data set (cached after the first time).

    Raises:
        data.MissingData, data.DamagedData
    """
    path = data.find(where, NAMES, what="IMDB", address=ADDRESS)
    arrays = data.cached(path, "imdb-words", lambda: _parse(path))
    parts = {
        part: Reviews(arrays[f"{part}_tokens"], arrays[f"{part}_starts"], arrays[f"{part}_labels"])
        for part in ("train", "test")
    }
    return Imdb(arrays["words"], parts["train"], parts["test"], arrays["shipped"])


def texts(path: Path) -> dict[str, tuple[list[str], list[int]]]:
    """The texts of the reviews of each part, without line break tags, and their labels, sorted by file name.

    Raises:
        data.DamagedData
    """
    return {
        part: ([text for _, _, text in found], [label for _, label, _ in found])
        for part, found in _read(path, lambda text: text)[0].items()
    }


def _parse(path: Path) -> dict[str, np.ndarray]:
    places: dict[str, int] = {}

    def numbers(text: str) -> np.ndarray:
        words = _WORD.findall(text.lower())
        return np.array([places.setdefault(word, len(places)) for word in words], np.int32)

    texts, vocabulary = _read(path, numbers)
    words = np.array(sorted(places))
    rank = np.empty(len(words), np.int32)
    rank[[places[word] for word in words]] = np.arange(len(words), dtype=np.int32)
    shipped = [places[w] for w in vocabulary.decode("utf-8", "replace").split() if w in places]
    arrays = {"words": words, "shipped": rank[np.array(shipped, np.int64)]}
    for part, found in texts.items():
        arrays[f"{part}_tokens"] = rank[np.concatenate([tokens for *_, tokens in found])]
        arrays[f"{part}_starts"] = np.cumsum([0, *(len(tokens) for *_, tokens in found)])
        arrays[f"{part}_labels"] = np.array([label for _, label, _ in found], np.int32)
    return arrays


def _read(path: Path, take: Callable[[str], Any]) -> tuple[dict[str, list[tuple[str, int, Any]]], bytes]:
    """For each part, the name, label and ``take(text)`` of each review; and the shipped vocabulary."""
    parts: dict[str, list] = {"train": [], "test": []}
    vocabulary = b""
    for name, content in _files(path):
        if name.endswith("imdb.vocab"):
            vocabulary = content
        elif match := _MEMBER.search(name):
            part, sentiment = match.groups()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise data.DamagedData(f"{path}: {name} is not UTF-8 text: {error}") from error
            parts[part].append((name[match.start(1) :], int(sentiment == "pos"), take(_BREAK.sub(" ", text))))
    for part, found in parts.items():
        if len({label for _, label, _ in found}) < 2:
            raise data.DamagedData(
                f"{path} holds {len(found)} reviews for {part}; expected files {part}/pos/ID_RATING.txt and "
                f"{part}/neg/ID_RATING.txt, as in {ADDRESS}."
            )
        found.sort(key=lambda row: row[0])  # folders and archives have no fixed order
    return parts, vocabulary


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix == ".txt" or file.name == "imdb.vocab":
                yield file.relative_to(path).as_posix(), file.read_bytes()
        return
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.isfile() and (member.name.endswith("imdb.vocab") or _MEMBER.search(member.name)):
                    yield member.name, archive.extractfile(member).read()
    except Exception as error:  # every compression has its own errors
        if isinstance(error, data.DamagedData):
            raise
        raise data.DamagedData(
            f"{path} is damaged or not an archive ({error}). Get it again from {ADDRESS}."
        ) from error


def counts(reviews: Reviews, num_words: int) -> sparse.csr_array:
    """How often each word occurs in each review, ``(reviews, num_words)``."""
    rows = np.repeat(np.arange(len(reviews)), np.diff(reviews.starts))
    ones = np.ones(len(rows), np.float32)
    return sparse.coo_array((ones, (rows, reviews.tokens)), (len(reviews), num_words)).tocsr()


def most_frequent(reviews: Reviews, num_words: int, size: int, least: int = 1) -> np.ndarray:
    """The most frequent words IN THESE REVIEWS, in descending order. On private reviews this is not private.

    Words that occur in fewer than ``least`` of the reviews are omitted.
    """
    often = np.bincount(reviews.tokens, minlength=num_words)
    if least > 1:
        often[np.asarray((counts(reviews, num_words) > 0).sum(0)).reshape(-1) < least] = 0
    order = np.argsort(-often, kind="stable")[:size]
    return order[often[order] > 0]


def pairs(reviews: Reviews, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of adjacent words: the review of each pair, and its key ``first * num_words + second``."""
    rows = np.repeat(np.arange(len(reviews)), np.diff(reviews.starts))
    keys = reviews.tokens[:-1].astype(np.int64) * num_words + reviews.tokens[1:]
    is_inside = rows[:-1] == rows[1:]
    return rows[:-1][is_inside], keys[is_inside]


def pairs_in(reviews: Reviews, num_words: int, least: int) -> np.ndarray:
    """The sorted keys of pairs that occur in at least ``least`` OF THESE REVIEWS."""
    in_reviews = np.unique(np.stack(pairs(reviews, num_words)[::-1]), axis=1)
    keys, often = np.unique(in_reviews[0], return_counts=True)
    return keys[often >= least]


def pair_counts(reviews: Reviews, num_words: int, keys: np.ndarray) -> sparse.csr_array:
    """How often each pair of ``keys`` (sorted) occurs in each review."""
    rows, found = pairs(reviews, num_words)
    places = np.searchsorted(keys, found)
    hit = keys[np.minimum(places, len(keys) - 1)] == found
    ones = np.ones(hit.sum(), np.float32)
    return sparse.coo_array((ones, (rows[hit], places[hit])), (len(reviews), len(keys))).tocsr()


def features(
    count: sparse.csr_array,
    kind: str,
    document_frequency: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> sparse.csr_array:
    """The features of each review. Every row is computed from that review alone (and public numbers).

    Args:
        count: `counts` of the words in the vocabulary.
        kind: ``"tf"``: counts over their sum; ``"binary"``: 1 for words that occur; ``"log"``: log(1 + count). The last
            two are scaled to norm 1. With the suffix ``"-idf"``, each word is weighted by log(1 / document frequency),
            before that scaling.
        document_frequency: for ``"-idf"``, the share of documents in which each word occurs.
        weights: further public factors, one per column.
    """
    base, _, weighed = kind.partition("-")
    if base not in ("tf", "binary", "log") or weighed not in ("", "idf"):
        raise ValueError(f"kind must be 'tf', 'binary' or 'log', or one of them with '-idf'; got {kind!r}.")
    x = count.astype(np.float32).tocsr(copy=True)
    if base == "tf":
        x = x.multiply(1 / np.maximum(x.sum(1), 1)[:, None]).tocsr()
    else:
        x.data = np.ones_like(x.data) if base == "binary" else np.log1p(x.data)
    factors = np.ones(x.shape[1]) if weights is None else weights
    if weighed:
        factors = factors * np.log(1 / np.maximum(document_frequency, 1e-6))
    x = x.multiply(factors[None]).tocsr()
    if base != "tf":
        x = x.multiply(1 / np.maximum(np.sqrt(x.multiply(x).sum(1)), 1e-6)[:, None]).tocsr()
    x.sort_indices()
    return x.astype(np.float32)


def sequences(reviews: Reviews, vocabulary: np.ndarray, length: int, num_words: int) -> np.ndarray:
    """The first ``length`` words of each review, ``(n, length)`` int32: 0 is padding in front, 1 any other word."""
    number = np.full(num_words, 1, np.int32)
    number[vocabulary] = np.arange(2, len(vocabulary) + 2)
    out = np.zeros((len(reviews), length), np.int32)
    for row, (start, stop) in enumerate(zip(reviews.starts[:-1], reviews.starts[1:], strict=True)):
        tokens = number[reviews.tokens[start : min(stop, start + length)]]
        out[row, length - len(tokens) :] = tokens
    return out
