"""The parts of a traced loss: values, equations, and contacts, which carry taps.

* a ``Value`` is a variable, an ``Op`` an equation;
* a ``Contact`` is where a value that depends on parameters enters the body, and carries a tap.

trace.py builds them from a jaxpr; program.py puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpopt.ghost import rules
from dpopt.ghost.primitives import CAST, LAYOUT, ROUND_TO


class Entry(NamedTuple):
    """A value whose every entry depends on exactly one entry of one parameter, none used twice."""

    copy: bool  # entries are plain copies, so the gradient's norm is the same on both sides
    order: tuple[int, ...] | None  # axis i of the value is axis order[i] of the parameter
    by_layer: bool = False  # the first axis is the parameter's first: each layer's slice depends on that layer's


@dataclass(eq=False, slots=True)
class Value:
    """A variable of the traced loss."""

    shape: tuple[int, ...]
    dtype: Any
    dynamic: bool = False  # depends on the example
    leaves: frozenset[int] = frozenset()  # parameters that a prologue value is computed from
    entry: Entry | None = None
    constant: Any = None


@dataclass(eq=False, slots=True)
class Op:
    """An equation: ``run`` maps input arrays to a list of output arrays."""

    run: Callable
    primitive: Any
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any] | None = None  # the equation's, unless a loop made it one for all steps

    def evaluate(self, env: dict, taps: dict, record: Record | None) -> None:
        del taps, record
        env.update(zip(self.outputs, self.run(*read(env, self.inputs)), strict=True))

    def wide(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs from wide inputs: the values are rounded as the loss rounds them, their cotangents are not.

        A sum that is rounded to 16 bits is wrong by more than one example adds to it.
        """
        if self.primitive is ROUND_TO and self.inputs[0].leaves:
            return [_straight_through(lambda x: self.run(x)[0], values[0])]
        own = [v for v in (*self.inputs, *self.outputs) if v.leaves]
        if not any(is_narrow(v.dtype) for v in own):
            return self.run(*values)
        if not any(v.leaves for v in self.outputs):  # no gradient: as the loss computes it
            return self.run(*(x.astype(v.dtype) if v.leaves else x for x, v in zip(values, self.inputs, strict=True)))
        values = [x.astype(wide_dtype(v.dtype)) if is_narrow(v.dtype) else x
                  for x, v in zip(values, self.inputs, strict=True)]  # fmt: skip
        if self.primitive in LAYOUT - {CAST}:
            return self.run(*values)
        outs = values if self.primitive is CAST else self.run(*values)
        return [_rounded(x, v.dtype) for x, v in zip(outs, self.outputs, strict=True)]


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    if not is_narrow(dtype):
        return x.astype(dtype)
    return _straight_through(lambda x: x.astype(dtype).astype(x.dtype), x.astype(wide_dtype(dtype)))


def _straight_through(rounding: Callable, x: jax.Array) -> jax.Array:
    function = jax.custom_jvp(rounding)
    function.defjvp(lambda primals, tangents: (rounding(*primals), *tangents))
    return function(x)


@dataclass(eq=False, slots=True)
class Contact:
    """A place where a weight (a prologue value) enters the body."""

    index: int
    weight: Value  # as the prologue holds it: scanned weights have a leading axis of steps
    primitive: Any  # None: the weight itself
    tap_shape: tuple[int, ...]
    tap_dtype: Any
    factors: rules.Factors | None = None  # None: the tap sits on the weight itself
    apply: Callable | None = None  # (weight, x) -> output for one example, steps included; None without factors
    input_shape: tuple[int, ...] = ()
    input_dtype: Any = None
    is_precise: bool = False  # the output is computed in its own dtype's full precision
    shares: Contact | None = None  # another contact whose output has the same cotangent: this one needs no tap
    loops: tuple[
        tuple[int, bool], ...
    ] = ()  # around it, from outside: length, and whether each step has its own weight
    of_step: Contact | None = None  # the same in one step


class Record(dict[Contact, tuple]):
    """What contacts saw while the body ran: each one's input, and its output if it is among ``outputs``."""

    def __init__(self, outputs: Collection[Contact] = ()):
        super().__init__()
        self.outputs = outputs


@dataclass(eq=False, slots=True)
class ContactOp:
    contact: Contact
    run: Callable
    inputs: list[Value]
    outputs: list[Value]
    input_position: int

    def evaluate(self, env: dict, taps: dict, record: Record | None) -> None:
        contact, values = self.contact, read(env, self.inputs)
        given: Any = taps.get(contact)
        if hasattr(given, "attach"):
            out = given.attach(contact.of_step, lambda *args: self.run(*args)[0], values, self.input_position)
        else:
            (out,) = self.run(*values)
            if record is not None:
                record[contact] = values[self.input_position], out if contact in record.outputs else None
            out = out if given is None else tap(out, given)
        env[self.outputs[0]] = out


@jax.custom_jvp
def tap(value, zero):
    """``value + zero`` for differentiation; it is always zero and so never read."""
    del zero
    return value


@tap.defjvp
def _tap_jvp(primals, tangents):
    return primals[0], tangents[0] + tangents[1]


def read(env: dict, values: Sequence[Value]) -> list:
    """The arrays of ``values``."""
    return [env[v] if v.constant is None else v.constant for v in values]


def is_narrow(dtype: Any) -> bool:
    """Whether a floating type has fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def wide_dtype(dtype: Any) -> Any:
    """The type in which gradients add up: at least float32."""
    return jnp.dtype(jnp.float32) if is_narrow(dtype) else jnp.promote_types(dtype, jnp.float32)
