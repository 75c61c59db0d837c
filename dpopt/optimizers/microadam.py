"""DP-MicroAdam: Adam with moments that are recomputed from a short window of sparse private gradients.

Adam keeps two numbers per parameter. MicroAdam keeps the last m sparse gradients (the k largest coordinates of each)
and, in a few bits, the error of dropping the other coordinates, which is added to the next gradient. At density 0.01,
m = 10 and 4 bits that is about 1.3 bytes per parameter, against 8 for Adam.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.common import trees, validate
from dpopt.common.averages import one_minus_power
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.keys import own_key
from dpopt.optimizers import _quantize, _topk
from dpopt.optimizers._parts import Clip, decayed_weights, descent, private_mean

# Separates the draws of the rounding from those of the noise, should both get the same key: codes that depend on the
# noise itself would reveal something about it, and would not be post-processing.
_ROUNDING = 0x526F756E


class ScaleByMicroAdamState(NamedTuple):
    """State of `scale_by_micro_adam`. Of a leaf of d parameters, each of the last m steps kept k coordinates.

    Step t (the first is t = 1) writes row ``(t - 1) % m`` of the two windows, so the row after it is then the oldest.
    Rows that are not written yet hold zeros.
    """

    count: jax.Array  # (), int32: updates so far  # pyright: ignore[reportIncompatibleMethodOverride]
    indices: PyTree  # like params, each (m, k), uint8, uint16 or int32: which coordinates
    values: PyTree  # like params, each (m, k), at least float32: their signed values
    error: PyTree  # like params: a `Quantized` of d numbers, or (d,) at least float32 without quantisation
    key: jax.Array | None  # key of the stochastic rounding; None if codes are rounded to the nearest


def scale_by_micro_adam(
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    density: float = 0.01,
    memory_size: int = 10,
    quantization_bits: int | None = 4,
    bucket_size: int | None = None,
    block_size: int | None = None,
    rounding_key: jax.Array | None = None,
    bias_correction: Literal["global", "window"] = "global",
) -> optax.GradientTransformation:
    r"""Rescales updates by MicroAdam's rule: top-k, error feedback, moments over a window of m sparse gradients.

    .. math::
        a &= \tilde g_t + Q^{-1}(e), \quad (I_t, V_t) = \mathrm{top}_k(|a|), \quad a[I_t] \leftarrow 0, \quad
        e \leftarrow Q(a), \\
        \hat m &= \frac{1 - \beta_1}{1 - \beta_1^t} \sum_{j=0}^{\min(t,m)-1} \beta_1^j \,[I_{t-j}, V_{t-j}], \quad
        \hat v = \frac{1 - \beta_2}{1 - \beta_2^t} \sum_{j=0}^{\min(t,m)-1} \beta_2^j \,[I_{t-j}, V_{t-j}^2], \\
        u &= \hat m / (\epsilon + \sqrt{\hat v}).

    The update of a coordinate that is nowhere in the window is exactly 0.

    *Learning rates.* The sums have at most m terms, but the paper divides by :math:`1 - \beta^t` at every step t. Once
    the window is full, the update for a constant gradient is therefore about
    :math:`(1 - \beta_1^m) / \sqrt{1 - \beta_2^m}` times that of Adam: 6.5 times for m = 10 and the default decays.
    ``bias_correction="window"`` divides by :math:`1 - \beta^{\min(t, m)}`. The update is then that of Adam, and needs a
    learning rate that is larger by the same factor.

    Args:
        b1, b2: decay of the first and second moment, in [0, 1).
        eps: added outside the root, positive.
        density: share of coordinates that each step keeps, in (0, 1]: ``k = ceil(density * size)`` for each parameter.
        memory_size: m, the number of steps in the window, at least 1.
        quantization_bits: bits per parameter of the error: 4 (two codes per byte) or 8. None stores floats, as the
            authors' published code does.
        bucket_size: number of coordinates that share a quantisation range (two floats, 8 bytes). None for one range per
            parameter, as in the paper.
        block_size: choose the largest coordinates of each block of this length (``ceil(density * block)``), which is
            much cheaper on accelerators. None for the largest of each parameter, as in the paper.
        rounding_key: PRNG key for stochastic rounding of the error, which is then unbiased, as the paper's proof of
            convergence requires. None rounds to the nearest code. Do not use the key for anything else.
        bias_correction: ``"global"`` or ``"window"``; see above.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: post-processing of noised updates. The randomness of the rounding protects nothing.

    Reference: Hudişteanu, Cyffers and Kalinin, DP-MicroAdam: Private and Frugal Algorithm for Training and Fine-tuning,
    Algorithm 1; Modoranu et al. (2024), MicroAdam, Algorithm 1.

    >>> rule = scale_by_micro_adam(density=0.25, quantization_bits=None)
    >>> updates, state = rule.update(jnp.array([1.0, -8.0, 2.0, 3.0]), rule.init(jnp.zeros(4)))
    >>> [round(u, 3) for u in updates.tolist()], state.error.tolist()
    ([0.0, -1.0, 0.0, 0.0], [1.0, 0.0, 2.0, 3.0])
    """
    if rounding_key is not None:
        validate.prng_key(rounding_key, "rounding_key")
        if quantization_bits is None:
            raise ValueError("rounding_key is for rounding codes; with quantization_bits=None there are none to round.")
    rule = _LeafRule(b1, b2, eps, density, memory_size, quantization_bits, bucket_size, block_size, bias_correction)

    def init_fn(params: optax.Params) -> Any:  # not the state, whose key may be None: Optax's types have no None
        first = jax.tree.map(rule.init, params)
        indices, values, error = (jax.tree.map(lambda _, x, i=i: x[i], params, first) for i in range(3))
        key = None if rounding_key is None else own_key(rounding_key)
        return ScaleByMicroAdamState(jnp.zeros([], jnp.int32), indices, values, error, key)

    def update_fn(updates: optax.Updates, state: PyTree, params: optax.Params | None = None) -> tuple[Any, Any]:
        del params
        count = trees.next_count(state.count)
        leaves, structure = jax.tree.flatten(updates)
        keys = [None] * len(leaves)
        if state.key is not None:
            step_key = jax.random.fold_in(jax.random.fold_in(state.key, state.count), _ROUNDING)
            keys = jax.random.split(step_key, len(leaves))
        stored = jax.tree.map(jnp.asarray, (state.indices, state.values, state.error))  # NumPy after a restore
        stored = [structure.flatten_up_to(tree) for tree in stored]
        new = [rule.update(count, *leaf) for leaf in zip(leaves, *stored, keys, strict=True)]
        updates, indices, values, error = (structure.unflatten([leaf[i] for leaf in new]) for i in range(4))
        return updates, ScaleByMicroAdamState(count, indices, values, error, state.key)

    return optax.GradientTransformation(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class _LeafRule:
    """The rule of `scale_by_micro_adam` for one leaf of the parameters, with its arguments."""

    b1: float
    b2: float
    eps: float
    density: float
    memory_size: int
    quantization_bits: int | None
    bucket_size: int | None
    block_size: int | None
    bias_correction: Literal["global", "window"]

    def __post_init__(self):
        validate.fraction(b1=self.b1, b2=self.b2)
        validate.positive(eps=self.eps)
        validate.probability(density=self.density)
        validate.positive_int(memory_size=self.memory_size)
        validate.one_of((4, 8, None), quantization_bits=self.quantization_bits)
        if self.block_size is not None:
            validate.positive_int(block_size=self.block_size)
        if self.bucket_size is not None:
            validate.positive_int(bucket_size=self.bucket_size)
            if self.quantization_bits is None:
                raise ValueError("bucket_size needs quantization_bits: without quantisation there are no ranges.")
        validate.one_of(("global", "window"), bias_correction=self.bias_correction)

    def init(self, p: jax.Array) -> tuple[jax.Array, jax.Array, PyTree]:
        """The first indices, values and error."""
        size, dtype = jnp.size(p), trees.accumulator_dtype(jnp.result_type(p))
        num_kept = _topk.num_kept(size, self.density, self.block_size)
        row = jnp.arange(num_kept).astype(_topk.index_dtype(size))
        indices = jnp.tile(row, (self.memory_size, 1))  # distinct in a row, so zeros can be scattered like any values
        values = jnp.zeros((self.memory_size, num_kept), dtype)
        if self.quantization_bits is None:
            return indices, values, jnp.zeros((size,), dtype)
        error = _quantize.zeros(size, dtype, bits=self.quantization_bits, bucket_size=self.bucket_size)
        return indices, values, error

    def update(
        self,
        count: jax.Array,
        g: jax.Array,
        indices: jax.Array,
        values: jax.Array,
        error: PyTree,
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:
        """The update, and the new indices, values and error. ``count`` includes this step."""
        if g.size == 0:
            return g, indices, values, error
        bits, bucket_size = self.quantization_bits, self.bucket_size
        if bits is not None:
            error = _quantize.dequantize(error, g.size, bits=bits, bucket_size=bucket_size)
        a = g.reshape(-1).astype(error.dtype) + error
        chosen = _topk.top_k(a, self.density, self.block_size)
        error = a.at[chosen].set(0, unique_indices=True)
        if bits is not None:
            error = _quantize.quantize(error, key=key, bits=bits, bucket_size=bucket_size)
        slot = (count - 1) % self.memory_size
        indices = indices.at[slot].set(chosen.astype(indices.dtype))
        values = values.at[slot].set(a[chosen])
        m_hat, v_hat = self._moments(indices, values, g.size, count)
        return (m_hat / (self.eps + jnp.sqrt(v_hat))).reshape(g.shape), indices, values, error

    def _moments(self, indices: jax.Array, values: jax.Array, size: int, count: jax.Array) -> list[jax.Array]:
        """Both moments: the rows of the window are added to dense vectors, one at a time."""
        decays = (self.b1, self.b2)
        window = jnp.minimum(count, self.memory_size)

        def add_row(row: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            age = ((count - 1 - row) % self.memory_size).astype(values.dtype)
            # The indices of a row are distinct, so the order of additions, and the result, is the same on any device.
            return tuple(
                total.at[indices[row].astype(jnp.int32)].add(decay**age * values[row] ** order, unique_indices=True)
                for total, decay, order in zip(sums, decays, (1, 2), strict=True)
            )

        sums = jax.lax.fori_loop(0, window, add_row, (jnp.zeros((size,), values.dtype),) * 2)
        seen = count if self.bias_correction == "global" else window
        return [
            (1 - decay) / one_minus_power(decay, seen, values.dtype) * total
            for total, decay in zip(sums, decays, strict=True)
        ]


def dp_micro_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    density: float = 0.01,
    memory_size: int = 10,
    quantization_bits: int | None = 4,
    weight_decay: float = 0.0,
    noise: Strategy | None = None,
    **options: Any,
) -> PrivateOptimizer:
    r"""DP-MicroAdam: the private mean gradient, then `scale_by_micro_adam`.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key, noise: see `dpopt.dp_sgd`.
        b1, b2, eps, density, memory_size, quantization_bits: see `scale_by_micro_adam`.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        **options: other arguments of `scale_by_micro_adam`: ``bucket_size``, ``block_size``, ``rounding_key`` (not the
            ``key`` of the noise), ``bias_correction``.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dpopt.dp_sgd`; the rule is post-processing.

    Reference: see `scale_by_micro_adam`.

    >>> opt = dp_micro_adam(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    rule = scale_by_micro_adam(
        b1=b1,
        b2=b2,
        eps=eps,
        density=density,
        memory_size=memory_size,
        quantization_bits=quantization_bits,
        **options,
    )
    # The paper shrinks the weights before the step: w (1 - lr wd) - lr u is w - lr (u + wd w).
    return chain(core, rule, *decayed_weights(weight_decay), descent(learning_rate))
