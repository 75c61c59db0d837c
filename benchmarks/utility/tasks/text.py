"""Sentiment of film reviews as a task, with options for which reviews are public and where word counts come from."""

import functools
from pathlib import Path
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

import dpopt
from benchmarks.data import imdb
from benchmarks.utility import closed_forms
from benchmarks.utility.tasks import padded, round_up
from dpopt.gradients import PerExampleGrads


class Imdb:
    """Sentiment of film reviews, by logistic regression on a bag of words.

    Args:
        where: data folder.
        kind: see `imdb.features`.
        vocabulary: where the words come from: ``"train"`` (the most frequent ones of the training reviews, as in the
            papers, which is not private), ``"shipped"`` (``imdb.vocab``, published with the data), or ``"public"``.
        words: their maximal number.
        least: with ``"public"``, the least number of public reviews in which a word must occur.
        pairs: whether pairs of adjacent words that occur in at least two public reviews are features as well.
        public_share: the share of the training reviews that are declared public; they leave the private set.
        frequency: where the word frequencies of the diagonal come from: None, ``"public"``, ``"train"`` (NOT covered by
            epsilon) or ``{"release": sigma}``: the sum over private reviews, each a vector of norm at most 1, plus
            Gaussian noise with standard deviation sigma, whose event is in `release`.
        pair_weight: weight of pairs, against 1 for words, before rows are scaled to norm 1.
        one: the input of the bias; see `closed_forms.SparseLogistic`.
        power, floor: the diagonal is ``1 / ((f / max f)^power + floor)``.
        validate: score a held-out fifth of the training reviews instead of the test reviews, for tuning.
        engine: None for the closed form; with the name of a dpopt engine, dense rows go through that engine instead,
            with the same result, for comparison.
    """

    unit = "example"
    metric, higher_is_better = "accuracy", True

    def __init__(
        self,
        where: Path | None = None,
        *,
        kind: str = "tf",
        vocabulary: str = "train",
        words: int = 10_000,
        least: int = 1,
        pairs: bool = False,
        pair_weight: float = 1.0,
        one: float = 1.0,
        public_share: float = 0.0,
        frequency: Any = None,
        power: float = 1.0,
        floor: float = 1e-3,
        validate: bool = False,
        engine: str | None = None,
    ):
        if not public_share and ("public" in (vocabulary, frequency) or kind.endswith("-idf") or pairs):
            raise ValueError("words, pairs or frequencies come from public reviews: set public_share above 0.")
        source = loaded(where)
        order = np.random.default_rng(0).permutation(len(source.train))
        held_out, train = np.split(order, [len(order) // 5]) if validate else (None, order)
        public, private = np.split(train, [round(public_share * len(train))])
        test = source.train.take(held_out) if validate else source.test
        source_of_words = {
            "train": lambda: imdb.most_frequent(source.train.take(private), len(source.words), words),
            "public": lambda: imdb.most_frequent(source.train.take(public), len(source.words), words, least),
            "shipped": lambda: source.shipped[:words],
        }
        chosen = source_of_words[vocabulary]()

        keys = imdb.pairs_in(source.train.take(public), len(source.words), 2) if pairs else None

        def counted(reviews):
            single = imdb.counts(reviews, len(source.words))[:, chosen].tocsr()
            if keys is None:
                return single
            return sparse.hstack([single, imdb.pair_counts(reviews, len(source.words), keys)]).tocsr()

        count, labels = counted(source.train.take(private)), source.train.labels[private]
        public_count = counted(source.train.take(public)) if len(public) else None
        # Half a document is added, so that a word without a public review is rare instead of impossible.
        frequencies = None
        if len(public):
            frequencies = (np.asarray(public_count.astype(bool).sum(0)) + 0.5) / (len(public) + 1)
        self.num_examples, self.dimension = count.shape
        self.has_public_data = public_count is not None
        self._power, self._floor, self._engine = power, floor, engine
        self._frequency, self._one = frequency, one
        self.release = None
        free = {"vocabulary": vocabulary == "train", "word frequencies": frequency == "train"}
        self.not_covered_by_epsilon = [name for name, is_free in free.items() if is_free]
        if frequency == "train":
            self._counted = np.asarray(count.sum(0))
        elif frequency == "public":
            self._counted = np.asarray(public_count.sum(0))
        elif frequency is not None:
            self._counted = np.asarray(imdb.features(count, "binary").sum(0))  # each review is a vector of norm 1
            self.release = dp_accounting.GaussianDpEvent(frequency["release"])

        def rows(count):
            weights = np.where(np.arange(count.shape[1]) < len(chosen), 1.0, pair_weight)
            return closed_forms.cut(imdb.features(count, kind, frequencies, weights))

        self._rows, self._labels = rows(count), jnp.asarray(labels, jnp.float32)
        self._test = whole(rows(counted(test)), test.labels)
        self._final = lambda: whole(rows(counted(source.test)), source.test.labels) if validate else self._test
        if self.has_public_data:
            self._public = whole(rows(public_count), source.train.labels[public])

    def init(self, seed: int) -> Any:
        del seed
        return {"weights": jnp.zeros(self.dimension), "bias": jnp.zeros(())}

    def side_information(self, seed: int) -> Any:
        if self._frequency is None:
            return None
        f = self._counted
        if isinstance(self._frequency, dict):
            sigma = self._frequency["release"]
            # A separate seed: the noise of training comes from another generator.
            noisy = f + np.random.default_rng([seed, 0xF2E9]).normal(0, sigma, f.shape)
            f = np.maximum(noisy, 0)
        f = f / f.max()
        return {"weights": (1 / (f**self._power + self._floor)).astype(np.float32), "bias": np.float32(1)}

    def sizes(self, drawn: list[np.ndarray]) -> tuple[int, ...]:
        pieces = np.diff(self._rows.first)
        return (
            round_up(max(len(d) for d in drawn), 16),
            round_up(max(int(pieces[d].sum()) for d in drawn), 64),
        )

    def pack(self, drawn: list[np.ndarray], sizes: tuple[int, ...]) -> Any:
        examples, pieces = sizes
        indices, mask = padded(drawn, examples)
        first = self._rows.first
        lengths = np.where(mask, np.diff(first)[indices], 0)
        used = lengths.sum(1)
        total = int(used.sum())
        # Flat over steps and examples: the pieces, and the examples that own them.
        starts = np.cumsum(lengths, axis=None) - lengths.reshape(-1)
        flat = np.repeat(first[indices].reshape(-1) - starts, lengths.reshape(-1)) + np.arange(total)
        where = np.full((len(drawn), pieces), len(self._rows.columns) - 1, np.int32)  # the empty piece
        owner = np.full((len(drawn), pieces), examples, np.int32)
        there = np.arange(pieces) < used[:, None]
        where[there] = flat
        owner[there] = np.repeat(np.tile(np.arange(examples), len(drawn)), lengths.reshape(-1))
        return where, owner, indices, mask

    def all_examples(self) -> Any:
        return whole(self._rows, self._labels), jnp.ones(self.num_examples, bool)

    def grads(self, params: Any, batch: Any) -> PerExampleGrads:
        if len(batch) == 2:
            return closed_forms.sparse_logistic(params, *batch, self._one)
        where, owner, indices, mask = batch
        rows = closed_forms.SparseRows(
            self._rows.columns[where], self._rows.values[where], owner, self._labels[indices]
        )
        if self._engine is None:
            return closed_forms.sparse_logistic(params, rows, mask, self._one)
        size = mask.shape[0]
        dense = jnp.zeros((size + 1, self.dimension)).at[owner[:, None], rows.columns].add(rows.values)[:size]
        grads = dpopt.per_example_grads(self._loss, engine=self._engine)
        return grads(params, (dense, rows.labels), mask=mask)

    def _loss(self, params: Any, example: tuple) -> jax.Array:
        x, y = example
        z = x @ params["weights"] + self._one * params["bias"]
        return jax.nn.softplus(z) - y * z

    def public_grads(self, params: Any) -> Any:
        rows = self._public
        z = closed_forms.logits(params, rows, self._one)
        r = (jax.nn.sigmoid(z) - rows.labels) / len(rows.labels)
        pieces = rows.values * jnp.append(r, 0)[rows.owner][:, None]
        return {
            "weights": jnp.zeros_like(params["weights"]).at[rows.columns].add(pieces),
            "bias": self._one * jnp.sum(r),
        }

    def each_score(self, params: Any, rows: Any = None) -> jax.Array:
        rows = self._test if rows is None else rows
        return (closed_forms.logits(params, rows, self._one) > 0) == (rows.labels > 0.5)

    def score(self, params: Any) -> jax.Array:
        return jnp.mean(self.each_score(params))

    def final_score(self, params: Any) -> jax.Array:
        return jnp.mean(self.each_score(params, self._final()))


def whole(rows: closed_forms.Segments, labels: Any) -> closed_forms.SparseRows:
    """All rows as one batch."""
    owner = np.append(np.repeat(np.arange(len(labels)), np.diff(rows.first)), len(labels))
    return closed_forms.SparseRows(
        rows.columns, rows.values, jnp.asarray(owner, jnp.int32), jnp.asarray(labels, jnp.float32)
    )


@functools.lru_cache(maxsize=1)
def loaded(where: Path | None) -> imdb.Imdb:
    """The data set, cached for the next task."""
    return imdb.load(where)
