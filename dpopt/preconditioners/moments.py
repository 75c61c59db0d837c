"""Diagonals from second moments of public gradients, or of past private means, at no cost in privacy.

DP2's diagonal, from delayed private gradients, is in `dpopt.preconditioners.delayed`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dpopt.common import trees, validate
from dpopt.common.averages import one_minus_power, update_average
from dpopt.common.types import PyTree
from dpopt.gradients import PerExampleGrads
from dpopt.preconditioners.base import Diagonal, Preconditioner


def next_second_moment(rule: str, v: PyTree, square: PyTree, decay: float | jax.Array) -> PyTree:
    """The second moment after one more step: RMSProp averages, AdaGrad adds, Yogi moves by the sign of the difference.

    ``v`` is the moment so far, and ``square`` the squared gradient, a pytree like it. Adam averages as RMSProp does.

    >>> v, square = jnp.array(1.0), jnp.array(3.0)
    >>> float(next_second_moment("rmsprop", v, square, 0.5)), float(next_second_moment("adagrad", v, square, 0.5))
    (2.0, 4.0)
    """
    step = {
        "rmsprop": lambda v, x: update_average(v, x, decay),
        "adam": lambda v, x: update_average(v, x, decay),
        "adagrad": lambda v, x: v + x,
        "yogi": lambda v, x: v + (1 - decay) * jnp.sign(x - v) * x,
    }[rule]
    return jax.tree.map(step, v, square)


def inverse_root(v: PyTree, eps: float | jax.Array, eps_in_sqrt: bool = False) -> PyTree:
    """1 / A per leaf: ``1 / (sqrt(v) + eps)`` as in the papers, or ``1 / sqrt(v + eps)``.

    >>> float(inverse_root(jnp.array(4.0), 0.5)), float(inverse_root(jnp.array(3.0), 1.0, eps_in_sqrt=True))
    (0.4..., 0.5)
    """
    if eps_in_sqrt:
        return jax.tree.map(lambda x: 1 / jnp.sqrt(x + eps), v)
    return jax.tree.map(lambda x: 1 / (jnp.sqrt(x) + eps), v)


def where_finite(moments: PyTree, before: PyTree) -> PyTree:
    """New moments, or those before if a public gradient has left any that is not finite.

    >>> where_finite(jnp.array(jnp.nan), jnp.array(1.0)).tolist()
    1.0
    """
    is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(moments)]))
    return optax.tree.where(is_finite, moments, before)


def checked_public_grads(public_grads: optax.Updates | None, like: PyTree) -> PyTree:
    """The public gradients of an update, in the dtype of moments, if they have the structure and shapes of ``like``.

    Raises:
        ValueError: if they are missing, or have another tree structure or shape; TypeError: if they are per-example.

    >>> checked_public_grads(None, jnp.zeros(2))
    Traceback (most recent call last):
    ...
    ValueError: this optimizer needs public gradients, and got none: call update(grads, state, params, \
public_grads=g) with g the mean gradient on a public batch, shaped like the parameters.
    """
    if public_grads is None:
        raise ValueError(
            "this optimizer needs public gradients, and got none: call update(grads, state, params, public_grads=g) "
            "with g the mean gradient on a public batch, shaped like the parameters."
        )
    if isinstance(public_grads, PerExampleGrads):
        raise TypeError(
            "public_grads must be one mean gradient, not a promise of per-example gradients: pass jax.grad of the mean "
            "loss on a public batch."
        )
    if jax.tree.structure(public_grads) != jax.tree.structure(like):
        raise ValueError(
            f"public_grads must have the parameters' tree structure; got {jax.tree.structure(public_grads)} for "
            f"parameters {jax.tree.structure(like)}."
        )

    def cast(path: tuple[Any, ...], g: ArrayLike, p: ArrayLike) -> jax.Array:
        if jnp.shape(g) != jnp.shape(p):
            raise ValueError(
                f"public_grads{jax.tree_util.keystr(path)} has shape {jnp.shape(g)} for a parameter of shape "
                f"{jnp.shape(p)}: pass the mean gradient on the public batch, without a batch axis."
            )
        return jnp.asarray(g, trees.accumulator_dtype(jnp.result_type(p)))

    return jax.tree_util.tree_map_with_path(cast, public_grads, like)


class PublicMomentsState(NamedTuple):
    """State of `public_moments`."""

    v: PyTree  # like params, at least float32: second moment of the public gradients
    m: PyTree  # like params: their first moment, for Adam; else ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PublicMoments(Preconditioner):
    r"""Divides by the root of the second moment of public gradients (AdaDPS with public data).

    .. math::

        v \leftarrow \beta v + (1 - \beta) \hat g^2 \ \text{(RMSProp)}, \quad v \leftarrow v + \hat g^2 \
        \text{(AdaGrad)}, \quad A = \sqrt v + \epsilon, \quad g_i \mapsto g_i / A

    Adam also keeps :math:`M \leftarrow \beta_1 M + (1 - \beta_1) \hat g` and maps
    :math:`g_i \mapsto (\beta_1 g_i + (1 - \beta_1) M) / A`. The moments are updated with this step's public gradient
    before they are used, and their bias is not corrected.

    Every step must pass ``update(..., public_grads=g)``, the mean gradient of a public batch, shaped like the
    parameters. A gradient that is not finite leaves the moments unchanged.

    Args:
        rule: ``"rmsprop"``, ``"adagrad"`` or ``"adam"``.
        decay: beta, in [0, 1).
        eps: epsilon, positive.
        b1: beta_1, in [0, 1); Adam only.
        eps_in_sqrt: whether A is ``sqrt(v + eps)``, as in the authors' first code.

    Raises:
        ValueError, TypeError: for a bad argument; in ``update``, if the public gradient is missing or does not fit.

    *Privacy*: the clip comes after, so the event is that of DP-SGD, provided that the public batch is public. The
    parameters at which its gradient is taken are already released.

    Reference: Li, Zaheer, Reddi and Smith (2022), Private Adaptive Optimization with Side Information, Algorithm 1.

    >>> moments = public_moments(rule="adagrad", eps=1.0)
    >>> diagonal, _ = moments.diagonal(moments.init(jnp.zeros(2)), None, public_grads=jnp.array([0.0, 3.0]))
    >>> diagonal.scale.tolist()
    [1.0, 0.25]
    """

    rule: str = "rmsprop"
    decay: float | jax.Array = 0.9
    eps: float | jax.Array = 1e-3
    b1: float | jax.Array = 0.9
    eps_in_sqrt: bool = False

    def __post_init__(self):
        validate.one_of(("rmsprop", "adagrad", "adam"), rule=self.rule)
        validate.fraction(decay=self.decay, b1=self.b1)
        validate.positive(eps=self.eps)

    def init(self, params: optax.Params) -> PublicMomentsState:
        return PublicMomentsState(v=trees.zeros(params), m=trees.zeros(params) if self.rule == "adam" else ())

    def diagonal(
        self, state: PublicMomentsState, params: optax.Params | None, *, public_grads: PyTree = None, **extra_args: Any
    ) -> tuple[Diagonal, PublicMomentsState]:
        del params, extra_args
        g = checked_public_grads(public_grads, state.v)
        v = next_second_moment(self.rule, state.v, jax.tree.map(jnp.square, g), self.decay)
        m = state.m if self.rule != "adam" else jax.tree.map(lambda m, g: update_average(m, g, self.b1), state.m, g)
        # A NaN would stay in the moments and silently drop every private example from then on.
        state = where_finite(PublicMomentsState(v, m), state)
        scale = inverse_root(state.v, self.eps, self.eps_in_sqrt)
        if self.rule != "adam":
            return Diagonal(scale=scale), state
        return Diagonal(
            scale=jax.tree.map(lambda s: self.b1 * s, scale),
            offset=jax.tree.map(lambda s, m: (1 - self.b1) * m * s, scale, state.m),
        ), state


public_moments = PublicMoments
"""Alias of `PublicMoments`: the name to use."""


class LastMomentsState(NamedTuple):
    """State of `last_moments`."""

    count: jax.Array  # (), int32: steps so far  # pyright: ignore[reportIncompatibleMethodOverride]
    v: PyTree  # like params, at least float32: moving average of the squared private mean


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LastMoments:
    r"""Scales by the private second moment so far, and undoes the scale after the noise (scale-then-privatise).

    .. math::

        s_t = 1 / (\sqrt{\hat v_{t-1}} + \epsilon_s), \quad s_1 = 1, \quad
        \tilde g_t = \tfrac{1}{s_t} \cdot \tfrac{1}{B} \big( \textstyle\sum_i \mathrm{clip}(s_t g_i, C) + \sigma C z
        \big), \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) \tilde g_t^2

    The gradient keeps its units, so any adaptive rule may follow. `dpopt.chain` passes it the standard deviation of the
    noise in each coordinate, :math:`\sigma C / (B s_t)`.

    Args:
        b2: beta_2, in [0, 1); the bias of v, which starts at 0, is corrected.
        eps_scale: epsilon_s, positive: bounds the scale where v is 0.

    Raises:
        ValueError, TypeError: for a bad argument.

    *Privacy*: the scale is computed from private means that are already released; the event is that of DP-SGD.

    Reference: Ganesh, McMahan and Thakurta (2025), On Design Principles for Private Adaptive Optimizers, Algorithm 8.

    >>> moments = last_moments(eps_scale=1.0)
    >>> state = moments.observe(moments.init(jnp.zeros(1)), jnp.array([3.0]), 0.0)
    >>> [round(x, 4) for x in moments.diagonal(state, None)[0].release.tolist()]
    [4.0]
    """

    b2: float | jax.Array = 0.999
    eps_scale: float | jax.Array = 1e-2

    needs_feedback = True

    def __post_init__(self):
        validate.fraction(b2=self.b2)
        validate.positive(eps_scale=self.eps_scale)

    def init(self, params: optax.Params) -> LastMomentsState:
        return LastMomentsState(jnp.zeros([], jnp.int32), trees.zeros(params))

    def diagonal(
        self, state: LastMomentsState, params: optax.Params | None, **extra_args: Any
    ) -> tuple[Diagonal, LastMomentsState]:
        del params, extra_args
        is_first = state.count == 0

        def root(v: jax.Array) -> jax.Array:
            count = jnp.maximum(state.count, 1)  # at t = 0 any positive number will do
            return jnp.sqrt(v / one_minus_power(self.b2, count, v.dtype)) + self.eps_scale

        release = jax.tree.map(lambda v: jnp.where(is_first, 1, root(v)), state.v)
        return Diagonal(scale=jax.tree.map(lambda r: 1 / r, release), release=release), state

    def observe(self, state: LastMomentsState, private_mean: optax.Updates, noise_stddev: PyTree) -> LastMomentsState:
        del noise_stddev
        v = next_second_moment("rmsprop", state.v, jax.tree.map(jnp.square, private_mean), self.b2)
        return LastMomentsState(trees.next_count(state.count), v)


last_moments = LastMoments
"""Alias of `LastMoments`: the name to use."""
