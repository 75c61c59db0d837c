"""What primitives.py claims of each primitive, checked by running equations with any parameters.

A table of traits holds a primitive whatever its parameters are. Reshapes and broadcasts that transpose, and casts to
integers, did not do what their tables said.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpopt.ghost import primitives
from dpopt.ghost.canonical import in_steps

CLAIMED = ["RESHAPING", "LAYOUT", "CASTS", "OF_PARTS", "SPLITTING", "ENTRYWISE", "BY_ENTRY"]


def _permuted(rng, n):
    return tuple(int(i) for i in rng.permutation(n))


def _functions(rng, shape):
    """Functions of one array whose equations have parameters of all kinds."""
    axes, n = _permuted(rng, len(shape)), len(shape)
    axis = int(rng.integers(n))
    other = tuple(int(i) for i in rng.permutation(np.append(shape, 1)))
    starts = [int(rng.integers(size)) for size in shape]
    sizes = [int(rng.integers(1, size - start + 1)) for size, start in zip(shape, starts, strict=True)]
    strides = [int(i) for i in rng.integers(1, 3, n)]
    places = tuple(int(i) for i in rng.permutation(n + 1)[:n])
    broadcast = [1] * (n + 1)
    for place, size in zip(places, shape, strict=True):
        broadcast[place] = size
    larger = [2 if size == 1 else size for size in broadcast]
    one = int(rng.integers(1, 4))
    return [
        lambda x: lax.reshape(x, other),
        lambda x: lax.reshape(x, other, dimensions=axes),
        lambda x: x.ravel(order="F"),
        lambda x: lax.squeeze(lax.expand_dims(x, (axis,)), (axis,)),
        lambda x: lax.broadcast_in_dim_p.bind(x, shape=tuple(broadcast), broadcast_dimensions=places, sharding=None),
        lambda x: lax.broadcast_in_dim_p.bind(x, shape=tuple(larger), broadcast_dimensions=places, sharding=None),
        lambda x: lax.transpose(x, axes),
        lambda x: lax.rev(x, tuple(sorted(axes[: n // 2 + 1]))),
        lambda x: lax.slice(x, starts, [a + b for a, b in zip(starts, sizes, strict=True)], strides),
        lambda x: lax.dynamic_slice(x, [jnp.int32(i) for i in starts], sizes),
        lambda x: jnp.split(x, [1], axis)[-1],
        lambda x: lax.convert_element_type(x, jnp.bfloat16),
        lambda x: lax.convert_element_type(x, jnp.int32),
        lambda x: lax.convert_element_type(x, bool),
        lambda x: lax.reduce_precision(x, 5, 3),
        lambda x: jnp.copy(x),
        lambda x: jnp.sum(x, axis),
        lambda x: jnp.sum(x),
        lambda x: lax.integer_pow(x, one),
        lambda x: lax.pow(x, jnp.full(shape, 1.5)),
        lambda x: lax.clamp(jnp.float32(2), x, jnp.float32(5)),
        lambda x: lax.clamp(jnp.full(shape, 2.0), x, jnp.full(shape, 5.0)),
        lambda x: lax.select(jnp.asarray(True), x, 2 * x),
        lambda x: lax.select_n(jnp.asarray(rng.random(shape) < 0.5), x, 2 * x),
        lambda x: jnp.tanh(x) * x + x / 3 - jnp.exp(-x),
        lambda x: jnp.where(x > 3, x, 0),
        lambda x: jnp.round(x / 3),
        lambda x: jnp.maximum(x, 4) + jnp.minimum(x, 3) + jnp.abs(x) + jnp.sign(x),
    ]


def _run(eqn, x, fixed):
    args = [x if i == 0 else fixed[i] for i in range(len(eqn.invars))]
    out = eqn.primitive.bind(*args, **eqn.params)
    return [np.asarray(o, np.float64) for o in (out if eqn.primitive.multiple_results else [out])]


def _equations(rng, shape):
    """Single equations of one moving array as the engine sees them, with their other inputs."""
    x = jnp.asarray(rng.permutation(int(np.prod(shape))).reshape(shape) + 1.0, jnp.float32)

    def walk(jaxpr, consts, values):
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, values, strict=True))
        read = lambda v: v.val if hasattr(v, "val") else env[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            args = [read(v) for v in eqn.invars]
            if eqn.primitive in primitives.CALLS:
                inner = eqn.params[primitives.CALLS[eqn.primitive]]
                out = yield from walk(inner.jaxpr, inner.consts, args)
            elif steps := in_steps(eqn):
                out = yield from walk(*steps, args)
            else:
                yield eqn, args
                out = eqn.primitive.bind(*args, **eqn.params)
                out = out if eqn.primitive.multiple_results else [out]
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    for function in _functions(rng, shape):
        closed = jax.make_jaxpr(function)(x)
        yield from walk(closed.jaxpr, closed.consts, [x])


def _changed(eqn, args, entry):
    """The outputs' entries that change with one entry of the first input."""
    x = args[0]
    before = _run(eqn, x, args)
    after = _run(eqn, jnp.asarray(x).at[entry].add(1000), args)
    return [~np.isclose(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)]


def _is_array(x):
    return hasattr(x, "shape") and jnp.issubdtype(jnp.result_type(x), jnp.floating) and np.size(x) > 1


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.one_in(12)
def test_primitives_do_what_their_tables_say(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(i) for i in rng.integers(2, 4, rng.integers(1, 4)))
    checked = set()
    with jax.numpy_rank_promotion("allow"):
        for eqn, args in _equations(rng, shape):
            tables = [name for name in CLAIMED if eqn.primitive in getattr(primitives, name)]
            if not tables or not _is_array(args[0]):
                continue
            x = jnp.asarray(args[0])
            outs = _run(eqn, x, args)
            checked |= {*tables}
            if "RESHAPING" in tables and outs[0].size == x.size:
                np.testing.assert_array_equal(outs[0].ravel(), np.asarray(x).ravel())
            if "CASTS" in tables:
                assert outs[0].shape == x.shape
            moved = [_changed(eqn, args, tuple(int(i) for i in np.unravel_index(k, x.shape))) for k in range(x.size)]
            counts = [sum(m[i].astype(int) for m in moved) for i in range(len(outs))]
            if "LAYOUT" in tables and sum(o.size for o in outs) <= x.size:
                assert all((count <= 1).all() for count in counts)  # of one entry
                assert all(sum(int(part.sum()) for part in m) <= 1 for m in moved)  # which is not copied twice
            entrywise = {"ENTRYWISE", "BY_ENTRY", "CASTS"} & {*tables}
            if entrywise and all(o.shape == x.shape for o in outs):
                for k, m in enumerate(moved):
                    assert all(not np.delete(part.ravel(), k).any() for part in m), eqn
            if {"OF_PARTS", "SPLITTING"} & {*tables}:  # linear in their input, part by part
                doubled = _run(eqn, -2 * x, args)
                assert all(np.array_equal(d, -2 * o) for d, o in zip(doubled, outs, strict=True))
    assert {"RESHAPING", "LAYOUT", "CASTS", "ENTRYWISE", "BY_ENTRY"} <= checked


# Primitives that JAX has had only since the oldest version that dpopt works with.
_NEWER = {"log2", "one_minus_square", "polynomial", "stack", "unstack"}


def test_every_name_in_the_tables_is_that_of_a_primitive():
    """One that JAX does not have is left out in silence."""
    source = pathlib.Path(primitives.__file__).read_text()
    names = {name for text in re.findall(r'_all\(\s*"+(.*?)"+\s*\)', source, re.DOTALL) for name in text.split()}
    assert len(names) > 100
    assert {name for name in names if primitives.primitive(name) is None} <= _NEWER
