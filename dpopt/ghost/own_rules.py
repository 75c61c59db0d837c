"""Derivative rules of users, ``custom_vjp``, as equations that the engine follows.

**Products.** A ``custom_vjp`` whose rule ends in a product is one of a weight.

Where a rule returns ``a(kept)^T b(kept, y)`` for a weight, from what the forward pass kept and the cotangent y, that is
the gradient of ``a w`` for the cotangent b. So the equation becomes three: the forward pass, whose results count as
constants; the product ``a w``, a contact like any other; and one that returns the results, and passes b on to ``a w``
and all other cotangents to where they belong. The product's value is used nowhere, and XLA leaves it out.

Nothing is assumed of b, which may be found by iteration, or clipped.

**Weights alone**, such as quantised ones: a rule that is linear in the cotangent is one that a sum of gradients may be
pulled back through (linear.py), so the equation becomes a ``custom_jvp``, whose rule is the transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from dpopt.engines.programs import equations
from dpopt.ghost import primitives
from dpopt.ghost.binding import binder
from dpopt.ghost.convolutions import convolved
from dpopt.ghost.linear import is_linear, may_move, zeros_of
from dpopt.ghost.values import Value, aval


def with_products(eqn: core.JaxprEqn, inputs: Sequence[Value]) -> tuple[core.Jaxpr, Sequence[jax.Array]] | None:
    """A ``custom_vjp`` as the jaxpr of forward pass, products and backward pass, and its constants.

    None for another equation, or if no gradient of a weight is a product."""
    if eqn.primitive is not primitives.CUSTOM_VJP:
        return None
    moving = [i for i, v in enumerate(inputs) if (v.leaves or v.dynamic) and jnp.issubdtype(v.dtype, jnp.inexact)]
    args = _shapes(eqn.invars)
    try:
        rule = _Rule.of(eqn, moving, args)
    except Exception:  # a rule that cannot be traced apart from its function, such as one of what that closes over
        return None
    ends = {i: rule.end_of(at) for at, i in enumerate(moving) if inputs[i].leaves}
    products = {i: end for i, end in ends.items() if end is not None}
    if not products or (jax.device_count() > 1 and rule.has_filters):
        return None
    others = [(at, i) for at, i in enumerate(moving) if i not in products]

    @jax.custom_vjp
    def joined(outs: Any, kept: Any, others: Any, hooks: Any) -> Any:
        return outs

    def pull(kept: list[jax.Array], cotangents: list[jax.Array]) -> tuple[Any, ...]:
        env = rule.evaluated(kept, cotangents)
        own = [env(rule.backward.jaxpr.outvars[at]) for at, _ in others]
        return None, None, own, [[env(v) for v in end.cut] for end in products.values()]

    joined.defvjp(lambda outs, kept, others, hooks: (outs, kept), pull)

    def split(*args: jax.Array) -> list[jax.Array]:
        outs, kept = map(_stopped, rule.forward(*_stopped(args)))
        read = rule.evaluated(kept, None)
        hooks = [rule.products(end, read, args[i]) for i, end in products.items()]
        return joined(outs, kept, [args[i] for _, i in others], hooks)

    closed = jax.make_jaxpr(split)(*args)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(eqn.outvars), instantiate=True)
    return needed, closed.consts


def with_forward_rule(eqn: core.JaxprEqn, inputs: Sequence[Value]) -> tuple[core.Jaxpr, Sequence[jax.Array]] | None:
    """A ``custom_vjp`` of weights alone as the jaxpr of a ``custom_jvp``, and its constants.

    None unless its rule is one of floating-point values, and linear in the cotangent."""
    moving = [i for i, v in enumerate(inputs) if v.leaves and jnp.issubdtype(v.dtype, jnp.inexact)]
    args, outs = _shapes(eqn.invars), _shapes(eqn.outvars)
    if not all(jnp.issubdtype(out.dtype, jnp.inexact) for out in outs):
        return None
    try:
        rule = _Rule.of(eqn, moving, args)
    except Exception:  # as above
        return None
    if not is_linear(rule.backward.jaxpr, first=rule.num_kept):
        return None

    @jax.custom_jvp
    def function(*args: jax.Array) -> list[jax.Array]:
        return binder(eqn)(*args)

    @function.defjvp
    def _(args: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        values, kept = rule.forward(*args)

        def pull(*cotangents: jax.Array) -> list[jax.Array]:
            env = rule.evaluated(kept, cotangents)
            return [env(v) for v in rule.backward.jaxpr.outvars]

        return values, list(jax.linear_transpose(pull, *outs)([tangents[i] for i in moving]))

    closed = jax.make_jaxpr(function)(*args)
    return closed.jaxpr, closed.consts


def _shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]


def _stopped(tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.stop_gradient(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


@dataclass(frozen=True)
class _End:
    """The last equations of a rule, linear in the variables before them."""

    eqns: list[core.JaxprEqn]  # in order
    cut: list[core.Var]
    out: core.Var


@dataclass(frozen=True)
class _Rule:
    """A derivative rule: a function from arguments to outputs and what is kept, and a jaxpr of that and cotangents."""

    forward: Callable[..., tuple[list[jax.Array], list[jax.Array]]]
    backward: core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]  it is public
    num_kept: int
    has_filters: bool

    @classmethod
    def of(cls, eqn: core.JaxprEqn, moving: Sequence[int], args: Sequence[jax.ShapeDtypeStruct]) -> _Rule:
        run, structures = binder(eqn), []

        def forward(*args: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            def of_moving(*chosen: jax.Array) -> list[jax.Array]:
                given = dict(zip(moving, chosen, strict=True))
                return run(*(given.get(i, x) for i, x in enumerate(args)))

            outs, pullback = jax.vjp(of_moving, *(args[i] for i in moving))
            kept, structure = jax.tree.flatten(pullback)
            structures.append(structure)
            return outs, kept

        first, (outs, kept) = jax.make_jaxpr(forward, return_shape=True)(*args)

        def backward(kept: list[jax.Array], cotangents: list[jax.Array]) -> Sequence[jax.Array]:
            return jax.tree.unflatten(structures[0], kept)(cotangents)

        second = inlined(jax.make_jaxpr(backward)(kept, outs))
        filters = any(e.primitive is primitives.CONVOLUTION for p in (first, second) for e in equations(p.jaxpr))
        return cls(forward, second, len(kept), filters)

    @functools.cached_property
    def _depending(self) -> set[core.Var]:
        """The variables that depend on the cotangents."""
        found = set(self.backward.jaxpr.invars[self.num_kept :])
        for eqn in self.backward.jaxpr.eqns:
            if any(isinstance(v, core.Var) and v in found for v in eqn.invars):
                found.update(eqn.outvars)
        return found

    def end_of(self, at: int) -> _End | None:
        """The last equations before an input's cotangent, from products on; None if there are none."""
        out = self.backward.jaxpr.outvars[at]
        made = {v: eqn for eqn in self.backward.jaxpr.eqns for v in eqn.outvars}
        depends, zeros, needed, cut = self._depending, zeros_of(self.backward.jaxpr), set(), []
        has_product = False

        def follow(var: core.Var) -> None:
            nonlocal has_product
            eqn = made.get(var)
            moving = [] if eqn is None else [isinstance(v, core.Var) and v in depends for v in eqn.invars]
            if eqn is None or not may_move(eqn, moving, zeros):
                cut.extend([var] if var not in cut else [])
                return
            needed.add(id(eqn))
            own = [v for v in eqn.invars if isinstance(v, core.Var) and v in depends]
            if eqn.primitive in primitives.BILINEAR:
                has_product = True
                cut.extend([own[0]] if own[0] not in cut else [])
                return
            for v in own:
                follow(v)

        if not isinstance(out, core.Var) or out not in depends:
            return None
        follow(out)
        if not has_product:
            return None
        eqns = [eqn for eqn in self.backward.jaxpr.eqns if id(eqn) in needed]
        # What is cut may not be computed from what comes after it.
        return None if {v for eqn in eqns for v in eqn.outvars} & {*cut} else _End(eqns, cut, out)

    def evaluated(self, kept: Sequence[jax.Array], cotangents: Sequence[jax.Array] | None) -> Callable[[Any], Any]:
        """The values of the rule's variables; without cotangents those alone that do not depend on any."""
        depends = set() if cotangents is not None else self._depending
        jaxpr = self.backward.jaxpr
        env = dict(zip(jaxpr.constvars, self.backward.consts, strict=True))
        env |= zip(jaxpr.invars, [*kept, *(cotangents or [])], strict=False)

        def read(v: core.Var | core.Literal) -> Any:
            return v.val if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            if not depends.intersection(eqn.outvars):
                run = convolved(eqn) if eqn.primitive is primitives.CONVOLUTION else binder(eqn)
                env.update(zip(eqn.outvars, run(*map(read, eqn.invars)), strict=True))
        return read

    @staticmethod
    def products(end: _End, read: Callable[[Any], Any], weight: jax.Array) -> list[jax.Array]:
        """What the end of a rule is the derivative of: functions of a weight, one for each variable that is cut.

        ``read``: the values that depend on no cotangent."""

        def ended(*values: jax.Array) -> jax.Array:
            env = dict(zip(end.cut, values, strict=True))
            for eqn in end.eqns:
                args = [env[v] if isinstance(v, core.Var) and v in env else read(v) for v in eqn.invars]
                env.update(zip(eqn.outvars, binder(eqn)(*args), strict=True))
            return env[end.out]

        return list(jax.linear_transpose(ended, *_shapes(end.cut))(weight))


def inlined(closed: Any) -> Any:
    """A jaxpr without calls."""

    def run(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            if eqn.primitive in primitives.CALLS:
                inner = eqn.params[primitives.CALLS[eqn.primitive]]
                outs = run(inner.jaxpr, inner.consts, values)
            else:
                outs = binder(eqn)(*values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*_shapes(closed.jaxpr.invars))
