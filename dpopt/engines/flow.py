"""Where private values can flow in a traced program.

While an optimizer is inspected (`dpopt.inspection`), the stages that affect privacy mark values in its program:
which are *private*, which the clip has *bounded*, which the noise has *released*, which must be *public*. `follow` then
walks the program. A value computed from a private one is private; only the release of exactly the sum that a clip has
bounded makes a value public again. For unknown operations the walk assumes the worst.

Outside an inspection nothing is marked, and a program is the same as it would be without this file.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax.experimental import xla_metadata
from jax.extend import core

from dpopt.engines.programs import INLINED, equations, scan_arguments, subprograms


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A leaf of a clipped sum: private until it is released."""

    clip: int
    leaf: int


@dataclasses.dataclass(frozen=True)
class Counter:
    """A count of noise draws, public: the program's input number ``place``."""

    place: int
    advanced: bool


# None: public. A string: private, with its description.
Label: TypeAlias = str | Bounded | Counter | None

_UNCHANGED = {"copy", "copy_p", "optimization_barrier", "sharding_constraint", "reshard"}

_inspecting: contextvars.ContextVar[bool] = contextvars.ContextVar("dpopt_inspecting", default=False)
_inspections = itertools.count()
_mark = core.Primitive("dpopt_mark")
_mark.multiple_results = True
_mark.def_abstract_eval(lambda *avals, **_: list(avals))

_Tree = TypeVar("_Tree")


def is_inspecting() -> bool:
    return _inspecting.get()


@contextlib.contextmanager
def inspecting() -> Generator[None]:
    """While this block runs, values are marked and no noise is drawn.

    JAX caches traces by metadata, too: with its own, a stage within ``jax.jit`` is traced anew, here to be seen, and
    afterwards to draw noise."""
    token = _inspecting.set(True)
    try:
        with xla_metadata.set_xla_metadata(dpopt_inspection=next(_inspections)):
            yield
    finally:
        _inspecting.reset(token)


def _marked(tree: _Tree, kind: str, what: str = "") -> _Tree:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _mark.bind(*leaves, kind=kind, what=what)) if leaves else tree


def private(tree: _Tree, what: str) -> _Tree:
    """The same values, marked as private. Only for inspections."""
    return _marked(tree, "private", what)


def public(tree: _Tree, what: str) -> _Tree:
    """The same values; an inspection raises if they depend on anything private."""
    return _marked(tree, "public", what) if is_inspecting() else tree


def bounded(total: _Tree) -> _Tree:
    """The same sum, marked as bounded by a clip."""
    return _marked(total, "bounded") if is_inspecting() else total


def released(total: _Tree, add_noise: Callable[[_Tree], _Tree]) -> _Tree:
    """``add_noise(total)``; an inspection draws nothing, and raises unless a clip has bounded exactly this sum."""
    return _marked(total, "released") if is_inspecting() else add_noise(_without_derivative(total))


@jax.custom_jvp
def _without_derivative(total: _Tree) -> _Tree:
    """The same values, which cannot be differentiated: noise is added, so it is in no derivative of the result."""
    return total


def _refuse_derivative(primals: tuple[_Tree], tangents: tuple[Any]) -> tuple[_Tree, Any]:
    zeros = jax.custom_derivatives.SymbolicZero
    if all(isinstance(t, zeros) for t in jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, zeros))):
        return primals[0], tangents[0]
    raise ValueError(
        "a derivative through a private update would contain no noise, and be as private as the examples. "
        "Differentiate what is computed from its result, or wrap in jax.lax.stop_gradient what the update reads."
    )


_without_derivative.defjvp(_refuse_derivative, symbolic_zeros=True)


def advanced(count: jax.Array, following: jax.Array) -> jax.Array:
    """``following``, the count after ``count``; an inspection checks that the optimizer keeps it."""
    return _mark.bind(count, kind="advanced", what="")[0] if is_inspecting() else following


def follow(program: core.Jaxpr, counters: range) -> tuple[list[str | None], int]:
    """For each output of a traced update None, or the private value that it depends on; and the number of releases.

    ``counters`` are the indices of inputs that may be counts of noise draws; the last outputs are their new values.

    Raises:
        ValueError: if a value that must be public depends on a private one, a release is not of one clipped sum, or a
            count of noise draws is not kept.
    """
    walk = _Walk()
    inputs = [Counter(i, advanced=False) if i in counters else None for i in range(len(program.jaxpr.invars))]
    outputs = walk.program(program, inputs, once=True)
    kept = dict(zip(counters, outputs[len(outputs) - len(counters) :], strict=True))
    if any(kept.get(place) != Counter(place, advanced=True) for place in walk.counted):
        raise ValueError(
            "the count of noise draws is not in its place in the returned state: the next step would draw the same "
            "noise, and the difference of the two steps would contain none. Return the new state of the noise stage."
        )
    return [_text(label) for label in outputs], walk.releases


def _text(label: Label) -> str | None:
    if isinstance(label, Bounded):
        return "the clipped sum without its noise"
    return None if isinstance(label, Counter) else label


def _worst(labels: Sequence[Label]) -> str | None:
    return next((text for text in map(_text, labels) if text is not None), None)


class _Walk:
    """One pass over a program. ``once`` is False in loops and branches, which may run any number of times."""

    def __init__(self) -> None:
        self.clips = 0
        self.releases = 0
        self.counted: list[int] = []

    def program(self, jaxpr: Any, inputs: Sequence[Label], once: bool) -> list[Label]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # closed or open
        env: dict[Any, Label] = dict.fromkeys(jaxpr.constvars)  # public: they existed before the batch
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(var: core.Var | core.Literal) -> Label:
            return None if isinstance(var, core.Literal) else env[var]

        for eqn in jaxpr.eqns:
            outputs = self.equation(eqn, [read(v) for v in eqn.invars], once)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: core.JaxprEqn, labels: list[Label], once: bool) -> Sequence[Label]:
        name, inner = eqn.primitive.name, list(subprograms(eqn))
        if eqn.primitive is _mark:
            return self.mark(labels, once, **eqn.params)
        if name in _UNCHANGED:
            return labels
        if name in INLINED | {"custom_vjp_call"} and len(inner) == 1:
            return self.program(inner[0], labels, once)
        control = {"cond": self.branches, "while": self.while_loop, "scan": self.scan}
        if name in control:
            return control[name](eqn, labels)
        if any(e.primitive is _mark for p in inner for e in equations(p)):
            raise ValueError(f"a sum is clipped or released inside {name!r}, which dpopt cannot follow.")
        worst = _worst(labels)
        self.no_side_effect(eqn, worst)
        return [worst] * len(eqn.outvars)

    def no_side_effect(self, eqn: core.JaxprEqn, label: Label) -> None:
        name, kinds = eqn.primitive.name, {type(effect).__name__ for effect in eqn.effects}
        if label is not None and ("callback" in name or kinds - {"NamedAxisEffect"}):  # a collective has none
            raise ValueError(f"{_text(label)} can leak through a side effect ({name}) before any noise is added.")

    def mark(self, labels: list[Label], once: bool, kind: str, what: str) -> Sequence[Label]:
        if kind == "private":
            return [what] * len(labels)
        if kind == "public":
            if (worst := _worst(labels)) is not None:
                raise ValueError(f"{what} depends on {worst}: it must be public, or computed from released values.")
            return labels
        if not once:
            raise ValueError(
                "clip and noise are inside a loop or a branch, but the accountant counts them once per step."
            )
        if kind == "advanced":
            (count,) = labels
            if not isinstance(count, Counter) or count.advanced:
                raise ValueError(
                    "the noise stage must read its count of noise draws from the state and increase it by 1."
                )
            self.counted.append(count.place)
            return [Counter(count.place, advanced=True)]
        if kind == "bounded":
            self.clips += 1
            return [Bounded(self.clips, i) for i in range(len(labels))]
        leaves = {label for label in labels if isinstance(label, Bounded)}
        if len(leaves) < len(labels) or len({leaf.clip for leaf in leaves}) > 1:
            raise ValueError(
                "something stands between clip_and_sum and add_gaussian_noise and changes the clipped sum, so its "
                "sensitivity is unknown. Move it before the clip, as a diagonal, or after the noise."
            )
        self.releases += 1
        return [None] * len(labels)

    def branches(self, eqn: core.JaxprEqn, labels: list[Label]) -> list[Label]:
        choice, operands = _text(labels[0]), [_text(label) for label in labels[1:]]
        self.no_side_effect(eqn, choice)
        outputs = [self.program(branch, operands, once=False) for branch in eqn.params["branches"]]
        return [choice or _worst(found) for found in zip(*outputs, strict=True)]

    def while_loop(self, eqn: core.JaxprEqn, labels: list[Label]) -> list[Label]:
        params = eqn.params
        ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        texts: list[Label] = [_text(label) for label in labels]
        condition_reads, body_reads, start = texts[: ends[0]], texts[ends[0] : ends[1]], texts[ends[1] :]

        def step(carry: list[Label]) -> list[Label]:
            (condition,) = self.program(params["cond_jaxpr"], condition_reads + carry, once=False)
            self.no_side_effect(eqn, condition)
            carry = self.program(params["body_jaxpr"], body_reads + carry, once=False)
            return [condition or label for label in carry]

        return _fixed_point(step, start)

    def scan(self, eqn: core.JaxprEqn, labels: list[Label]) -> list[Label]:
        num_consts, num_carry = scan_arguments(eqn)
        ends = num_consts, num_consts + num_carry
        texts: list[Label] = [_text(label) for label in labels]
        consts, start, rows = texts[: ends[0]], texts[ends[0] : ends[1]], texts[ends[1] :]

        def body(carry: list[Label]) -> list[Label]:
            return self.program(eqn.params["jaxpr"], consts + carry + rows, once=False)

        carry = _fixed_point(lambda carry: body(carry)[: len(start)], start)
        return carry + body(carry)[len(start) :]


def _fixed_point(step: Callable[[list[Label]], list[Label]], carry: list[Label]) -> list[Label]:
    """Labels of a loop's carry after any number of steps. Labels are only ever added, so this terminates."""
    while True:
        following = [old or new for old, new in zip(carry, step(carry), strict=True)]
        if following == carry:
            return carry
        carry = following
