"""The parts of a traced loss: values, equations, and contacts, which carry taps.

* a ``Value`` is a variable, an ``Op`` an equation;
* a ``Contact`` is where a value that depends on parameters enters the body; it carries a tap.

trace.py builds them from a jaxpr; program.py puts them together.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from dpopt.common.trees import accumulator_dtype, is_narrow
from dpopt.ghost import rules
from dpopt.ghost.primitives import BROADCAST, CAST, LAYOUT, ROUND_TO
from dpopt.ghost.rows import tf32


class Entry(NamedTuple):
    """A value whose every entry depends on exactly one entry of one parameter, each of which is used at most once."""

    copy: bool  # entries are plain copies, so the gradient has the same norm on both sides
    order: tuple[int, ...] | None  # axis i of the value is axis order[i] of the parameter
    layers: int = 0  # so many leading axes number what the parameter's first axis does, in the same order; 0: none do
    part: tuple[range, ...] | None = None  # along each axis of the parameter, where these entries are; None: anywhere

    def is_apart(self, other: Entry) -> bool:
        """Whether no entry of one parameter belongs to both values."""
        pairs = zip(self.part or (), other.part or (), strict=False)  # one that may be anywhere has none
        return any(a.stop <= b.start or b.stop <= a.start for a, b in pairs)


@dataclass(eq=False, slots=True)
class Value:
    """A variable of the traced loss."""

    shape: tuple[int, ...]
    dtype: Any  # a NumPy dtype, or JAX's dtype of random keys
    dynamic: bool = False  # depends on the example
    leaves: frozenset[int] = frozenset()  # parameters that a prologue value is computed from
    entry: Entry | None = None
    constant: Any = None
    multiple: Multiple | None = None  # of a prologue value (multiples.py)
    made: Made | None = None  # of a prologue value (products.py)

    @classmethod
    def of(cls, var: core.Var | core.Literal, dynamic: bool = False, constant: Any = None) -> Value:
        """A value with the shape and the type of a jaxpr's variable."""
        return cls(aval(var).shape, aval(var).dtype, dynamic, constant=constant)


class Multiple(NamedTuple):
    """A value that is ``weight`` times ``number``, or divided by it; without a weight, all of its entries are it."""

    weight: Value | None
    number: Value
    primitive: core.Primitive  # of the multiplication or division


class Made(NamedTuple):
    """How a value was computed from others."""

    eqn: core.JaxprEqn
    inputs: Sequence[Value]
    has_product: bool  # of matrices, on the way from parameters

    def spreads(self, value: Value) -> bool:
        """Whether the value is a smaller weight, spread over an array."""
        source = self.inputs[0]
        is_larger = math.prod(value.shape) > math.prod(source.shape)
        return self.eqn.primitive is BROADCAST and bool(source.leaves) and is_larger


def aval(var: core.Var | core.Literal) -> ShapedArray:
    """The shape and the type of a jaxpr's variable: an array, since losses with other values are refused."""
    return cast(ShapedArray, var.aval)


@dataclass(eq=False, slots=True)
class Op:
    """An equation: ``run`` maps input arrays to a list of output arrays."""

    run: Callable[..., list[jax.Array]]
    primitive: core.Primitive
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any] | None = None  # of the equation; None where a loop made it one equation for all steps

    def evaluate(self, env: dict[Value, Any], taps: dict[Contact, Any], record: Record | None) -> None:
        del taps, record
        env.update(zip(self.outputs, self.run(*read(env, self.inputs)), strict=True))

    def wide(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs from wide inputs: values are rounded as the loss rounds them, but their cotangents are not.

        A sum that is rounded to 16 bits can be off by more than one example contributes.
        """
        if self.primitive is ROUND_TO and self.inputs[0].leaves:
            return [_straight_through(lambda x: self.run(x)[0], values[0])]
        own = [v for v in (*self.inputs, *self.outputs) if v.leaves]
        if not any(is_narrow(v.dtype) for v in own):
            return self.run(*values)
        if not any(v.leaves for v in self.outputs):  # no gradient: as the loss computes it
            return self.run(*(x.astype(v.dtype) if v.leaves else x for x, v in zip(values, self.inputs, strict=True)))
        values = [x.astype(accumulator_dtype(v.dtype)) if is_narrow(v.dtype) else x
                  for x, v in zip(values, self.inputs, strict=True)]  # fmt: skip
        if self.primitive in LAYOUT - {CAST}:
            return self.run(*values)
        outs = values if self.primitive is CAST else self.run(*values)
        return [_rounded(x, v.dtype) for x, v in zip(outs, self.outputs, strict=True)]


def _rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    if not is_narrow(dtype):
        return x.astype(dtype)
    return _straight_through(lambda x: x.astype(dtype).astype(x.dtype), x.astype(accumulator_dtype(dtype)))


def _straight_through(rounding: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``rounding(x)``, differentiated as if nothing were rounded."""
    function = jax.custom_jvp(rounding)
    function.defjvp(lambda primals, tangents: (rounding(*primals), *tangents))
    return function(x)


@dataclass(eq=False, slots=True)
class Contact:
    """A place where a weight (a prologue value) enters the body."""

    index: int
    weight: Value  # as in the prologue: scanned weights have a leading axis of steps
    primitive: core.Primitive | None  # None: the weight itself
    tap_shape: tuple[int, ...]
    tap_dtype: Any
    factors: rules.Factors | None = None  # None: the tap sits on the weight itself
    apply: Callable[..., jax.Array] | None = None  # (weight, x) -> output for one example, all steps; None: no factors
    input_shape: tuple[int, ...] = ()
    input_dtype: Any = None
    is_precise: bool = False  # the output is computed in the full precision of its own dtype
    is_rounded: bool = False  # a GPU multiplies float32 factors in fewer bits, and the loss has not asked for more
    shares: Contact | None = None  # another contact whose output has the same cotangent: this one needs no tap
    # The loops around it, outermost first: length, and whether each step has its own weight.
    loops: tuple[tuple[int, bool], ...] = ()
    of_step: Contact | None = None  # the same contact within one step
    given: int | None = None  # which array of the example its input is, in some shape

    @property
    def is_direct(self) -> bool:
        """Whether the weight is one parameter whose entries stay apart."""
        return len(self.weight.leaves) == 1 and self.weight.entry is not None

    @property
    def is_copy(self) -> bool:
        """The same, and they are plain copies."""
        return self.is_direct and cast(Entry, self.weight.entry).copy

    @property
    def is_number(self) -> bool:
        """Whether the weight is a single number that is computed from parameters."""
        return self.factors is None and not self.loops and math.prod(self.weight.shape) == 1

    def fold(self, weight: jax.Array) -> jax.Array:
        """An array like the weight in the arrangement of the factors, if there are any."""
        return weight if self.factors is None else self.factors.fold(weight)

    def unfold(self, folded: jax.Array) -> jax.Array:
        return folded if self.factors is None else self.factors.unfold(folded)


class Hook(abc.ABC):
    """What a contact may have instead of a tap (hooks.py)."""

    @abc.abstractmethod
    def attach(
        self, contact: Contact, run: Callable[..., jax.Array], values: list[jax.Array], at: int | None
    ) -> jax.Array:
        """The contact's output ``run(*values)``, with the hook attached; its input is number ``at`` of the values."""

    @abc.abstractmethod
    def split(self) -> tuple[Hook, Callable[[Any], Hook]]:
        """The part that a loop slices for each step, and a function from a slice to the step's hook."""


class Record(dict[Contact, tuple[jax.Array | None, ...]]):
    """For each contact its input as the body ran, and its output if the contact is among ``outputs``.

    Inputs and cotangents of ``quick`` contacts are rounded to TF32 (quick_sums.py). ``in_place``: the example's arrays
    as they are, read by contacts instead of copies without what padding holds there, and whether the example counts:
    if not, outputs of these contacts are zero where they are not finite."""

    def __init__(
        self, outputs: Collection[Contact] = (), quick: Collection[Contact] = (),
        in_place: tuple[Sequence[jax.Array], ArrayLike] = ((), True),
    ):  # fmt: skip
        super().__init__()
        self.outputs, self.quick, self.in_place = outputs, quick, in_place
        self.rounded_taps = {c.shares or c for c in quick}  # contacts with one cotangent have one tap

    def empty(self) -> Record:
        """Another one for the same contacts, inside a loop or a rematerialised block, which reads nothing in place."""
        return Record(self.outputs, self.quick)

    def read_in_place(self, contact: Contact, values: list[jax.Array], at: int) -> ArrayLike:
        """Puts the contact's input among its ``values`` if it is one of the arrays; whether the example counts then."""
        arrays, counts = self.in_place
        if not arrays or contact.given is None or not jnp.issubdtype(values[at].dtype, jnp.inexact):
            return True
        values[at] = arrays[contact.given].reshape(values[at].shape)
        return counts


@dataclass(eq=False, slots=True)
class ContactOp:
    """An equation with a contact on its output."""

    contact: Contact
    run: Callable[..., list[jax.Array]]
    inputs: list[Value]
    outputs: list[Value]
    input_position: int | None  # of the recorded input; None: the weight itself enters the body

    def evaluate(self, env: dict[Value, Any], taps: dict[Contact, Any], record: Record | None) -> None:
        contact, values, at = self.contact, read(env, self.inputs), self.input_position
        given: Any = taps.get(contact)
        counts = True if record is None or at is None else record.read_in_place(contact, values, at)
        if isinstance(given, Hook):
            out = given.attach(cast(Contact, contact.of_step), lambda *args: self.run(*args)[0], values, at)
            out = _without_padding(counts, out)
        else:
            if record is not None and contact in record.quick and at is not None:
                values[at] = _straight_through(tf32, values[at])
            out = _without_padding(counts, self.run(*values)[0])
            if record is not None and at is not None:
                record[contact] = values[at], out if contact in record.outputs else None
            if given is not None:
                out = tap(out, given, record is not None and contact in record.rounded_taps)
        env[self.outputs[0]] = out


def _without_padding(counts: ArrayLike, out: jax.Array) -> jax.Array:
    """The same, with zeros for entries that are not finite, unless the example counts."""
    return out if counts is True else _zero_unless(counts, out)


@jax.custom_jvp
def _zero_unless(counts: ArrayLike, out: jax.Array) -> jax.Array:
    """Its cotangents are left as they are: otherwise the backward pass would need what is not finite, too."""
    return jnp.where(counts | jnp.isfinite(out), out, 0)


@_zero_unless.defjvp
def _zero_unless_jvp(primals: list[jax.Array], tangents: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _zero_unless(*primals), tangents[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def tap(value: jax.Array, zero: jax.Array, is_rounded: bool = False) -> jax.Array:
    """``value + zero`` to differentiation; ``zero`` is always zero and therefore never read.

    ``is_rounded``: cotangents are rounded to TF32."""
    del zero, is_rounded
    return value


@tap.defjvp
def _tap_jvp(is_rounded: bool, primals: list[jax.Array], tangents: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    tangent = tangents[0] + tangents[1]
    return primals[0], tf32(tangent) if is_rounded else tangent  # its transpose rounds, too


def read(env: dict[Value, Any], values: Sequence[Value]) -> list[jax.Array]:
    """The arrays of ``values``: those of JAX, which users' derivative rules may index by a traced number."""
    found = [env[v] if v.constant is None else v.constant for v in values]
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in found]
