"""DP-MicroAdam: Adam whose moments are recomputed from a short window of sparse private gradients.

Adam keeps two numbers for every parameter. MicroAdam keeps the last m sparse gradients (the k coordinates of each that
matter most) and, in a few bits, the error of leaving the others out, which the next gradient makes up for. At density
0.01, m = 10 and 4 bits that is about 1.3 bytes a parameter against Adam's 8.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.common import trees, validate
from dpopt.common.averages import one_minus_power
from dpopt.correlated.strategies import Strategy
from dpopt.optimizers import _quantize, _topk
from dpopt.optimizers._decay import decayed_weights
from dpopt.private_mean import privatize

ScalarOrSchedule = Any  # float, or step -> float

# Sets the rounding's draws apart from the noise's, should anyone give both the same key: codes that depended on the
# noise itself would tell something about it, and would no longer be post-processing.
_ROUNDING = 0x526F756E


class ScaleByMicroAdamState(NamedTuple):
    """State of `scale_by_micro_adam`. A leaf of d parameters keeps k of its coordinates a step, over m steps.

    Row ``(t - 1) % m`` of the two windows is written at step t (the first is t = 1), so after step t the row after it
    is the oldest. Rows not written yet hold zeros.
    """

    count: jax.Array  # (), int32: updates so far
    indices: Any  # like params, each (m, k), uint8, uint16 or int32: which coordinates
    values: Any  # like params, each (m, k), at least float32: their signed values
    error: Any  # like params: a `Quantized` of d numbers, or (d,) at least float32 without quantisation
    key: jax.Array | None  # key of the randomised rounding; None where codes are rounded to the nearest


def scale_by_micro_adam(
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    density: float = 0.01,
    memory_size: int = 10,
    quantization_bits: int | None = 4,
    bucket_size: int | None = None,
    top_k: Literal["exact", "block"] = "exact",
    block_size: int = 4096,
    rounding: Literal["nearest", "stochastic"] = "nearest",
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

    A coordinate that is nowhere in the window moves by exactly 0. As everywhere in Optax the caller multiplies by the
    negative learning rate.

    *Learning rates.* The sums end after m terms, but the paper divides by :math:`1 - \beta^t` for the whole run. Once
    the window is full a constant gradient therefore steps about
    :math:`(1 - \beta_1^m) / \sqrt{1 - \beta_2^m}` times as far as under Adam: 6.5 times for m = 10 and the default
    decays. ``bias_correction="window"`` divides by :math:`1 - \beta^{\min(t, m)}`, so that such a gradient steps as
    under Adam, and wants a learning rate that much larger.

    Args:
        b1, b2: decay of the first and second moment, in [0, 1).
        eps: added outside the root, positive.
        density: share of coordinates that each step keeps, in (0, 1]: ``k = ceil(density * size)`` for each parameter.
        memory_size: m, the number of steps in the window, at least 1.
        quantization_bits: 4 or 8 for the error in that many bits a parameter (4-bit codes are packed two to a byte), or
            None for a float, which is what the authors' published code does.
        bucket_size: how many coordinates share the two floats of a quantisation range (8 bytes a bucket), or None for
            one range a parameter, as in the paper.
        top_k: ``"exact"`` for the largest coordinates of each parameter, ``"block"`` for the largest of each block
            (``ceil(density * block)``), which is much cheaper on accelerators.
        block_size: length of these blocks.
        rounding: ``"nearest"``, or ``"stochastic"``, which makes the stored error right on average, as the paper's
            proof of convergence asks.
        rounding_key: PRNG key of the stochastic rounding, needed for it and used for nothing else.
        bias_correction: ``"global"`` or ``"window"``; see above.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: post-processing of noised updates. The rounding's randomness protects nothing.

    Reference: Hudişteanu, Cyffers and Kalinin, DP-MicroAdam: Private and Frugal Algorithm for Training and Fine-tuning,
    Algorithm 1; Modoranu et al. (2024), MicroAdam, Algorithm 1.

    >>> rule = scale_by_micro_adam(density=0.25, quantization_bits=None)
    >>> updates, state = rule.update(jnp.array([1.0, -8.0, 2.0, 3.0]), rule.init(jnp.zeros(4)))
    >>> [round(u, 3) for u in updates.tolist()], state.error.tolist()
    ([0.0, -1.0, 0.0, 0.0], [1.0, 0.0, 2.0, 3.0])
    """
    validate.fraction(b1=b1, b2=b2)
    validate.positive(eps=eps)
    validate.probability(density=density)
    validate.positive_int(memory_size=memory_size, block_size=block_size)
    validate.one_of((4, 8, None), quantization_bits=quantization_bits)
    if bucket_size is not None:
        validate.positive_int(bucket_size=bucket_size)
        if quantization_bits is None:
            raise ValueError("bucket_size is the reach of a quantisation range; with quantization_bits=None leave it.")
    validate.one_of(("exact", "block"), top_k=top_k)
    validate.one_of(("global", "window"), bias_correction=bias_correction)
    _check_rounding(rounding, rounding_key, quantization_bits)
    block = block_size if top_k == "block" else None

    def init_fn(params) -> Any:  # not the state, whose key may be None: Optax's types know no None
        def rows(p, dtype=None):
            kept = _topk.num_kept(jnp.size(p), density, block)
            if dtype is None:  # distinct places, so that a row of zeros may be scattered like any other
                row = jnp.arange(kept).astype(_topk.index_dtype(jnp.size(p)))
                return jnp.tile(row, (memory_size, 1))
            return jnp.zeros((memory_size, kept), dtype)

        def error(p):
            if quantization_bits is None:
                return jnp.zeros((jnp.size(p),), _moment_dtype(p))
            return _quantize.zeros(jnp.size(p), _moment_dtype(p), bits=quantization_bits, bucket_size=bucket_size)

        return ScaleByMicroAdamState(
            count=jnp.zeros([], jnp.int32),
            indices=jax.tree.map(rows, params),
            values=jax.tree.map(lambda p: rows(p, _moment_dtype(p)), params),
            error=jax.tree.map(error, params),
            key=jnp.asarray(rounding_key) if rounding == "stochastic" else None,
        )

    def accumulate(g, error, key):
        """One leaf: the kept coordinates, their values, and the error of dropping the others."""
        if quantization_bits is not None:
            error = _quantize.dequantize(error, g.size, bits=quantization_bits, bucket_size=bucket_size)
        a = g.reshape(-1).astype(error.dtype) + error
        chosen = _topk.top_k(a, density, block)
        values = a[chosen]
        rest = a.at[chosen].set(0, unique_indices=True)
        if quantization_bits is not None:
            rest = _quantize.quantize(rest, key=key, bits=quantization_bits, bucket_size=bucket_size)
        return chosen, values, rest

    def moments(indices, values, like, count):
        """One leaf: both moments, by adding one row of the window at a time to a dense vector."""
        window = jnp.minimum(count, memory_size)

        def add_row(row, sums):
            age = ((count - 1 - row) % memory_size).astype(values.dtype)
            # Within a row no coordinate comes twice, so the order of additions, and the result, is the same anywhere.
            return tuple(
                total.at[indices[row].astype(jnp.int32)].add(decay**age * values[row] ** order, unique_indices=True)
                for total, decay, order in zip(sums, (b1, b2), (1, 2), strict=True)
            )

        sums = jax.lax.fori_loop(0, window, add_row, (jnp.zeros((like.size,), values.dtype),) * 2)
        seen = count if bias_correction == "global" else window
        return tuple(
            (1 - decay) / one_minus_power(decay, seen, values.dtype) * total
            for total, decay in zip(sums, (b1, b2), strict=True)
        )

    def update_leaf(count, g, indices, values, error, key):
        if g.size == 0:
            return g, indices, values, error
        chosen, kept, error = accumulate(g, error, key)
        slot = (count - 1) % memory_size
        indices = indices.at[slot].set(chosen.astype(indices.dtype))
        values = values.at[slot].set(kept)
        m_hat, v_hat = moments(indices, values, g, count)
        return (m_hat / (eps + jnp.sqrt(v_hat))).reshape(g.shape), indices, values, error

    def update_fn(updates, state, params=None) -> tuple[Any, Any]:
        del params
        count = trees.next_count(state.count)
        leaves, structure = jax.tree.flatten(updates)
        keys = [None] * len(leaves)
        if state.key is not None:
            step_key = jax.random.fold_in(jax.random.fold_in(state.key, state.count), _ROUNDING)
            keys = jax.random.split(step_key, len(leaves))
        stored = jax.tree.map(jnp.asarray, (state.indices, state.values, state.error))  # NumPy after a restore
        stored = [structure.flatten_up_to(tree) for tree in stored]
        new = [update_leaf(count, *leaf) for leaf in zip(leaves, *stored, keys, strict=True)]
        updates, indices, values, error = (structure.unflatten(column) for column in zip(*new, strict=True))
        return updates, ScaleByMicroAdamState(count, indices, values, error, state.key)

    return optax.GradientTransformation(init_fn, update_fn)


def dp_micro_adam(
    learning_rate: ScalarOrSchedule,
    *,
    l2_clip_norm: Any,
    noise_multiplier: Any,
    expected_batch_size: Any,
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
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key: see `dpopt.dp_sgd`.
        b1, b2, eps, density, memory_size, quantization_bits: see `scale_by_micro_adam`.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        noise: a strategy of `dpopt.correlated`, for noise that is correlated over steps; None: independent noise.
        **options: the other arguments of `scale_by_micro_adam`: ``bucket_size``, ``top_k``, ``block_size``,
            ``rounding``, ``rounding_key`` (never the noise's ``key``), ``bias_correction``.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dpopt.dp_sgd`; the rule is post-processing.

    Reference: see `scale_by_micro_adam`.

    >>> opt = dp_micro_adam(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    core = privatize(
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        key=key,
        noise=noise,
    )
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
    return chain(core, rule, *decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))


def _moment_dtype(p: Any) -> Any:
    return trees.accumulator_dtype(jnp.result_type(p))


def _check_rounding(rounding: Any, rounding_key: Any, quantization_bits: Any) -> None:
    validate.one_of(("nearest", "stochastic"), rounding=rounding)
    if rounding == "nearest":
        if rounding_key is not None:
            raise ValueError('rounding_key is for rounding="stochastic"; rounding to the nearest draws nothing.')
        return
    if quantization_bits is None:
        raise ValueError('rounding="stochastic" rounds codes, and quantization_bits=None has none.')
    if rounding_key is None:
        raise ValueError('rounding="stochastic" needs a key of its own: pass rounding_key=jax.random.key(seed).')
    validate.prng_key(rounding_key)
