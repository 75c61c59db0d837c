"""A check of the engines that shares nothing with them: plain ``jax.grad``, one example at a time, norms in NumPy.

The engines earn their speed by a lot of reasoning about programs. `verify` holds what they make of a loss against its
definition, on a few examples of the user's own and at the batch size that was planned.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.clipping import FlatClip
from dpopt.common import trees, validate
from dpopt.constants import constants_of, given
from dpopt.engines import explicit_axes, promises
from dpopt.gradients import Engine, per_example_grads
from dpopt.preconditioners.base import SideInformation

_log = logging.getLogger(__name__)

# A parameter whose gradient is zero but for rounding is compared with this share of the whole gradient (its squares
# come from sums that cancel), and a gradient far below the clip norm with this share of that.
_FLOOR, _FAR_BELOW = 2.0**-2, 2.0**-6
# How often a disagreement must show, each time at parameters that are moved by this share of themselves.
_TIMES, _MOVE = 3, 2.0**-12


class VerificationError(RuntimeError):
    """An engine's clipped sum is not what plain per-example gradients give.

    *Privacy*: the message names norms of single examples' gradients. It is as private as the data.

    >>> issubclass(VerificationError, RuntimeError)
    True
    """


def verify(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    has_aux: bool = False,
    scale: Any = None,
    examples: int = 4,
) -> None:
    """Compares an engine with plain ``jax.grad`` on the first few examples of a batch.

    Compared are, parameter by parameter, the norms of each example's gradient; the clipped sum of all of these
    examples; and the clipped sum of each alone, with all other rows masked out but present. Half of the examples are
    clipped: the clip norm is the median of their norms. Costs some steps of training, and compiles one.

    Norms of float32 must agree to 2^-8, sums to 2^-8 of what their terms add up to: a gradient counted twice or not at
    all is far outside, rounding (also a GPU's fast float32) far inside. Of a loss that computes in 16 bits or fewer,
    whose own rounding is larger, 2^-2 is asked.

    Where rounding decides on which side of a corner a loss is (the sign that a ReLU sees), two programs may rightly
    have two gradients. So a disagreement counts if it shows again at two more points nearby, where it would be chance.

    Args:
        loss_fn, engine, microbatch_size, has_aux: see `dpopt.per_example_grads`.
        params: floating pytree.
        batch: leaves ``(B, ...)``, with B as in training: the engine plans for it.
        scale: a diagonal before the clip, as for `dpopt.side_information`, or None.
        examples: how many examples to look at, at least 1.

    Raises:
        VerificationError: if they differ; it names the parameter. ValueError, TypeError: for a bad argument.

    *Privacy*: reads private examples, and returns nothing. The message of its error is private.

    >>> verify(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), jnp.eye(2))
    """
    validate.positive_int(examples=examples)
    options: dict[str, Any] = {"engine": engine, "microbatch_size": microbatch_size, "has_aux": has_aux}
    promise = per_example_grads(loss_fn, **options)(params, batch, mask=None)  # the same conditions
    promise = promise if scale is None else promise.scale(scale)
    params, batch = explicit_axes.with_automatic_types(jax.tree.map(jnp.asarray, (params, batch)))
    constants = explicit_axes.with_automatic_types(constants_of(loss_fn))
    if not all(x.is_fully_addressable for x in jax.tree.leaves((params, batch))):
        _log.warning("dpopt: not verified: other processes hold parts of the parameters or of the batch")
        return
    size = jax.tree.leaves(batch)[0].shape[0]
    plain = _Plain.of(loss_fn, constants, params, batch, min(examples, size), has_aux, scale)
    known = [n for n in plain.totals if 0 < n < np.inf]
    clip_norm = float(np.median(known)) if known else 1.0
    tolerance = _tolerance(loss_fn, constants, params, batch)

    @jax.jit
    def run(params, batch, mask, constants):
        own = given(loss_fn, constants)
        source = promises.Loss(own, params, batch, size, engine, microbatch_size, has_aux)
        ran = source.run(mask, promise._scale, None, FlatClip(clip_norm))
        return ran.leaf_norms, ran.sum

    def difference(params: Any, plain: _Plain) -> _Difference | None:
        everybody = list(range(len(plain.totals)))
        for chosen in [everybody, *([i] for i in everybody)] if len(everybody) > 1 else [everybody]:
            norms, total = jax.device_get(run(params, batch, np.isin(np.arange(size), chosen), constants))
            found = plain.difference(norms, total, chosen, clip_norm, tolerance)
            if found is not None:
                return found
        return None

    first = difference(params, plain)
    if first is None:
        return
    for attempt in range(1, _TIMES):
        near = _moved(params, attempt)
        plain = _Plain.of(loss_fn, constants, near, batch, min(examples, size), has_aux, scale)
        if difference(near, plain) is None:
            return
    raise VerificationError(_explained(first, engine))


def _moved(params: Any, seed: int) -> Any:
    """Parameters nearby; zeros stay zeros, since what holds there only (an adapter that is off) must be seen."""
    rng = np.random.default_rng(seed)

    def move(x: jax.Array) -> jax.Array:
        share = max(_MOVE, 4 * float(jnp.finfo(x.dtype).eps))  # beyond what rounding decides, also in 16 bits
        return x * jnp.asarray(1 + share * rng.uniform(-1, 1, x.shape), x.dtype)

    return jax.tree.map(move, params)


_verified: "weakref.WeakKeyDictionary[Callable, set]" = weakref.WeakKeyDictionary()


def verify_once(loss_fn: Callable[..., Any], params: Any, batch: Any, **options: Any) -> None:
    """`verify`, unless this process has done so for the same loss and shapes."""
    shapes = [(x.shape, x.dtype) for x in map(jnp.asarray, jax.tree.leaves((params, batch)))]
    scale = options.get("scale")
    what = str((shapes, jax.tree.structure((params, batch)), {**options, "scale": jax.tree.map(jnp.shape, scale)}))
    try:
        done = _verified.setdefault(loss_fn, set())
    except TypeError:  # no hash, or no weak reference: verified anew each time
        done = set()
    if what not in done:
        verify(loss_fn, params, batch, **options)
        done.add(what)


def fixed_scale(optimizer: Any, params: Any) -> Any:
    """The product of the fixed diagonals of an optimizer, like ``params``; None if it has none."""
    made_by = getattr(getattr(optimizer, "stage", None), "preconditioner", None)
    if isinstance(made_by, SideInformation):
        return trees.broadcast_prefix(made_by.scale, params, "scale")
    scales = [s for s in (fixed_scale(o, params) for o in getattr(optimizer, "stages", ())) if s is not None]
    return None if not scales else jax.tree.map(lambda *s: np.prod(np.broadcast_arrays(*s), axis=0), *scales)


class _Difference(NamedTuple):
    """Where an engine disagrees."""

    what: str
    parameter: str
    got: float
    want: float


class _Plain(NamedTuple):
    """Gradients of a few examples by themselves, in NumPy's float64."""

    names: list[str]
    grads: list[list[np.ndarray]]  # an example, a parameter
    norms: list[list[float]]
    totals: list[float]

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], constants: Any, params: Any, batch: Any, rows: int, has_aux: bool, scale: Any
    ) -> "_Plain":
        gradient = jax.jit(jax.grad(lambda p, x, constants: given(loss_fn, constants)(p, x), has_aux=has_aux))
        scales = None if scale is None else jax.tree.leaves(trees.broadcast_prefix(scale, params, "scale"))
        grads = []
        for i in range(rows):
            found = gradient(params, jax.tree.map(lambda x, i=i: x[i], batch), constants)
            leaves = jax.tree.leaves(jax.device_get(found[0] if has_aux else found))
            wide = [np.asarray(g).astype(np.float64) for g in leaves]
            grads.append(wide if scales is None else [g * np.asarray(s) for g, s in zip(wide, scales, strict=True)])
        names = [jax.tree_util.keystr(path) or "params" for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        norms = [[float(np.linalg.norm(g.ravel())) for g in row] for row in grads]
        return cls(names, grads, norms, [float(np.linalg.norm(row)) for row in norms])

    def difference(self, norms: Any, total: Any, chosen: list[int], clip_norm: float, tolerance: float):
        """The first thing that an engine says otherwise about the chosen examples, or None."""
        floors = [_FLOOR * max(n, _FAR_BELOW * clip_norm) for n in self.totals]
        finite = [i for i in chosen if np.isfinite(self.totals[i])]  # all others must contribute zero
        weights = [min(1.0, clip_norm / self.totals[i]) if self.totals[i] > 0 else 1.0 for i in finite]
        which = f"example {chosen[0]} of the batch alone" if len(chosen) == 1 else f"{len(chosen)} examples together"
        leaves = zip(self.names, jax.tree.leaves(norms), jax.tree.leaves(total), strict=True)
        for k, (name, rows, summed) in enumerate(leaves):
            for i in finite:
                got, want = float(rows[i]), self.norms[i][k]
                if not abs(got - want) <= tolerance * (want + floors[i]):
                    return _Difference(f"the norm of the gradient of example {i} of the batch", name, got, want)
            want = sum((w * self.grads[i][k] for w, i in zip(weights, finite, strict=True)), np.zeros(summed.shape))
            size = sum(w * (self.norms[i][k] + floors[i]) for w, i in zip(weights, finite, strict=True))
            if not np.linalg.norm((summed - want).ravel()) <= tolerance * size:
                got = float(np.linalg.norm(np.asarray(summed, np.float64).ravel()))
                return _Difference(f"the clipped sum (its norm) of {which}", name, got, float(np.linalg.norm(want)))
        return None


def _tolerance(loss_fn: Callable[..., Any], constants: Any, params: Any, batch: Any) -> float:
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    return 2.0**-2 if _computes_narrowly(jax.make_jaxpr(given(loss_fn, constants))(params, example).jaxpr) else 2.0**-8


def _computes_narrowly(jaxpr: Any) -> bool:
    """Whether a program, at any depth, has floating values of 16 bits or fewer."""
    values = [v.aval.dtype for e in jaxpr.eqns for v in (*e.invars, *e.outvars) if hasattr(v.aval, "dtype")]
    if any(jnp.issubdtype(d, jnp.floating) and d.itemsize <= 2 for d in values):
        return True
    inner = [x for e in jaxpr.eqns for v in e.params.values() for x in (v if isinstance(v, tuple | list) else [v])]
    return any(_computes_narrowly(getattr(x, "jaxpr", x)) for x in inner if hasattr(getattr(x, "jaxpr", x), "eqns"))


def _explained(found: _Difference, engine: str) -> str:
    advice = (
        "The loss depends on more than parameters and its own example: on other rows of the batch, or on something "
        "that changes from call to call. Clipping its examples one by one bounds nothing."
        if engine == "vmap"
        else "Pass engine='vmap', which forms every gradient, and please report the loss: this is a mistake of ours. "
        "(Where engine='vmap' is refused as well, the loss depends on more than its own example.)"
    )
    return (
        f"engine={engine!r} disagrees with plain jax.grad about parameter {found.parameter}: {found.what} is "
        f"{found.got:.6g}, and should be {found.want:.6g}. {advice} This message is as private as the data."
    )
