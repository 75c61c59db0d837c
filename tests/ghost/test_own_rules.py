"""Derivative rules that users write, of which the engine takes the products for contacts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, slow_unless
from jax import lax

import dpopt
from dpopt import ghost
from dpopt.ghost.trace import trace_loss

_WAYS = "recorded", "two passes", "one pass"

# What a layer computes from its weights w and v, (4, 4), b, (4,), and its input, (T, 4).
FORWARD = {
    "dense": lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
    "weight on the left": lambda p, x: jnp.tanh(p["w"] @ x.T).T + p["b"],
    "two uses": lambda p, x: jnp.sin(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"]),
    "two weights": lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"],
    "product of weights": lambda p, x: jnp.tanh(x @ (p["w"] @ p["v"]) + p["b"]),
    "a scale": lambda p, x: (x * p["b"]) @ p["w"],
    "filter": lambda p, x: (
        lax.conv_general_dilated(
            x[None],
            p["w"].reshape(2, 2, 4),
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=2,
        )[0]
        + p["b"]
    ),
    "fixed point": lambda p, x: lax.fori_loop(0, 5, lambda _, h: jnp.tanh(h @ p["w"] / 4 + x + p["b"]), x),
}


def _clipped(y):
    return jnp.clip(y, -0.3, 0.3)


# How a rule changes the cotangent before it pulls it back, and then the gradients of the weights.
BEFORE = {
    "as it is": lambda y: y,
    "clipped": _clipped,
    "normalised": lambda y: y / (1 + jnp.linalg.norm(y)),
    "iterated": lambda y: lax.fori_loop(0, 3, lambda _, u: 0.5 * u + y, y),
}
AFTER = {
    "as it is": lambda g, x, p: g,
    "scaled": lambda g, x, p: jax.tree.map(lambda g: -2 * g * jnp.cos(x[0, 0]), g),
    "clipped": lambda g, x, p: jax.tree.map(_clipped, g),
    "decayed": lambda g, x, p: jax.tree.map(lambda g, w: g + 0.1 * w, g, p),
    "decayed in places": lambda g, x, p: jax.tree.map(lambda g, w: jnp.where(w > 0, g, 0.1), g, p),
    "two terms": lambda g, x, p: jax.tree.map(lambda g: g + g.T * 3 - g / 2, g),
    "masked": lambda g, x, p: jax.tree.map(lambda g: jnp.where(jnp.arange(g.size).reshape(g.shape) % 3 == 0, g, 0), g),
}
AROUND = {
    "nothing": lambda layer, p, x: layer(p, x),
    "a scan": lambda layer, p, x: lax.scan(lambda h, _: (layer(p, h), None), x, None, length=2)[0],
    "a scan of layers": lambda layer, p, x: lax.scan(
        lambda h, q: (layer(q, h), None), x, jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
    )[0],
    "remat": lambda layer, p, x: jax.checkpoint(layer)(p, x),
    "cond": lambda layer, p, x: lax.cond(x[0, 0] > 0, layer, lambda p, x: x, p, x),
    "vmap": lambda layer, p, x: jax.vmap(layer, (None, 0))(p, x[:, None])[:, 0],
    "jit, twice": lambda layer, p, x: jax.jit(layer)(p, jax.jit(layer)(p, x)),
    "other weights": lambda layer, p, x: layer({"w": p["v"].T, "v": 2 * p["w"], "b": p["b"] + 1}, x),
}


def _drawn(seed):
    """A loss with a layer whose rule is drawn, its parameters and a batch."""
    rng = np.random.default_rng(seed)
    name = list(FORWARD)[seed % len(FORWARD)]
    forward, implicit = FORWARD[name], {"fixed point": lambda p, x: jnp.tanh(x @ p["w"] / 4 + x + p["b"])}
    before, after, around = (list(kinds.values())[rng.integers(len(kinds))] for kinds in (BEFORE, AFTER, AROUND))

    @jax.custom_vjp
    def layer(p, x):
        return forward(p, x)

    def keep(p, x):
        return forward(p, x), (p, x)

    def pull(kept, y):
        weights, x = jax.vjp(implicit.get(name, forward), *kept)[1](before(y))
        return after(weights, kept[1], kept[0]), x

    layer.defvjp(keep, pull)
    size, shape = int(rng.integers(1, 4)), {"w": (4, 4), "v": (4, 4), "b": (4,)}
    own = rng.random() < 0.5  # a product before the layer, so that its input depends on a parameter, too

    def loss(p, x):
        h = jnp.tanh(x @ p["own"]) if own else x
        return jnp.sum(jnp.sin(around(layer, p["layer"], h)))

    params = {"own": rng.normal(size=(4, 4)), "layer": {k: rng.normal(size=s) for k, s in shape.items()}}
    return loss, params, rng.normal(size=(3, size, 4))


# What a rule returns for the cotangents of a weight, (4, 4), and a step size, (), whose quantised values it rounds.
OF_WEIGHTS = {
    "straight through": (True, lambda y, w, s: (y, jnp.zeros_like(s))),
    "within the range": (True, lambda y, w, s: (jnp.where(jnp.abs(w / s) < 8, y, 0), jnp.zeros_like(s))),
    "step size": (True, lambda y, w, s: (y * (jnp.abs(w / s) < 8), jnp.sum(y * (jnp.round(w / s) - w / s)) / 4)),
    "mixed": (True, lambda y, w, s: ((y.T @ w + 2 * y) / (1 + w**2), jnp.mean(y))),
    "clipped": (False, lambda y, w, s: (_clipped(y), jnp.zeros_like(s))),
    "normalised": (False, lambda y, w, s: (y / (1 + jnp.linalg.norm(y)), jnp.sum(y))),
    "decayed": (False, lambda y, w, s: (y + 0.1 * w, jnp.zeros_like(s))),
    "only the step size is decayed": (False, lambda y, w, s: (y, s / 10)),
    "rounded": (False, lambda y, w, s: (y.astype(jnp.bfloat16).astype(y.dtype), jnp.zeros_like(s))),
}
USES = {
    "dense": lambda w, x: jnp.tanh(x @ w),
    "weight on the left": lambda w, x: jnp.tanh(w @ x.T).T,
    "twice": lambda w, x: jnp.tanh(x @ w) @ w.T,
    "filter": lambda w, x: lax.conv_general_dilated(
        x[None], w.reshape(2, 2, 4), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2
    )[0],
    "rows": lambda w, x: x * w[jnp.argmax(x, 1)],
    "entries": lambda w, x: x * w.sum(0),
    "steps": lambda w, x: lax.scan(lambda h, row: (jnp.tanh(h @ w + row), h), x[0], x)[1],
}


def _quantiser(name):
    is_linear, rule = OF_WEIGHTS[name]

    @jax.custom_vjp
    def quantised(w, s):
        return jnp.round(jnp.clip(w / s, -8, 7)) * s

    quantised.defvjp(lambda w, s: (quantised(w, s), (w, s)), lambda kept, y: rule(y, *kept))
    return is_linear, quantised


def _drawn_of_weights(seed):
    """A loss with a weight whose rule is drawn, its parameters and a batch."""
    rng = np.random.default_rng(seed)
    _, quantised = _quantiser(list(OF_WEIGHTS)[seed % len(OF_WEIGHTS)])
    use, around = (list(kinds.values())[rng.integers(len(kinds))] for kinds in (USES, AROUND))
    is_behind = rng.random() < 0.3  # behind `stop_gradient`: of values alone, whatever the rule

    def layer(p, x):
        w = quantised(p["w"], p["b"][0])
        return use(p["w"] + lax.stop_gradient(w - p["w"]) if is_behind else w, x)

    params = {k: rng.normal(size=(4, 4)) for k in ("w", "v")} | {"b": np.abs(rng.normal(size=4)) + 0.2}
    return lambda p, x: jnp.sum(jnp.sin(around(layer, p, x))), params, rng.normal(size=(3, 2, 4))


_SEEDS = range(len(FORWARD))
_RUNS = slow_unless({(seed, _WAYS[seed // len(FORWARD) % 3]) for seed in _SEEDS}, itertools.product(range(160), _WAYS))


def _contributions(loss, params, batch, way, limits):
    """The contribution of each example to the sum of gradients that are clipped parameter by parameter."""
    tree = jax.tree.structure(params)

    def total(mask):
        plan = ghost.plan_clipped_sum(loss, params, batch)
        own = limits if way == "one pass" else []
        if way != "recorded":
            plan = plan.streaming(ghost.single_parameters(plan, own, []))

        def coefficients(norms):
            pairs = zip(jax.tree.leaves(norms), limits, strict=True)
            return tree.unflatten([jnp.where(n > limit, limit / n, 1.0) for n, limit in pairs])

        return ghost.clipped_sum(loss, params, batch, coefficients=coefficients, mask=mask, plan=plan, limits=own).sum

    everyone = jnp.ones(len(batch), bool)
    totals = jax.lax.map(jax.jit(total), jnp.concatenate([jnp.diag(everyone), everyone[None]]))
    return jax.tree.map(lambda x: x[:-1], totals), jax.tree.map(lambda x: x[-1], totals)


@pytest.mark.parametrize("draw", [_drawn, _drawn_of_weights], ids=["layers", "weights"])
@pytest.mark.parametrize("run", _RUNS, ids=lambda run: f"{run[0]}, {run[1]}")
@pytest.mark.slow
def test_contributions_are_those_of_plain_gradients(run, draw):
    seed, way = run
    loss, params, batch = draw(seed)
    with enable_x64(True), jax.numpy_rank_promotion("allow"):
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        grads = jax.tree.map(lambda *g: np.stack(g), *(jax.grad(loss)(params, x) for x in batch))
        norms = [np.linalg.norm(g.reshape(len(batch), -1), axis=1) for g in jax.tree.leaves(grads)]
        limits = [float(np.median(n)) / 2 or 1.0 for n in norms]
        alone, among = _contributions(loss, params, batch, way, limits)
    for grad, norm, limit, one, every in zip(*map(jax.tree.leaves, (grads, norms, limits, alone, among)), strict=True):
        factor = np.minimum(1, np.divide(limit, norm, out=np.ones_like(norm), where=norm > 0))
        expected = grad * factor.reshape(-1, *[1] * (grad.ndim - 1))
        np.testing.assert_allclose(one, expected, rtol=1e-8, atol=1e-10 * limit)
        np.testing.assert_allclose(every, expected.sum(0), rtol=1e-8, atol=1e-10 * limit)


def _quantised():
    @jax.custom_vjp
    def dense(w, x):
        return x @ jnp.round(w * 8) / 8

    dense.defvjp(lambda w, x: (dense(w, x), (w, x)), lambda kept, y: (kept[1].T @ y, y @ jnp.round(kept[0] * 8).T / 8))
    return lambda p, x: jnp.sum(jnp.sin(dense(p["w"], x)))


def _equilibrium():
    @jax.custom_vjp
    def solved(p, x):
        return lax.while_loop(lambda s: s[1] < 20, lambda s: (jnp.tanh(s[0] @ p / 4 + x), s[1] + 1), (x, 0))[0]

    def pull(kept, y):
        p, x, h = kept
        of_state = jax.vjp(lambda h: jnp.tanh(h @ p / 4 + x), h)[1]
        u = lax.fori_loop(0, 20, lambda _, u: y + of_state(u)[0], y)
        return jax.vjp(lambda p, x: jnp.tanh(h @ p / 4 + x), p, x)[1](u)

    solved.defvjp(lambda p, x: (h := solved(p, x), (p, x, h)), pull)
    return lambda p, x: jnp.sum(jnp.sin(solved(p["w"], x)))


@pytest.mark.parametrize("make", [_quantised, _equilibrium], ids=lambda make: make.__name__.strip("_"))
def test_no_gradient_of_a_weight_is_formed(make):
    trace = trace_loss(make(), {"w": jax.ShapeDtypeStruct((8, 8), "float32")}, jax.ShapeDtypeStruct((2, 8), "float32"))
    assert [c.primitive.name for c in trace.contacts if c.primitive] == ["dot_general"]
    assert not any(c.weight.shape == (8, 8) for c in trace.contacts if c.primitive is None)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_with_a_linear_rule_are_ones_that_are_computed_from_parameters(name):
    is_linear, quantised = _quantiser(name)
    params = {"w": jax.ShapeDtypeStruct((8, 8), "float32"), "s": jax.ShapeDtypeStruct((), "float32")}
    trace = trace_loss(
        lambda p, x: jnp.sum(jnp.sin(x @ quantised(p["w"], p["s"]))), params, jax.ShapeDtypeStruct((2, 8), "float32")
    )
    assert ["dot_general"] * is_linear == [c.primitive.name for c in trace.contacts if c.primitive]


def test_a_weight_that_is_only_read_behind_stop_gradient_has_no_contact():
    _, quantised = _quantiser("clipped")
    found = lambda w: lax.while_loop(lambda s: s < 9, lambda s: s * 2, jnp.max(w))  # noqa: E731

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ (w + lax.stop_gradient(quantised(w, 1.0) - w)) * lax.stop_gradient(found(w))))

    trace = trace_loss(loss, jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((2, 8), "float32"))
    assert [c.primitive.name for c in trace.contacts] == ["dot_general"]


def test_a_rule_without_a_product_is_as_it_was():
    @jax.custom_vjp
    def scaled(w, x):
        return w * x

    scaled.defvjp(lambda w, x: (w * x, x), lambda x, y: (jnp.sign(x * y), jnp.sign(y)))
    loss = lambda p, x: jnp.sum(jnp.sin(scaled(p, x)))  # noqa: E731
    params, batch = jnp.ones(3), jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    total = dpopt.per_example_grads(loss, engine="ghost")(params, batch, mask=None).clipped_sum(dpopt.FlatClip(9.0)).sum
    np.testing.assert_allclose(total, jax.vmap(jax.grad(loss), (None, 0))(params, batch).sum(0), rtol=1e-6)


def _solver(kind):
    """A weight that solves equations with a parameter: by an LU decomposition, or by what is not linear."""
    if kind == "ordinary":
        return lambda w: jnp.linalg.solve(jnp.eye(4) + w - w.T, jnp.eye(4) - w + w.T)
    own = lambda matvec, b: jnp.tanh(b) if kind == "not linear" else b + 0.1  # noqa: E731
    return lambda w: lax.custom_linear_solve(lambda x: x + 0.1 * w @ x, w, own, own)


@pytest.mark.parametrize("kind", ["ordinary", "not linear", "with a constant"])
@pytest.mark.slow
def test_sums_are_pulled_back_through_ordinary_solvers_alone(kind, x64):
    solve, rng = _solver(kind), np.random.default_rng(0)
    loss = lambda p, x: jnp.sum(jnp.sin(x @ solve(p["w"])))  # noqa: E731
    params, batch = {"w": jnp.asarray(rng.normal(size=(4, 4)))}, jnp.asarray(rng.normal(size=(5, 2, 4)))
    trace = trace_loss(loss, params, batch[0])
    assert all(c.primitive is None for c in trace.contacts) == (kind != "ordinary")
    grads = np.stack([jax.grad(loss)(params, x)["w"] for x in batch])
    norms = np.linalg.norm(grads.reshape(5, -1), axis=1)
    expected = np.tensordot(np.minimum(1, np.median(norms) / norms), grads, 1)
    clip = dpopt.FlatClip(float(np.median(norms)))
    total = dpopt.per_example_grads(loss, engine="ghost")(params, batch, mask=None).clipped_sum(clip).sum
    np.testing.assert_allclose(total["w"], expected, rtol=1e-9)
