"""Clipped sums of per-example gradients in closed form, for two models that use few parameters per example.

A review has about 130 of 10,000 words, and a rating has one user and one film, so a step on dense rows would do a
hundred times too much work. Each class takes the place of a dpopt engine: it computes the gradients behind
`PerExampleGrads`. Everything from the clip on is dpopt's. The tests compare each with the ``vmap`` engine.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from dpopt.engines.stacked import EngineResult
from dpopt.gradients import PerExampleGrads

WIDTH = 32  # entries of a piece: rows of 130 words waste a tenth, and reads stay contiguous


class Segments(NamedTuple):
    """Sparse rows cut into pieces of equal length; the last piece is all zeros and serves as padding."""

    columns: jax.Array  # (pieces, WIDTH) int32
    values: jax.Array  # (pieces, WIDTH) float32, 0 where a piece is not full
    first: np.ndarray  # (n + 1,): row i is pieces first[i] : first[i + 1]


def cut(rows: sparse.csr_array) -> Segments:
    """Cuts sparse rows into pieces."""
    lengths = np.diff(rows.indptr)
    pieces = -(-lengths // WIDTH)
    first = np.concatenate([[0], np.cumsum(pieces)])
    columns = np.zeros((first[-1] + 1, WIDTH), np.int32)
    values = np.zeros((first[-1] + 1, WIDTH), np.float32)
    within = np.arange(rows.nnz) - np.repeat(rows.indptr[:-1], lengths)
    place = np.repeat(first[:-1] * WIDTH, lengths) + within
    columns.reshape(-1)[place] = rows.indices
    values.reshape(-1)[place] = rows.data
    return Segments(jnp.asarray(columns), jnp.asarray(values), first)


class SparseRows(NamedTuple):
    """A batch of sparse rows."""

    columns: jax.Array  # (pieces, WIDTH)
    values: jax.Array  # (pieces, WIDTH)
    owner: jax.Array  # (pieces,) int32: the row a piece belongs to; B for padding
    labels: jax.Array  # (B,)


def add_up(values: jax.Array, owner: jax.Array, size: int) -> jax.Array:
    """Sums of the pieces' values over their rows, ``(size,)``."""
    return jnp.zeros((size + 1,), values.dtype).at[owner].add(values)[:size]


def logits(params: Any, rows: SparseRows, one: float = 1.0) -> jax.Array:
    """Logits of a logistic regression ``{"weights": (d,), "bias": ()}``; ``one`` is the input of the bias."""
    products = jnp.sum(rows.values * params["weights"][rows.columns], axis=1)
    return add_up(products, rows.owner, rows.labels.shape[0]) + one * params["bias"]


@dataclasses.dataclass(frozen=True)
class SparseLogistic:
    """Logistic regression, labels 0 and 1: the gradient of example i is ``r_i (x_i, one)``, ``r = sigmoid(z) - y``.

    If rows have norm 1, the usual ``one`` = 1 gives half of every squared gradient norm to the bias, which has nothing
    to learn in a balanced problem; a small ``one`` leaves it to the words.
    """

    unit: ClassVar[str] = "example"
    params: Any
    batch: SparseRows
    one: float = 1.0

    @property
    def batch_size(self) -> int:
        return self.batch.labels.shape[0]

    @property
    def like(self) -> Any:
        return self.params

    def _residuals(self) -> tuple[jax.Array, jax.Array]:
        b = self.batch
        z = logits(self.params, b, self.one)
        return jax.nn.sigmoid(z) - b.labels, jax.nn.softplus(z) - b.labels * z

    def gradients(self) -> Any:
        b, (r, _) = self.batch, self._residuals()
        dense = jnp.zeros((self.batch_size + 1, self.params["weights"].size))
        dense = dense.at[b.owner[:, None], b.columns].add(b.values)[: self.batch_size]
        return {"weights": r[:, None] * dense, "bias": self.one * r}

    def run(self, mask: jax.Array, scale: Any, offset: Any, clip: Any) -> EngineResult:
        b, size, (r, losses) = self.batch, self.batch_size, self._residuals()
        d = self.params["weights"].size
        scale = {"weights": 1.0, "bias": 1.0} if scale is None else scale
        s = jnp.broadcast_to(jnp.asarray(scale["weights"], jnp.float32), (d,))
        scaled = b.values if jnp.ndim(scale["weights"]) == 0 and _is_one(scale) else b.values * s[b.columns]
        square = r**2 * add_up(jnp.sum(scaled**2, axis=1), b.owner, size)
        bias = self.one * r * scale["bias"]
        if offset is not None:
            # |S g + o|^2 = |S g|^2 + 2 <S g, o> + |o|^2
            o = jnp.broadcast_to(jnp.asarray(offset["weights"], jnp.float32), (d,))
            cross = add_up(jnp.sum(scaled * o[b.columns], axis=1), b.owner, size)
            square = jnp.maximum(square + 2 * r * cross + jnp.sum(o**2), 0)
            bias = bias + offset["bias"]
        leaf_norms = {"weights": jnp.sqrt(square), "bias": jnp.abs(bias)}
        is_finite = jnp.isfinite(square) & jnp.isfinite(bias)
        c = jax.tree.map(lambda c: jnp.where(is_finite & mask, c, 0), clip.coefficients(leaf_norms))
        weight = jnp.append(c["weights"] * jnp.where(is_finite, r, 0), 0)[b.owner]
        total = jnp.zeros((d,)).at[b.columns].add(scaled * weight[:, None])
        if offset is not None:
            total = total + jnp.sum(c["weights"]) * o
        total = {"weights": total, "bias": jnp.sum(c["bias"] * jnp.where(is_finite, bias, 0))}
        return EngineResult(total, leaf_norms, losses, None, is_finite)


def _is_one(scale: Any) -> bool:
    return isinstance(scale["weights"], float) and scale["weights"] == 1.0


def sparse_logistic(params: Any, batch: SparseRows, mask: jax.Array, one: float = 1.0) -> PerExampleGrads:
    """The per-example gradients of a logistic regression on sparse rows, computed when used."""
    return PerExampleGrads(SparseLogistic(params, batch, one), mask)


class Ratings(NamedTuple):
    """A batch of ratings."""

    users: jax.Array  # (B,) int32
    items: jax.Array  # (B,) int32
    ratings: jax.Array  # (B,) float32


def predict(params: Any, users: jax.Array, items: jax.Array, one: float = 1.0) -> jax.Array:
    """Predicted ratings: dot products of factors, plus the mean (with input ``one``) and biases, if any."""
    value = jnp.sum(params["users"][users] * params["items"][items], axis=-1)
    if "mean" in params:
        value = value + one * params["mean"] + params["user_bias"][users] + params["item_bias"][items]
    return value


@dataclasses.dataclass(frozen=True)
class Factorization:
    """Matrix factorisation with half the squared error: the gradient lies on one user's and one film's row.

    ``one`` is the input of the mean, as for `SparseLogistic`.
    """

    unit: ClassVar[str] = "example"
    params: Any
    batch: Ratings
    one: float = 1.0

    @property
    def batch_size(self) -> int:
        return self.batch.ratings.shape[0]

    @property
    def like(self) -> Any:
        return self.params

    def _rows(self) -> tuple[dict[str, tuple[jax.Array | None, jax.Array]], jax.Array]:
        """For each parameter, the row where each example's gradient is nonzero, and its values; and the errors."""
        p, b = self.params, self.batch
        error = predict(p, b.users, b.items, self.one) - b.ratings
        rows = {
            "users": (b.users, error[:, None] * p["items"][b.items]),
            "items": (b.items, error[:, None] * p["users"][b.users]),
        }
        if "mean" in p:
            rows |= {"user_bias": (b.users, error), "item_bias": (b.items, error), "mean": (None, self.one * error)}
        return rows, error

    def gradients(self) -> Any:
        rows, _ = self._rows()
        every = jnp.arange(self.batch_size)

        def dense(name, p):
            where, g = rows[name]
            return g if where is None else jnp.zeros((self.batch_size, *p.shape)).at[every, where].add(g)

        return {name: dense(name, p) for name, p in self.params.items()}

    def run(self, mask: jax.Array, scale: Any, offset: Any, clip: Any) -> EngineResult:
        if offset is not None:
            raise ValueError("a diagonal with an offset makes the gradients dense; use dpopt.per_example_grads.")
        rows, error = self._rows()
        if scale is not None:

            def scaled(name, where, g):
                s = jnp.broadcast_to(jnp.asarray(scale[name], g.dtype), self.params[name].shape)
                return (where, g * (s if where is None else s[where]))

            rows = {name: scaled(name, *row) for name, row in rows.items()}
        leaf_norms = {n: jnp.sqrt(jnp.sum(g.reshape(len(g), -1) ** 2, axis=1)) for n, (_, g) in rows.items()}
        is_finite = jnp.isfinite(sum(leaf_norms.values()))
        contributes = is_finite & mask
        coefficients = clip.coefficients(leaf_norms)

        def total(name, p):
            where, g = rows[name]
            c = jnp.where(contributes, coefficients[name], 0).reshape((-1,) + (1,) * (g.ndim - 1))
            g = jnp.where(contributes.reshape(c.shape), c * g, 0)
            return jnp.sum(g, axis=0) if where is None else jnp.zeros(p.shape, g.dtype).at[where].add(g)

        return EngineResult(
            {n: total(n, p) for n, p in self.params.items()}, leaf_norms, 0.5 * error**2, None, is_finite
        )


def factorization(params: Any, batch: Ratings, mask: jax.Array, one: float = 1.0) -> PerExampleGrads:
    """The per-example gradients of a matrix factorisation, computed when used."""
    return PerExampleGrads(Factorization(params, batch, one), mask)
