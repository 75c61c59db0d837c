"""DP-SGD and its adaptive relatives: the private mean gradient, then the ordinary Optax rule.

The simplest optimizers; copy one to add another.
"""

from typing import Any

import jax
import optax

from dpopt.chain import PrivateOptimizer, chain
from dpopt.common import validate
from dpopt.common.types import ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.optimizers._parts import Clip, private_mean


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    momentum: float | None = None,
    nesterov: bool = False,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""DP-SGD: :math:`w \leftarrow w - \eta\, (\sum_i \mathrm{clip}(g_i, C) + \sigma C z) / B`, with optional momentum.

    Args:
        learning_rate: eta, a number or a schedule ``step -> number``.
        l2_clip_norm: C, positive (``math.inf`` only without noise), or a clip function of `dpopt.clipping`.
        noise_multiplier: sigma, at least 0; 0 is ordinary SGD without privacy.
        expected_batch_size: B, the expected number of examples in a batch.
        key: PRNG key of the noise; do not use it for anything else.
        momentum: decay of the momentum trace, or None.
        nesterov: whether to use Nesterov momentum.
        noise: a strategy of `dpopt.correlated`, for noise that is correlated over steps; None for independent noise.

    Returns:
        An optimizer whose ``update`` takes a promise of `per_example_grads`, or ``(B, ...)`` gradients.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: one Gaussian query per step with multiplier sigma, under add/remove of one example.

    Reference: Abadi et al. (2016), Deep Learning with Differential Privacy, Algorithm 1.

    >>> import jax.numpy as jnp
    >>> opt = dp_sgd(1.0, l2_clip_norm=1.0, noise_multiplier=0.0, expected_batch_size=2, key=jax.random.key(0))
    >>> updates, _ = opt.update(jnp.array([[3.0, 4.0], [0.0, 0.0]]), opt.init(jnp.zeros(2)), jnp.zeros(2))
    >>> [round(x, 3) for x in updates.tolist()]
    [-0.3, -0.4]
    """
    validate.rate(learning_rate=learning_rate)
    validate.flag(nesterov=nesterov)
    if momentum is not None:
        validate.fraction(momentum=momentum)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    return chain(core, optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov))


def dp_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    """DP-Adam: the private mean gradient, then ``optax.adam``.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        b1, b2, eps: see ``optax.adam``.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dp_sgd`; Adam is post-processing.

    >>> opt = dp_adam(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    _check(learning_rate, b1=b1, b2=b2, eps=eps)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    return chain(core, optax.adam(learning_rate, b1=b1, b2=b2, eps=eps))


def dp_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    """DP-AdamW: the private mean gradient, then ``optax.adamw``.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        b1, b2, eps: see ``optax.adam``.
        weight_decay: decoupled weight decay, multiplied by the learning rate.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dp_sgd`; AdamW, decay included, is post-processing.

    >>> opt = dp_adamw(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    _check(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    return chain(core, optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay))


def dp_rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    decay: float = 0.9,
    eps: float = 1e-8,
    eps_in_sqrt: bool = True,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    """DP-RMSProp: the private mean gradient, then ``optax.rmsprop``.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        decay: decay of the mean square.
        eps: added to the mean square or to its root; see ``eps_in_sqrt``.
        eps_in_sqrt: whether ``eps`` is added inside the root, as in Optax; the DP papers add it outside (False).

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dp_sgd`; RMSProp is post-processing.

    >>> opt = dp_rmsprop(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    _check(learning_rate, decay=decay, eps=eps)
    validate.flag(eps_in_sqrt=eps_in_sqrt)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    return chain(core, optax.rmsprop(learning_rate, decay=decay, eps=eps, eps_in_sqrt=eps_in_sqrt))


def dp_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    """DP-AdaGrad: the private mean gradient, then ``optax.adagrad``.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        initial_accumulator_value, eps: see ``optax.adagrad``.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dp_sgd`; AdaGrad is post-processing.

    >>> opt = dp_adagrad(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    _check(learning_rate, eps=eps, initial_accumulator_value=initial_accumulator_value)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    rule = optax.adagrad(learning_rate, initial_accumulator_value=initial_accumulator_value, eps=eps)
    return chain(core, rule)


def dp_yogi(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-3,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    """DP-Yogi: the private mean gradient, then ``optax.yogi``.

    Args:
        learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        b1, b2, eps: see ``optax.yogi``.

    Raises:
        ValueError, TypeError: for a bad argument, named.

    *Privacy*: as `dp_sgd`; Yogi is post-processing.

    >>> opt = dp_yogi(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    >>> round(opt.privacy.step_event().noise_multiplier, 2)
    1.0
    """
    _check(learning_rate, b1=b1, b2=b2, eps=eps)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise)
    return chain(core, optax.yogi(learning_rate, b1=b1, b2=b2, eps=eps))


def _check(learning_rate: optax.ScalarOrSchedule, **named: Any) -> None:
    """What Optax's rules take for granted: decay rates below 1, and nothing else below 0."""
    validate.rate(learning_rate=learning_rate)
    decays = {name: value for name, value in named.items() if name in ("b1", "b2", "decay")}
    validate.fraction(**decays)
    validate.non_negative(**{name: value for name, value in named.items() if name not in decays})
