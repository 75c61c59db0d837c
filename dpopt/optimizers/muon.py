r"""Muon with a correction for the bias from the noise.

Muon replaces the momentum M of a matrix by f(M), an approximation of its nearest orthogonal matrix. Noise Z in M does
not average out in f, which is not linear: :math:`E f(M + Z) = (P f)(M)`, where P averages f over the noise. The bias of
f of the noisy momentum is therefore :math:`-(1 - P) f`. Adding noise of the same size again estimates it:
:math:`2 f(M + Z) - f(M + Z + Z')` has the bias :math:`-(1 - P)^2 f`, which is of second order in the variance of the
noise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from dpopt.chain import NoiseAware
from dpopt.common import trees, validate
from dpopt.common.averages import one_minus_power, update_average
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.keys import own_key
from dpopt.optimizers.adam_bc import scale_by_adam_bc

_KEY = 2**31 - 5  # separates these draws from those of the noise, should both get the same key


class ScaleByMuonBCState(NamedTuple):
    """State of `scale_by_muon_bc`. Matrices are listed in the order of the parameters' leaves."""

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]
    momentum: list[jax.Array]  # matrices, at least float32: average update
    variance: list[jax.Array]  # likewise: variance of the noise in it
    key: jax.Array  # key of the added noise n
    rest: optax.OptState  # state of `scale_by_adam_bc`, for parameters that are not matrices


def scale_by_muon_bc(
    *,
    key: jax.Array,
    beta: float = 0.95,
    ns_steps: int = 5,
    b1: float = 0.9,
    b2: float = 0.999,
    gamma: ScalarOrSchedule = 1e-8,
) -> NoiseAware:
    r"""Muon's rule on noisy mean gradients, minus the leading term of the bias from the noise.

    .. math::
        m &\leftarrow \beta m + (1 - \beta) \tilde g, &
        v &\leftarrow \beta^2 v + (1 - \beta)^2 s^2, \\
        n &\sim N(0, v / (1 - \beta^t)^2), &
        u &= 2 f(\hat m) - \tfrac12 \big(f(\hat m + n) + f(\hat m - n)\big)

    where f is that of ``optax.contrib.muon`` (Newton-Schulz, and the factor for the shape of the matrix). Parameters
    that are not matrices follow `scale_by_adam_bc`. Without noise this is ``optax.contrib.muon`` without Nesterov
    momentum.

    It must stand right after the noise in a `dpopt.chain`, which passes the standard deviation s of the noise.

    Args:
        key: PRNG key of n, which protects nothing and costs no privacy. Its draws are independent of the privacy noise,
            even if both have the same key.
        beta: decay of the momentum, in [0, 1).
        ns_steps: iterations of Newton-Schulz, positive. An update runs three times as many as Muon.
        b1, b2, gamma: see `scale_by_adam_bc`; for all other parameters.

    Raises:
        ValueError, TypeError: for an argument out of range; in ``update``, if no chain passes the noise. `dpopt.chain`
            refuses it after noise that is correlated over steps, whose variances do not add up.

    *Privacy*: post-processing; reads noised updates and the public size of the noise.

    For single matrices this removes about a third of the bias and increases the mean square error (twice f of one draw,
    minus the mean of f of two more). Where noise is large, that costs more than the bias: see the figures in the
    documentation.

    Reference: Kim and Fan (2026), DP-Muon: Differentially Private Optimization via Matrix-Orthogonalized Momentum,
    which describes this bias; the estimator is our own.

    >>> import dpopt, optax
    >>> core = dpopt.privatize(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, key=jax.random.key(0))
    >>> rule = scale_by_muon_bc(key=jax.random.key(1))
    >>> optimizer = dpopt.chain(core, rule, optax.scale_by_learning_rate(0.02))
    """
    validate.prng_key(key)
    validate.fraction(beta=beta)
    validate.positive_int(ns_steps=ns_steps)
    orthogonal = contrib.muon(-1.0, ns_steps=ns_steps, beta=0.0, nesterov=False)
    rest = scale_by_adam_bc(b1=b1, b2=b2, gamma=gamma)

    def f(matrices: list[jax.Array]) -> PyTree:
        return orthogonal.update(matrices, orthogonal.init(matrices), matrices)[0]

    def init_fn(params: optax.Params):
        matrices, others, _ = _split(trees.upcast(params))
        # A state may be donated, so it holds no array twice, and not the caller's key.
        momentum, variance = ([jnp.zeros_like(x) for x in matrices] for _ in range(2))
        noise_key = jax.random.fold_in(own_key(key), _KEY)
        return ScaleByMuonBCState(jnp.zeros([], jnp.int32), momentum, variance, noise_key, rest.init(others))

    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, *, noise_stddev: PyTree = None, **_: Any):
        del params
        if noise_stddev is None:
            raise ValueError(
                "scale_by_muon_bc got no noise_stddev. Put it right after the noise in a dpopt.chain, which passes it."
            )
        matrices, others, join = _split(trees.upcast(updates))
        stddevs, other_stddevs = _split(trees.broadcast_prefix(noise_stddev, updates, "noise_stddev"), updates)[:2]
        count = trees.next_count(state.count)
        momentum = [update_average(m, g, beta) for m, g in zip(state.momentum, matrices, strict=True)]
        variance = [
            (beta**2 * v + (1 - beta) ** 2 * jnp.square(jnp.asarray(s, v.dtype))).astype(v.dtype)
            for v, s in zip(state.variance, stddevs, strict=True)
        ]
        keys = jax.random.split(jax.random.fold_in(state.key, state.count), max(len(matrices), 1))
        noisy, plus, minus = [], [], []
        for m, v, k in zip(momentum, variance, keys, strict=False):
            weight = one_minus_power(beta, count, m.dtype)
            n = jnp.sqrt(v) * jax.random.normal(k, m.shape, m.dtype)
            noisy, plus, minus = [*noisy, m / weight], [*plus, (m + n) / weight], [*minus, (m - n) / weight]
        orthogonalised = [2 * a - (b + c) / 2 for a, b, c in zip(f(noisy), f(plus), f(minus), strict=True)]
        others, rest_state = rest.update(others, state.rest, noise_stddev=other_stddevs)
        return join(orthogonalised, others), ScaleByMuonBCState(count, momentum, variance, state.key, rest_state)

    rule = NoiseAware(init_fn, update_fn)
    rule.correct_noise = True
    return rule


def _split(tree: PyTree, like: PyTree = None) -> tuple[list[jax.Array], list[jax.Array], Callable[..., PyTree]]:
    """The leaves that are matrices (in ``like``, if given), the other leaves, and a function that joins them again."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = jax.tree.leaves(tree if like is None else like)
    is_matrix = [jnp.ndim(x) == 2 and jnp.size(x) > 0 for x in shapes]

    def join(matrices: list[jax.Array], others: list[jax.Array]) -> PyTree:
        remaining = {True: iter(matrices), False: iter(others)}
        return jax.tree.unflatten(structure, [next(remaining[m]) for m in is_matrix])

    matrices = [x for x, m in zip(leaves, is_matrix, strict=True) if m]
    return matrices, [x for x, m in zip(leaves, is_matrix, strict=True) if not m], join
