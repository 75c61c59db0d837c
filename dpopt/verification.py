"""A check of the engines that shares no code with them: plain ``jax.grad``, one example at a time, norms in NumPy.

The engines are fast because they analyse the program of a loss, which can go wrong. `verify` compares their result with
the definition, on a few of the user's own examples and at the planned batch size.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.clipping import FlatClip
from dpopt.common import trees, validate
from dpopt.common.types import Batch, LossFn, PyTree
from dpopt.constants import constants_of, given
from dpopt.engines import explicit_axes, promises
from dpopt.engines.programs import equations
from dpopt.gradients import Engine, per_example_grads
from dpopt.preconditioners.base import SideInformation

if TYPE_CHECKING:
    import optax

_log = logging.getLogger(__name__)

# The error of a parameter whose gradient is zero up to rounding is compared with this share of the whole gradient (its
# squares come from sums that cancel), and that of a gradient far below the clip norm with this share of the clip norm.
_FLOOR, _FAR_BELOW = 2.0**-2, 2.0**-6
# How often a disagreement must occur, each time at parameters that are moved by this share of themselves.
_TIMES, _MOVE = 3, 2.0**-12
_MOST_BYTES = 1 << 32  # of parameters and examples that are gathered on one device


class VerificationError(RuntimeError):
    """The clipped sum of an engine differs from that of plain per-example gradients.

    *Privacy*: the message contains norms of single examples' gradients. It is as private as the data.
    """


def verify(
    loss_fn: LossFn,
    params: optax.Params,
    batch: Batch,
    *,
    engine: Engine = "auto",
    microbatch_size: int | None = None,
    has_aux: bool = False,
    scale: PyTree = None,
    examples: int = 4,
) -> None:
    """Compares an engine with plain ``jax.grad`` on the first few examples of a batch.

    For each parameter it compares the norms of each example's gradient, the clipped sum of all of these examples, and
    the clipped sum of each alone, with all other rows masked out but present. Half of the examples are clipped: the
    clip norm is the median of their norms. The cost is a few training steps, one of them compiled.

    Float32 norms must agree to 2^-8, and sums to 2^-8 of the sum of their terms' norms. A gradient counted twice or not
    at all is far outside this tolerance, rounding (also with a GPU's fast float32) far inside. For a loss that computes
    in 16 bits or fewer, which rounds more, the tolerance is 2^-2.

    If rounding decides on which side of a kink a loss is (the sign of a ReLU's input), two programs may have different
    gradients that are both correct. So a disagreement counts only if it recurs at two more points nearby.

    Args:
        loss_fn, engine, microbatch_size, has_aux: see `dpopt.per_example_grads`.
        params: floating pytree.
        batch: leaves ``(B, ...)``, with B as in training: the engine plans for it.
        scale: a diagonal before the clip, as for `dpopt.side_information`, or None.
        examples: how many examples to compare, at least 1.

    Raises:
        VerificationError: if they differ, with the parameter. ValueError, TypeError: for a bad argument.

    *Privacy*: reads private examples, and returns nothing. The message of its error is private.

    >>> verify(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), jnp.eye(2))
    """
    validate.positive_int(examples=examples)
    options: dict[str, Any] = {"engine": engine, "microbatch_size": microbatch_size, "has_aux": has_aux}
    promise = per_example_grads(loss_fn, **options)(params, batch, mask=None)  # checks its arguments as in training
    whole_scale = None if scale is None else trees.broadcast_prefix(scale, promise.like, "scale")
    params, batch = explicit_axes.with_automatic_types(jax.tree.map(jnp.asarray, (params, batch)))
    constants = explicit_axes.with_automatic_types(constants_of(loss_fn))
    if not all(x.is_fully_addressable for x in jax.tree.leaves((params, batch))):
        _log.warning("dpopt: not verified: other processes hold parts of the parameters or the batch")
        return
    size = jax.tree.leaves(batch)[0].shape[0]
    plain = _Plain.of(loss_fn, constants, params, batch, min(examples, size), has_aux, scale)
    known = [n for n in plain.totals if 0 < n < np.inf]
    clip_norm = float(np.median(known)) if known else 1.0
    tolerance = _tolerance(loss_fn, constants, params, batch)

    @jax.jit
    def run(params: PyTree, batch: Batch, mask: jax.Array, constants: PyTree) -> tuple[PyTree, PyTree]:
        own = given(loss_fn, constants)
        source = promises.ExampleRows(own, params, batch, size, engine, microbatch_size, has_aux)
        ran = source.run(mask, whole_scale, None, FlatClip(clip_norm))
        return ran.leaf_norms, ran.sum

    def difference(params: optax.Params, plain: _Plain) -> str | None:
        everyone = list(range(len(plain.totals)))
        for chosen in [everyone, *([i] for i in everyone)] if len(everyone) > 1 else [everyone]:
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
    raise VerificationError(
        f"engine={engine!r} disagrees with plain jax.grad about {first}. {_advice(engine)} This message is as private "
        "as the data."
    )


def _moved(params: PyTree, seed: int) -> PyTree:
    """Parameters nearby. Zeros stay zeros, so that errors that occur only there (an adapter that is off) recur."""
    rng = np.random.default_rng(seed)

    def move(x: jax.Array) -> jax.Array:
        share = max(_MOVE, 4 * float(jnp.finfo(x.dtype).eps))  # more than rounding, also in 16 bits
        return x * jnp.asarray(1 + share * rng.uniform(-1, 1, x.shape), x.dtype)

    return jax.tree.map(move, params)


_verified: weakref.WeakKeyDictionary[Callable[..., Any], set[str]] = weakref.WeakKeyDictionary()


def verify_once(loss_fn: LossFn, params: optax.Params, batch: Batch, **options: Any) -> None:
    """`verify`, unless done before in this process for the same loss, shapes and options."""
    shapes = [(x.shape, x.dtype) for x in map(jnp.asarray, jax.tree.leaves((params, batch)))]
    scale = options.get("scale")
    signature = str((shapes, jax.tree.structure((params, batch)), {**options, "scale": jax.tree.map(jnp.shape, scale)}))
    try:
        done = _verified.setdefault(loss_fn, set())
    except TypeError:  # not hashable, or no weak references: verify each time
        done = set()
    if signature not in done:
        verify(loss_fn, params, batch, **options)
        done.add(signature)


def fixed_scale(optimizer: optax.GradientTransformation, params: optax.Params) -> PyTree | None:
    """The product of the fixed diagonals of an optimizer, like ``params``; None if it has none."""
    preconditioner = getattr(getattr(optimizer, "stage", None), "preconditioner", None)
    if isinstance(preconditioner, SideInformation):
        return trees.broadcast_prefix(preconditioner.scale, params, "scale")
    scales = [s for s in (fixed_scale(o, params) for o in getattr(optimizer, "stages", ())) if s is not None]
    return None if not scales else jax.tree.map(lambda *s: np.prod(np.broadcast_arrays(*s), axis=0), *scales)


class _Plain(NamedTuple):
    """Gradients of a few examples, computed one by one, in NumPy's float64."""

    names: list[str]
    grads: list[list[np.ndarray]]  # [example][parameter]
    norms: list[list[float]]
    totals: list[float]

    @classmethod
    def of(
        cls, loss_fn: LossFn, constants: PyTree, params: PyTree, batch: Batch, rows: int, has_aux: bool, scale: PyTree
    ) -> _Plain:
        gradient = jax.jit(jax.grad(lambda p, x, constants: given(loss_fn, constants)(p, x), has_aux=has_aux))
        scales = None if scale is None else jax.tree.leaves(trees.broadcast_prefix(scale, params, "scale"))
        examples = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(rows)]

        def of_each(params: PyTree, examples: list[PyTree], constants: PyTree) -> list[PyTree]:
            return [jax.device_get(gradient(params, example, constants)) for example in examples]

        args = params, examples, constants
        try:
            each = of_each(*_on_one_device(args))
        except ValueError:  # a loss that names the devices of a mesh
            each = of_each(*args)
        grads = []
        for found in each:
            leaves = jax.tree.leaves(found[0] if has_aux else found)
            wide = [np.asarray(g).astype(np.float64) for g in leaves]
            grads.append(wide if scales is None else [g * np.asarray(s) for g, s in zip(wide, scales, strict=True)])
        names = [jax.tree_util.keystr(path) or "params" for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        norms = [[float(np.linalg.norm(g.ravel())) for g in row] for row in grads]
        return cls(names, grads, norms, [float(np.linalg.norm(row)) for row in norms])

    def difference(
        self, norms: PyTree, total: PyTree, chosen: list[int], clip_norm: float, tolerance: float
    ) -> str | None:
        """The first disagreement with an engine's norms and clipped sum of the chosen examples, or None."""

        def described(name: str, quantity: str, got: float, want: float) -> str:
            return f"parameter {name}: {quantity} is {got:.6g}, and should be {want:.6g}"

        floors = [_FLOOR * max(n, _FAR_BELOW * clip_norm) for n in self.totals]
        finite = [i for i in chosen if np.isfinite(self.totals[i])]  # all others must contribute zero
        weights = [min(1.0, clip_norm / self.totals[i]) if self.totals[i] > 0 else 1.0 for i in finite]
        which = f"example {chosen[0]} of the batch alone" if len(chosen) == 1 else f"{len(chosen)} examples together"
        leaves = zip(self.names, jax.tree.leaves(norms), jax.tree.leaves(total), strict=True)
        for k, (name, rows, summed) in enumerate(leaves):
            for i in finite:
                got, want = float(rows[i]), self.norms[i][k]
                if not abs(got - want) <= tolerance * (want + floors[i]):
                    return described(name, f"the norm of the gradient of example {i} of the batch", got, want)
            want = sum((w * self.grads[i][k] for w, i in zip(weights, finite, strict=True)), np.zeros(summed.shape))
            size = sum(w * (self.norms[i][k] + floors[i]) for w, i in zip(weights, finite, strict=True))
            if not np.linalg.norm((summed - want).ravel()) <= tolerance * size:
                got = float(np.linalg.norm(np.asarray(summed, np.float64).ravel()))
                return described(name, f"the clipped sum (its norm) of {which}", got, float(np.linalg.norm(want)))
        return None


def _on_one_device(tree: PyTree) -> PyTree:
    """Arrays that are divided among devices on a single one, unless they are too large.

    XLA divides the operations of an ordinary gradient among devices, too, and may be mistaken there: it leaves out
    parts of convolutions whose filters and images are divided along several axes."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if sum(x.nbytes for x in leaves) > _MOST_BYTES or all(len(x.devices()) == 1 for x in leaves):
        return tree
    return jax.device_put(tree, jax.local_devices()[0])


def _tolerance(loss_fn: LossFn, constants: PyTree, params: PyTree, batch: Batch) -> float:
    """2^-8, or 2^-2 for a loss that has floating values of 16 bits or fewer."""
    example = trees.structs(batch, 1)
    program = jax.make_jaxpr(given(loss_fn, constants))(params, example).jaxpr
    dtypes = [getattr(v.aval, "dtype", None) for e in equations(program) for v in (*e.invars, *e.outvars)]
    is_narrow = any(d is not None and jnp.issubdtype(d, jnp.floating) and d.itemsize <= 2 for d in dtypes)
    return 2.0**-2 if is_narrow else 2.0**-8


def _advice(engine: str) -> str:
    if engine == "vmap":
        return (
            "The loss depends on more than the parameters and its own example: on other rows of the batch, or on "
            "something that changes from call to call. Then clipping examples one by one bounds nothing. (If it agrees "
            "on a single device, XLA divides the loss wrongly among these: keep its convolutions' filters whole.)"
        )
    return (
        "Pass engine='vmap', which forms every gradient, and please report the loss: this is a bug in dpopt. (If "
        "engine='vmap' is refused as well, the loss depends on more than its own example.)"
    )
