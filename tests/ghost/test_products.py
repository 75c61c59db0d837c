"""Weights that are products of parameters: a search over expressions, and over the axes that an activation shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import check, flat_clip, leaf_clip, random_like
from helpers import slow_unless
from jax import lax

from dpopt import ghost
from dpopt.ghost import products, trace
from dpopt.ghost.methods import PULLED_BACK

B = 4
_NAMES = "abcdefghijkl"


class Drawn:
    """An expression of parameters that is an array of some shape."""

    def __init__(self, rng):
        self.rng, self.params = rng, {}

    def array(self, shape, depth):
        """A function from parameters to an array of that shape; at depth 0 one of them."""
        kinds = ["product", "product", "sum", "difference", "number", "vector", "negative", "transposed", "merged"]
        kind = str(self.rng.choice(kinds)) if depth else "parameter"
        if kind == "parameter" or (kind == "product" and len(shape) < 2):
            name = f"p{len(self.params)}"
            self.params[name] = self.rng.normal(size=shape)
            return lambda p: p[name]
        if kind in ("sum", "difference"):
            one, other = self.array(shape, depth - 1), self.array(shape, depth - 1)
            sign = 1 if kind == "sum" else -1
            return lambda p: one(p) + sign * other(p)
        if kind == "merged":
            return self.merged(shape, depth)
        inner = self.array(shape, depth - 1) if kind in ("number", "vector", "negative") else None
        if kind == "number":
            return lambda p: inner(p) * 0.5
        if kind == "negative":
            return lambda p: -inner(p)
        if kind == "vector":
            return self.times_vector(shape, inner)
        if kind == "transposed":
            order = [int(i) for i in self.rng.permutation(len(shape))]
            turned = self.array(tuple(shape[order.index(i)] for i in range(len(shape))), depth - 1)
            return lambda p: jnp.transpose(turned(p), order)
        return self.product(shape, depth)

    def product(self, shape, depth):
        """An einsum over one or two axes that both factors have; they may have one of the result's in common, too."""
        own, inner = _NAMES[: len(shape)], _NAMES[len(shape) : len(shape) + int(self.rng.integers(1, 3))]
        sizes = dict(zip(own + inner, [*shape, *self.rng.integers(1, 4, len(inner))], strict=True))
        cut = int(self.rng.integers(1, len(shape)))
        mixed = "".join(self.rng.permutation(list(own)))
        both = own[0] if self.rng.random() < 0.2 else ""
        parts = mixed[:cut], mixed[cut:]
        sides = ["".join(self.rng.permutation(sorted({*part, *both, *inner}))) for part in parts]
        one, other = (self.array(tuple(int(sizes[n]) for n in side), depth - 1) for side in sides)
        return lambda p: jnp.einsum(f"{sides[0]},{sides[1]}->{own}", one(p), other(p))

    def times_vector(self, shape, inner):
        """Times or by an array that lies along some axes."""
        wide = [n if self.rng.random() < 0.5 else 1 for n in shape]
        name = f"p{len(self.params)}"
        self.params[name] = 1 + self.rng.uniform(size=wide)
        stop = lax.stop_gradient if self.rng.random() < 0.5 else lambda x: x
        if self.rng.random() < 0.5:
            return lambda p: inner(p) / stop(p[name])
        return lambda p: stop(p[name]) * inner(p)

    def merged(self, shape, depth):
        """Reshaped from more axes."""
        split = [(2, n // 2) if n % 2 == 0 and self.rng.random() < 0.7 else (n,) for n in shape]
        inner = self.array(tuple(k for part in split for k in part), depth - 1)
        return lambda p: inner(p).reshape(shape)


def drawn(rng):
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(2, 4)))
    own = Drawn(rng)
    weight = own.array(shape, int(rng.integers(1, 4)))
    axes = [int(i) for i in rng.permutation(len(shape))[: rng.integers(1, len(shape))]]
    positions = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3)))
    x_shape = [*positions, *(shape[i] for i in axes)]
    order = [int(i) for i in rng.permutation(len(x_shape))]
    at = [order.index(len(positions) + i) for i in range(len(axes))]
    x = rng.normal(size=(B, *(x_shape[i] for i in order)))
    is_left = rng.random() < 0.5
    around = [lambda f: f, jax.checkpoint, jax.jit][rng.integers(3)]

    def loss(p, x):
        def use(p, x):
            operands, dims = ((weight(p), x), (axes, at)) if is_left else ((x, weight(p)), (at, axes))
            return jnp.sum(jnp.tanh(lax.dot_general(*operands, (dims, ((), ())))) ** 2)

        return around(use)(p, x)

    return loss, own.params, x


@pytest.mark.parametrize("seed", slow_unless(range(6), range(150)))
@pytest.mark.one_in(6)
def test_products_equal_plain_gradients(monkeypatch, seed, x64):
    monkeypatch.setattr(products, "_MOST_OPERATIONS", float("inf"))
    rng = np.random.default_rng(seed)
    loss, params, x = drawn(rng)
    scale = random_like(params, seed) if rng.random() < 0.3 else None
    with jax.numpy_rank_promotion("allow"):
        check(loss, params, x, scale=scale, clips=(leaf_clip if rng.random() < 0.5 else flat_clip,))


def test_most_expressions_are_taken_apart(monkeypatch, x64):
    """Otherwise the search above would say little."""
    monkeypatch.setattr(products, "_MOST_OPERATIONS", float("inf"))
    found = []

    def counted(*args):
        parts = products.taken_apart(*args)
        found[-1] |= parts is not None
        return parts

    monkeypatch.setattr(trace, "taken_apart", counted)
    with jax.numpy_rank_promotion("allow"):
        for seed in range(60):
            loss, params, x = drawn(np.random.default_rng(seed))
            if len(params) > 1:
                found.append(False)
                trace.trace_loss(loss, params, x[0])
    assert np.mean(found) > 0.6


def _adapted(p, x):
    return jnp.sum(jnp.tanh(x @ (0.5 * (p["a"] @ p["b"]) + jnp.eye(32))) ** 2)


def _layers(p, x):
    def layer(x, w):
        return jnp.tanh(x @ (w["a"] @ w["b"] + jnp.eye(32))), None

    return jnp.sum(lax.scan(layer, x, p)[0] ** 2)


def _over_time(p, x):  # one weight for all steps, made before the loop
    whole = p["a"] @ p["b"] + jnp.eye(32)
    return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(h @ whole + row), None), jnp.zeros(32), x)[0] ** 2)


@pytest.mark.parametrize("loss", [_adapted, _layers, _over_time])
@pytest.mark.parametrize("rank", [2, 32])
@pytest.mark.slow
def test_factors_are_weights_where_that_takes_few_operations(loss, rank, x64):
    rng = np.random.default_rng(0)
    layers = (3,) if loss is _layers else ()
    params = {"a": rng.normal(size=(*layers, 32, rank)) / 6, "b": rng.normal(size=(*layers, rank, 32)) / 6}
    params, x = jax.tree.map(jnp.asarray, params), jnp.asarray(rng.normal(size=(B, 6, 32)))
    plan = ghost.plan_clipped_sum(loss, params, x)
    are_apart = {leaf.method is not PULLED_BACK for leaf in plan.leaves}
    assert are_apart == {rank == 2}
    check(loss, params, x)
