"""Clip functions: they map the norms of an example's gradient to the factor by which it is scaled down."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpopt.common import trees, validate
from dpopt.common.types import PyTree
from dpopt.engines import clips, stacked
from dpopt.engines.norms import safe_norm, shrink_to, without_denormals

# The least clip norm and gamma. Float32 flushes numbers below 2^-126: norms near this bound lose less than 2^-20 to it.
LEAST_CLIP_NORM = 2.0**-100
_TOO_SMALL = "Float32 would lose gradients of that size and smaller; multiply the loss by a constant instead."


def _check_clip_norm(*, allow_inf: bool = False, **named: float | jax.Array) -> None:
    """Raises unless a clip norm is 0, which scales every example to zero, or large enough for float32."""
    validate.non_negative(allow_inf=allow_inf, **named)
    for name, value in named.items():
        if validate.concrete(value) != 0:
            validate.at_least(LEAST_CLIP_NORM, _TOO_SMALL, **{name: value})


@clips.takes_rows
@dataclasses.dataclass(frozen=True)
class FlatClip:
    r"""Scales an example down to norm C over all parameters: :math:`c_i = \min(1, C / \|g_i\|_2)`.

    Args:
        l2_clip_norm: C; ``math.inf`` switches clipping off, 0 scales every example to zero.

    Raises:
        ValueError, TypeError: if C is not a number, or negative, or between 0 and 2^-100.

    *Privacy*: sensitivity C under add/remove-one.

    >>> FlatClip(2.0).coefficients(jnp.array([1.0, 4.0])).tolist()
    [1.0, 0.5]
    """

    l2_clip_norm: float | jax.Array

    def __post_init__(self):
        _check_clip_norm(l2_clip_norm=self.l2_clip_norm, allow_inf=True)

    @property
    def sensitivity(self) -> float | jax.Array:
        """L2 sensitivity of the clipped sum to adding or removing one example."""
        return self.l2_clip_norm

    def coefficients(self, leaf_norms: PyTree) -> PyTree:
        """Maps norms, a pytree of ``(B,)``, to coefficients of the same shape, equal for all leaves."""
        c = shrink_to(self.l2_clip_norm, stacked.global_norms(leaf_norms))
        return jax.tree.map(lambda _: c, leaf_norms)


@clips.takes_rows
@dataclasses.dataclass(frozen=True)
class GroupClip:
    r"""Clips each group of parameters separately: :math:`c_{i,k} = \min(1, C_k / \|g_{i,k}\|_2)`.

    Args:
        l2_clip_norms: the :math:`C_k`, a pytree that is a prefix of the parameters. Everything below one entry is one
            group: ``{"encoder": 1.0, "head": 0.1}`` has two, one number per leaf clips per leaf. 0 scales to zero.

    Raises:
        ValueError, TypeError: if an entry is not a finite number, or negative, or between 0 and 2^-100; when clipping,
            if the tree is not a prefix.

    *Privacy*: sensitivity :math:`\sqrt{\sum_k C_k^2}` under add/remove-one. An example adds zero to groups where its
      gradient is not finite, and counts in the others.

    >>> GroupClip({"a": 3.0, "b": 4.0}).sensitivity
    5.0
    """

    l2_clip_norms: PyTree

    def __post_init__(self):
        entries = jax.tree_util.tree_leaves_with_path(self.l2_clip_norms)
        if not entries:
            raise ValueError("l2_clip_norms has no entries; pass one clip norm per group of parameters.")
        for path, entry in entries:
            _check_clip_norm(**{f"l2_clip_norms{jax.tree_util.keystr(path)}": entry})

    @property
    def sensitivity(self) -> float | jax.Array:
        """L2 sensitivity of the clipped sum to adding or removing one example; traced if a clip norm is."""
        clip_norms = jax.tree.leaves(self.l2_clip_norms)
        if any(isinstance(c, Tracer) for c in clip_norms):
            return safe_norm(jnp.stack([*map(jnp.asarray, clip_norms)]), axis=0)
        return float(np.linalg.norm(np.array(clip_norms, np.float64)))

    def coefficients(self, leaf_norms: PyTree) -> PyTree:
        """Maps norms, a pytree of ``(B,)``, to coefficients of the same shape."""

        def one_group(c: float | jax.Array, group: PyTree) -> PyTree:
            shrink = shrink_to(c, stacked.global_norms(group))
            return jax.tree.map(lambda _: shrink, group)

        return self._mapped(one_group, leaf_norms)

    def own_clip_norms(self, params: PyTree) -> list[float | jax.Array | None]:
        """C_k of each parameter that is a group by itself and so can be clipped within the backward pass, else None."""

        def one_group(c: float | jax.Array, group: PyTree) -> list[float | jax.Array | None]:
            size = len(jax.tree.leaves(group))
            return [c if size == 1 else None] * size

        lists = self._mapped(one_group, params)
        return jax.tree.leaves(lists, is_leaf=lambda x: x is None)

    def _mapped(self, one_group: Callable[[float | jax.Array, PyTree], PyTree], tree: PyTree) -> PyTree:
        try:
            return jax.tree.map(one_group, self.l2_clip_norms, tree)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                "l2_clip_norms must be a prefix of the parameters' tree; got "
                f"{jax.tree.structure(self.l2_clip_norms)} for parameters {jax.tree.structure(tree)}."
            ) from error


@clips.takes_rows
@dataclasses.dataclass(frozen=True)
class LayerwiseClip:
    r"""Clips every parameter separately, and every layer of parameters that are stacked for a scan.

    All K of them get the same share of the clip norm: :math:`c_{i,k} = \min(1, C / (\sqrt{K} \|g_{i,k}\|_2))`. The
    coefficient of a parameter is known as soon as its gradient is, so the ghost engine clips within a single backward
    pass. This trains the largest models privately in the time and memory of ordinary training. Flat clipping, which
    keeps the direction of every gradient, is often more accurate for the same C.

    Args:
        l2_clip_norm: C, of the whole gradient, finite; 0 scales every example to zero.
        scanned: which parameters stack layers along their first axis, as for ``jax.lax.scan`` and ``nn.scan``: a pytree
            of booleans that is a prefix of the parameters, such as ``{"layers": True, "embed": False}``.

    Raises:
        ValueError, TypeError: if C is not a finite number, or negative, or between 0 and 2^-100; when clipping, if
            ``scanned`` is not a prefix of the parameters, or True for a scalar.

    *Privacy*: sensitivity C under add/remove-one. An example adds zero to parameters where its gradient is not finite.

    Reference: McMahan, Ramage, Talwar and Zhang (2018), per-layer clipping; He et al. (2023), group-wise clipping.

    >>> clip = LayerwiseClip(2.0, scanned={"layers": True, "head": False})
    >>> clip.coefficients({"layers": jnp.array([1.0, 2.0, 4.0]), "head": jnp.array(0.5)})["layers"].tolist()
    [1.0, 0.5, 0.25]
    """

    l2_clip_norm: float | jax.Array
    scanned: PyTree = False

    def __post_init__(self):
        _check_clip_norm(l2_clip_norm=self.l2_clip_norm)
        for path, entry in jax.tree_util.tree_leaves_with_path(self.scanned):
            if not isinstance(entry, bool):
                raise TypeError(f"scanned{jax.tree_util.keystr(path)} must be True or False, got {entry!r}.")

    @property
    def sensitivity(self) -> float | jax.Array:
        """L2 sensitivity of the clipped sum to adding or removing one example."""
        return self.l2_clip_norm

    def coefficients(self, leaf_norms: PyTree) -> PyTree:
        """Maps norms, a pytree of ``(B,)``, or ``(B, layers)`` where scanned, to coefficients of the same shapes."""
        is_scanned = trees.broadcast_prefix(self.scanned, leaf_norms, "scanned")
        norms, tree = jax.tree.flatten(leaf_norms)
        counts = [n.shape[-1] if s else 1 for n, s in zip(norms, jax.tree.leaves(is_scanned), strict=True)]
        return tree.unflatten([shrink_to(self._share(counts), n) for n in norms])

    def layer_axes(self, params: PyTree) -> list[int]:
        """How many leading axes of each parameter index layers: 1 or 0."""
        is_scanned = jax.tree.leaves(trees.broadcast_prefix(self.scanned, params, "scanned"))
        if any(s and jnp.ndim(p) == 0 for s, p in zip(is_scanned, jax.tree.leaves(params), strict=True)):
            raise ValueError("scanned is True for a parameter that is a scalar: it has no axis of layers.")
        return [int(s) for s in is_scanned]

    def own_clip_norms(self, params: PyTree) -> list[float | jax.Array]:
        """The norm that each parameter, and each layer, is scaled down to."""
        axes = self.layer_axes(params)
        counts = [jnp.shape(p)[0] if axis else 1 for p, axis in zip(jax.tree.leaves(params), axes, strict=True)]
        return [self._share(counts)] * len(counts)

    def _share(self, counts: list[int]) -> float | jax.Array:
        # Not in 16 bits, which would round all shares up together.
        return trees.widened(self.l2_clip_norm) / sum(counts) ** 0.5


@clips.takes_rows
@dataclasses.dataclass(frozen=True)
class NormalizedClip:
    r"""Gives every example about the same norm (AUTO-S): :math:`c_i = C / (\|g_i\|_2 + \gamma)`.

    Args:
        l2_clip_norm: C, finite; 0 scales every example to zero. It scales the learning rate, and needs no tuning.
        gamma: stability constant, positive: an example with a norm far below it keeps a small weight. Below about 1e-15
            the ghost engine may have to form gradients one at a time, to tell norms of that size apart.

    Raises:
        ValueError, TypeError: if an argument is not a finite number, or negative, or between 0 and 2^-100; if gamma is
            0, or below 2^-100 of C.

    *Privacy*: sensitivity C under add/remove-one (the norm stays below C).

    Reference: Bu, Wang, Zha and Karypis (2023), Automatic clipping, AUTO-S.

    >>> NormalizedClip(2.0, gamma=1.0).coefficients(jnp.array([1.0, 3.0])).tolist()
    [1.0, 0.5]
    """

    l2_clip_norm: float | jax.Array
    gamma: float | jax.Array = 0.01

    def __post_init__(self):
        _check_clip_norm(l2_clip_norm=self.l2_clip_norm)
        validate.positive(gamma=self.gamma)
        validate.at_least(LEAST_CLIP_NORM, _TOO_SMALL, gamma=self.gamma)
        bound = validate.concrete(self.l2_clip_norm)
        if bound is not None:
            validate.at_least(bound * LEAST_CLIP_NORM, "C / gamma would overflow.", gamma=self.gamma)

    @property
    def sensitivity(self) -> float | jax.Array:
        """L2 sensitivity of the clipped sum to adding or removing one example."""
        return self.l2_clip_norm

    def coefficients(self, leaf_norms: PyTree) -> PyTree:
        """Maps norms, a pytree of ``(B,)``, to coefficients of the same shape, equal for all leaves."""
        norms = stacked.global_norms(leaf_norms)
        c = self.l2_clip_norm / (norms + self.gamma)
        c = jnp.where(jnp.isfinite(c), c, 0)  # a traced clip norm may be too large, or both may be 0
        c = without_denormals(c, norms.dtype)
        return jax.tree.map(lambda _: c, leaf_norms)
