"""Noise on the touched rows of a table only, for large embedding tables of which a batch uses few rows.

Ordinary noise moves the embeddings of words that nobody used. Which rows were touched is private: `sparse_rows`
releases them by a separate query, with noise and at a cost that accounting includes, and leaves all others unchanged.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt import noise as independent_noise
from dpopt.chain import PrivateOptimizer, chain
from dpopt.clipping import FixedClip, as_clip_function, as_promise, clip_and_sum
from dpopt.common import trees, validate
from dpopt.common.types import Example, PyTree, ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.engines.clips import ClipFunction
from dpopt.preconditioners.base import Diagonal, Preconditioner, precondition
from dpopt.privacy import Privacy
from dpopt.private_mean import noise_stddev, privatize

_TOUCH_KEY = 2**31 - 3  # folded into the key: far from step numbers, as is the number for the sampler's seed


class SparseRowsState(NamedTuple):
    """State of an optimizer with `sparse_rows`."""

    touches: optax.OptState  # of the query for touched rows
    core: optax.OptState  # of the private mean


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SparseRows:
    """The clip made by `sparse_rows`: a description, passed to optimizers in place of a clip norm.

    *Privacy*: see `sparse_rows`.

    >>> clip = sparse_rows(1.0, tables=lambda p: p, rows=lambda x: x, most_rows=10, touch_share=0.36)
    >>> [round(multiplier, 3) for multiplier in clip.split(2.4)]
    [3.0, 4.0]
    """

    clip: ClipFunction  # of the gradients
    tables: Callable[[PyTree], PyTree]
    rows: Callable[[Example], PyTree]
    most_rows: int
    threshold: float
    touch_share: float
    l2_touch_norm: float

    @property
    def sensitivity(self) -> float | jax.Array:
        return self.clip.sensitivity

    def split(self, noise_multiplier: ScalarOrSchedule) -> tuple[ScalarOrSchedule, ScalarOrSchedule]:
        r"""The noise multipliers of gradients and touches: their :math:`\sigma^{-2}` add up to the given one's."""

        def part(share: float) -> ScalarOrSchedule:
            if callable(noise_multiplier):
                schedule = noise_multiplier
                return lambda step: schedule(step) / share**0.5
            return noise_multiplier / share**0.5

        return part(1 - self.touch_share), part(self.touch_share)

    def private_mean(
        self,
        *,
        noise_multiplier: ScalarOrSchedule,
        expected_batch_size: float | jax.Array,
        key: jax.Array,
        preconditioner: tuple[Preconditioner, ...] = (),
        noise: Strategy | None = None,
    ) -> PrivateOptimizer:
        """`dpopt.privatize` with this clip; it takes the same arguments.

        Raises:
            ValueError: for noise that is correlated over steps.
        """
        if noise is not None:
            raise ValueError(
                "sparse_rows supports independent noise only: correlated noise subtracts noise that earlier steps "
                "added to other rows. Pass a plain l2_clip_norm, or noise=None."
            )
        of_gradients, of_touches = self.split(noise_multiplier)
        stddev = noise_stddev(of_gradients, self.sensitivity)

        def core_on(kept: dict[int, jax.Array], like: PyTree) -> PrivateOptimizer:
            stages = (precondition(p) for p in (*preconditioner, KeptRows(_is_kept(kept, like), self)))
            added = independent_noise.drawn_by(_drawn_on(kept), stddev, key)
            return chain(*stages, clip_and_sum(self.clip), added, independent_noise.normalize_by(expected_batch_size))

        core = core_on({}, None)  # its state and privacy do not depend on the rows of a step
        touches = privatize(
            l2_clip_norm=self.l2_touch_norm,
            noise_multiplier=of_touches,
            expected_batch_size=1,
            key=jax.random.fold_in(key, _TOUCH_KEY),
        )

        def init_fn(params: optax.Params):
            zeros = [jnp.zeros(t.shape[0]) for t in _tables(self.tables, params)[1]]
            return SparseRowsState(touches.init(zeros), core.init(params))

        def run(updates: PyTree, state: PyTree, params: optax.Params | None = None, **extra_args: Any):
            grads = as_promise(updates, params)
            places, found = _tables(self.tables, grads.like)
            zeros = [jnp.zeros(t.shape[0]) for t in found]
            noisy, touch_state, _ = touches.run(grads.of_examples(self._touches, zeros), state.touches, zeros)
            kept = {place: self._kept(n) for place, n in zip(places, jax.tree.leaves(noisy), strict=True)}
            mean, core_state, stddev = core_on(kept, grads.like).run(grads, state.core, params, **extra_args)
            return mean, SparseRowsState(touch_state, core_state), stddev

        privacy = Privacy((*core.privacy.queries, *touches.privacy.queries), unit=core.privacy.unit)
        return PrivateOptimizer(init_fn, run, privacy, core.stages)

    def _touches(self, counts: list[jax.Array], examples: PyTree, mask: jax.Array) -> jax.Array:
        """A function of the examples in one row of the batch. Its gradient is 1 at each table row that they touch."""
        given = jax.vmap(self.rows)(examples)
        rows = list(given) if isinstance(given, list | tuple) else [given]
        if len(rows) != len(counts):
            raise ValueError(f"rows returned rows of {len(rows)} tables, but tables has {len(counts)}.")
        total = jnp.zeros(())
        for count, touched in zip(counts, rows, strict=True):
            touched = jnp.asarray(touched)
            if not jnp.issubdtype(touched.dtype, jnp.integer):
                raise TypeError(f"rows must return integers, the indices of rows; got dtype {touched.dtype}.")
            # A table may have more rows than a narrow type can index.
            touched = touched.astype(jnp.int32) if touched.dtype.itemsize < 4 else touched
            touched = jnp.sort(jnp.where(trees.per_example(mask, touched), touched, -1).ravel())
            is_first = (touched != jnp.roll(touched, 1)).at[:1].set(True)
            is_row = is_first & (touched >= 0) & (touched < len(count))
            total += jnp.sum(jnp.where(is_row, count[jnp.where(is_row, touched, 0)], 0.0))
        return total

    def _kept(self, noisy: jax.Array) -> jax.Array:
        """The indices of the rows that a query releases, padded to ``most_rows`` with the length of the table."""
        count, rows = jax.lax.top_k(noisy, min(self.most_rows, len(noisy)))
        return jnp.where(count >= self.threshold, rows, len(noisy))


@dataclasses.dataclass(frozen=True, eq=False)
class KeptRows(Preconditioner):
    """The diagonal that is 1 at kept rows and 0 at others, before the clip and after the noise.

    *Privacy*: which rows are kept has already been released.

    >>> KeptRows(jnp.array([1.0, 0.0]), None).diagonal((), None)[0].release.tolist()
    [1.0, 0.0]
    """

    scale: PyTree
    rule: SparseRows | None  # the clip that chose them

    needs_feedback = True

    def diagonal(
        self, state: optax.EmptyState, params: optax.Params | None, **extra_args: Any
    ) -> tuple[Diagonal, optax.EmptyState]:
        del params, extra_args
        return Diagonal(scale=self.scale, release=self.scale), state


def sparse_rows(
    l2_clip_norm: FixedClip,
    *,
    tables: Callable[[PyTree], PyTree],
    rows: Callable[[Example], PyTree],
    most_rows: int,
    threshold: float = 0.0,
    touch_share: float = 0.1,
    l2_touch_norm: float = 1.0,
) -> SparseRows:
    r"""Updates and noise on the touched rows of tables only; pass it as ``l2_clip_norm``.

    .. math::

        \tilde n = \sum_i \mathrm{clip}(v_i, C_1) + \sigma_1 C_1 z, \quad
        R = \{r : \tilde n_r \ge \tau\}, \quad
        \tilde g = \Big(\sum_i \mathrm{clip}(1_R\, g_i, C) + \sigma_2 C\, 1_R z'\Big) / B

    with :math:`v_i` 1 at the rows that example i touches, and :math:`1_R` 1 at the rows in R and at parameters that are
    not tables. The ``most_rows`` rows of R with the largest :math:`\tilde n_r` are kept, so shapes are fixed, and noise
    is drawn for this many rows. The optimizer's ``noise_multiplier`` covers both queries together. Rules after
    the noise that move rows without a gradient, such as momentum or weight decay, still do.

    Args:
        l2_clip_norm: C, or a clip function.
        tables: maps the parameters to the tables among them (one, or a list): arrays whose first axis indexes rows.
        rows: maps an example to the indices of the rows that it touches: integers of any shape, or a list of these, one
            for each table. Repeated ones count once, also over the examples of a user or client, negative ones never.
        most_rows: how many rows of each table are kept in a step at most, positive.
        threshold: tau, a number of contributions, each at most 1 (C_1 over the square root of the number of rows that
            the example touches). A row that nobody touched is kept with the probability that noise exceeds tau.
        touch_share: the share of ``1 / noise_multiplier**2`` for the query for touched rows, in (0, 1).
        l2_touch_norm: C_1.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, for ``tables`` or ``rows`` that do not fit.

    *Privacy*: two Gaussian queries per step on one batch, of sensitivity C_1 and C. The rows come from the first one
    alone, before the second. ``rows`` may return anything for an example: this affects utility, but not the guarantee.

    Reference: Ghazi et al. (2023), Sparsity-Preserving Differentially Private Training of Large Embedding Models
    (DP-AdaFEST). The limit on the number of rows is ours.

    >>> import dpopt
    >>> clip = sparse_rows(1.0, tables=lambda p: p["words"], rows=lambda example: example["tokens"], most_rows=512)
    >>> opt = dpopt.dp_sgd(0.1, l2_clip_norm=clip, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> [round(query.multiplier(0), 2) for query in opt.privacy.queries]
    [1.05, 3.16]
    """
    for name, function in (("tables", tables), ("rows", rows)):
        if not callable(function):
            raise TypeError(f"{name} must be a function; got {function!r}.")
    validate.positive_int(most_rows=most_rows)
    if not math.isfinite(threshold):
        raise ValueError(f"threshold must be a finite number of contributions; got {threshold}.")
    validate.positive(touch_share=touch_share, l2_touch_norm=l2_touch_norm)
    if touch_share >= 1:
        raise ValueError(f"touch_share must lie in (0, 1), so that both queries get noise; got {touch_share}.")
    return SparseRows(
        clip=as_clip_function(l2_clip_norm),
        tables=tables,
        rows=rows,
        most_rows=int(most_rows),
        threshold=float(threshold),
        touch_share=float(touch_share),
        l2_touch_norm=float(l2_touch_norm),
    )


def _tables(choose: Callable[[PyTree], PyTree], params: PyTree) -> tuple[list[int], list[Any]]:
    """The positions of the tables among the leaves of the parameters, and the tables."""
    leaves, structure = jax.tree.flatten(params)
    chosen = choose(jax.tree.unflatten(structure, range(len(leaves))))
    places = jax.tree.leaves(chosen)
    if not places or any(not isinstance(p, int) for p in places) or len(set(places)) < len(places):
        raise ValueError(f"tables must pick one or more of the parameters, each once; it returned {chosen!r}.")
    for p in places:
        if jnp.ndim(leaves[p]) < 1:
            raise ValueError("tables picked a parameter without rows: a scalar.")
    return places, [leaves[p] for p in places]


def _is_kept(kept: dict[int, jax.Array], like: PyTree) -> PyTree:
    """1 at these rows of the tables, 0 at others; 1 for parameters that are not tables."""
    if not kept:
        return 1.0
    leaves, structure = jax.tree.flatten(like)
    ones = [jnp.ones(()) for _ in leaves]
    for place, rows in kept.items():
        table = leaves[place]
        ones[place] = jnp.zeros((table.shape[0], *[1] * (table.ndim - 1))).at[rows].set(1.0, mode="drop")
    return jax.tree.unflatten(structure, ones)


def _drawn_on(kept: dict[int, jax.Array]) -> Callable[[jax.Array, PyTree], PyTree]:
    """Standard normals at these rows of the tables and for parameters that are not tables; 0 at other rows."""

    def draw(key: jax.Array, total: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(total)
        few = [jnp.zeros((len(kept[i]), *x.shape[1:]), x.dtype) if i in kept else x for i, x in enumerate(leaves)]
        drawn = independent_noise.standard_normal_like(key, few)
        for place, rows in kept.items():
            zeros = jnp.zeros(leaves[place].shape, drawn[place].dtype)
            drawn[place] = zeros.at[rows].set(drawn[place], mode="drop")
        return jax.tree.unflatten(structure, drawn)

    return draw
