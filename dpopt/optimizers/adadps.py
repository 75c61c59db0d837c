"""AdaDPS: precondition by side information, then privatise. Also: side information from statistics of text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from dpopt.chain import PrivateOptimizer, chain
from dpopt.common import validate
from dpopt.common.types import PyTree, ScalarOrSchedule
from dpopt.correlated.strategy import Strategy
from dpopt.optimizers._parts import Clip, descent, private_mean
from dpopt.preconditioners.base import side_information
from dpopt.preconditioners.moments import public_moments


def adadps(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l2_clip_norm: Clip,
    noise_multiplier: ScalarOrSchedule,
    expected_batch_size: float | jax.Array,
    key: jax.Array,
    scale: PyTree = None,
    rule: str = "rmsprop",
    decay: float = 0.9,
    eps: float = 1e-3,
    b1: float = 0.9,
    eps_in_sqrt: bool = False,
    noise: Strategy | None = None,
) -> PrivateOptimizer:
    r"""AdaDPS: :math:`w \leftarrow w - \eta\, (\sum_i \mathrm{clip}(g_i / A, C) + \sigma C z) / B`.

    1 / A is either ``scale``, fixed, or computed from the second moment of public gradients (`public_moments`). Then
    every step must pass them: ``update(grads, state, params, public_grads=g)``. Without noise and with
    ``l2_clip_norm=math.inf`` this is the paper's non-private AdaS.

    Args:
        learning_rate: eta, a number or a schedule.
        l2_clip_norm: C; bounds the PRECONDITIONED gradient.
        noise_multiplier, expected_batch_size, key, noise: see `dp_sgd`.
        scale: 1 / A: positive numbers in the parameters' tree or a prefix of it (see `scale_from_frequencies`,
            `broadcast_feature_scale`), or None for public gradients.
        rule, decay, eps, b1, eps_in_sqrt: see `public_moments`; unused with a fixed scale.

    Raises:
        ValueError, TypeError: for a bad argument, named; in ``update``, without ``scale``, if there are no public
            gradients.

    *Privacy*: one Gaussian query per step with multiplier sigma, as `dp_sgd`. ``scale`` and public gradients must not
    depend on private data.

    Reference: Li, Zaheer, Reddi and Smith (2022), Private Adaptive Optimization with Side Information, Algorithm 1.

    >>> opt = adadps(
    ...     1.0, l2_clip_norm=9.0, noise_multiplier=0.0, expected_batch_size=1, key=jax.random.key(0), rule="adagrad",
    ...     eps=1.0)
    >>> params = jnp.zeros(2)
    >>> updates, _ = opt.update(jnp.ones((1, 2)), opt.init(params), params, public_grads=jnp.array([0.0, 3.0]))
    >>> updates.tolist()
    [-1.0, -0.25]
    """
    if scale is None:
        preconditioner = public_moments(rule=rule, decay=decay, eps=eps, b1=b1, eps_in_sqrt=eps_in_sqrt)
    else:
        validate.one_of(("rmsprop", "adagrad", "adam"), rule=rule)
        preconditioner = side_information(scale)
    core = private_mean(l2_clip_norm, noise_multiplier, expected_batch_size, key, noise, preconditioner)
    return chain(core, descent(learning_rate))


def scale_from_frequencies(frequencies: ArrayLike, *, cap: float = 1e4, division: float = 100.0) -> np.ndarray:
    r"""Side information from token frequencies: rare tokens get larger gradients.

    :math:`1 / A_j = \min(\mathrm{cap}, \max_k f_k / f_j) / \mathrm{division}`. Instead of frequencies, f can be any
    score that is larger for less important features, such as `tfidf_scores`.

    Args:
        frequencies: f, shape ``(d,)``, non-negative; a frequency of 0 gets the cap.
        cap: largest ratio, at least 1.
        division: divides the whole scale; equivalent to another clip norm and learning rate.

    Returns:
        Positive numbers, shape ``(d,)``, for `side_information` or `broadcast_feature_scale`.

    Raises:
        ValueError, TypeError: if a frequency is negative or not finite, if none is positive, or for a bad argument.

    *Privacy*: frequencies counted on the private training set are NOT public. Count them elsewhere, or release them by
    a private mechanism and add its event to that of the run.

    Reference: Li, Zaheer, Reddi and Smith (2022), section 6.2; cap and division as in their experiments.

    >>> scale_from_frequencies([100, 10, 0]).tolist()
    [0.01, 0.1, 100.0]
    """
    validate.positive(cap=cap, division=division)
    if cap < 1:
        raise ValueError(f"cap must be at least 1, the ratio of the most frequent token; got {cap}.")
    f = _non_negative("frequencies", frequencies, ndim=1)
    if not (f > 0).any():
        raise ValueError("frequencies must hold at least one positive number; all are 0.")
    ratio = np.divide(f.max(), f, out=np.full_like(f, cap), where=f > f.max() / cap)
    return np.minimum(ratio, cap) / division


def tfidf_scores(counts: ArrayLike) -> np.ndarray:
    r"""The mean TF-IDF score of each token over a PUBLIC set of documents, for `scale_from_frequencies`.

    Term frequency is a token's share of its document; inverse document frequency is :math:`\ln(n / n_j)`.

    Args:
        counts: shape ``(n, d)``: how often each of d tokens occurs in each of n documents.

    Returns:
        Scores, shape ``(d,)``, at least 0; 0 for a token that occurs nowhere or everywhere.

    Raises:
        ValueError, TypeError: if a count is negative or not finite, or the array has another rank.

    *Privacy*: not private. The documents must be public: scores of the training set reveal it.

    Reference: Li, Zaheer, Reddi and Smith (2022), section 6.2.

    >>> [round(x, 3) for x in tfidf_scores([[2, 2, 0], [4, 0, 0]]).tolist()]
    [0.0, 0.173, 0.0]
    """
    c = _non_negative("counts", counts, ndim=2)
    share = c / np.maximum(c.sum(axis=1, keepdims=True), 1)
    occurs_in = (c > 0).sum(axis=0)
    return share.mean(axis=0) * np.log(len(c) / np.maximum(occurs_in, 1))


def _non_negative(name: str, given: ArrayLike, ndim: int) -> np.ndarray:
    values = np.asarray(given)
    if not np.issubdtype(values.dtype, np.number) or np.issubdtype(values.dtype, np.complexfloating):
        raise TypeError(f"{name} must hold real numbers; got dtype {values.dtype}.")
    if values.ndim != ndim or values.size == 0:
        raise ValueError(f"{name} must be a non-empty array of rank {ndim}; got shape {values.shape}.")
    values = values.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        bad = values[~(np.isfinite(values) & (values >= 0))].flat[0]
        raise ValueError(f"{name} must be non-negative and finite; it holds {bad}.")
    return values


def broadcast_feature_scale(scale: ArrayLike, params: optax.Params, *, leaf: str, axis: int = 0) -> PyTree:
    """Side information for the first layer of a (generalised) linear model, from one number per input feature.

    Args:
        scale: shape ``(d,)``, positive.
        params: the parameters, or their shapes.
        leaf: name of the weights: the last key on their path, such as ``"kernel"``, or the whole path, such as
            ``"Dense_0/kernel"``.
        axis: which axis of the weights is the input features.

    Returns:
        A pytree like ``params`` for `side_information`: ``scale`` along ``axis`` of the weights, 1 elsewhere (the
        bias).

    Raises:
        ValueError: if not exactly one parameter has that name, or its size along ``axis`` is not d.

    *Privacy*: reads no data; see `side_information`.

    >>> broadcast_feature_scale([1.0, 2.0], {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}, leaf="w")["w"].tolist()
    [[1.0], [2.0]]
    """
    scale = np.asarray(scale, np.float64)
    if scale.ndim != 1:
        raise ValueError(f"scale must have one number a feature, shape (d,); got shape {scale.shape}.")
    paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)}
    matches = {path for path in paths if path == leaf or path.endswith("/" + leaf)}
    if len(matches) != 1:
        raise ValueError(
            f"leaf={leaf!r} must name one parameter; it names {len(matches)} of {', '.join(sorted(paths))}. Give the "
            "whole path, with / between keys."
        )

    def entry(path: tuple[Any, ...], p: ArrayLike) -> float | np.ndarray:
        if jax.tree_util.keystr(path, simple=True, separator="/") not in matches:
            return 1.0
        shape = jnp.shape(p)
        if not -len(shape) <= axis < len(shape) or shape[axis] != len(scale):
            raise ValueError(
                f"parameter {leaf!r} has shape {shape}, which has no {len(scale)} features on axis {axis}."
            )
        return scale.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])

    return jax.tree_util.tree_map_with_path(entry, params)
