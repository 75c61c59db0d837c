"""Rows that are sorted by expert and multiplied by ``ragged_dot``, which ``vmap`` has no rule for."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import contributions, enable_x64, slow_unless
from jax import lax

import dpopt

_WAYS = ["recorded", "two passes", "one pass"]
_WEIGHTS = {
    "as it is": lambda w: w,
    "scaled": lambda w: 2 * w,
    "adapted": lambda w: jnp.ones(w.shape, w.dtype) + w[..., :1] @ w[:, :1],
    "tied": lambda w: jnp.concatenate([w[1:], w[:1]]),
    "frozen": None,
}
_RUNS = list(itertools.product(range(8), _WEIGHTS, _WAYS))


def _drawn(seed, weight):
    """A loss of rows under experts: of any sizes, some of them empty, which need not cover all rows."""
    rng = np.random.default_rng(seed)
    rows, width, out, experts = (int(n) for n in (rng.integers(1, 9), *rng.integers(1, 6, 2), rng.integers(1, 5)))
    is_routed, has_last, is_turned = (bool(b) for b in rng.integers(2, size=3))
    frozen = rng.normal(size=(experts, width, out))
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    router = rng.normal(size=(width, experts))
    if not is_routed:
        given = rng.multinomial(rows, np.ones(experts) / experts)
        given[-1] = max(0, given[-1] - rng.integers(2))

    def product(x, matrices, sizes):
        if is_turned:
            return lax.ragged_dot_general(x, matrices.mT, sizes, numbers)
        return lax.ragged_dot(x, matrices, sizes)

    def loss(params, x):
        if weight is None:  # no gradient reaches the experts
            x, matrices = jnp.tanh(x @ params["w"][0]), jnp.asarray(frozen, x.dtype)
        else:
            matrices = weight(params["w"])
        order, sizes = jnp.arange(rows), None if is_routed else jnp.asarray(given)
        if is_routed:
            expert = jnp.argmax(x @ router[: x.shape[1]], 1)
            order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=experts)
        h = product(x[order], matrices, sizes)
        return jnp.sum(jnp.sin(h if not has_last else h[jnp.argsort(order)] * x[:, :1]))

    shape = (1, width, width) if weight is None else (experts, width, out)
    return loss, {"w": rng.normal(size=shape)}, rng.normal(size=(4, rows, width))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("run", slow_unless(_RUNS[::17], _RUNS), ids=lambda run: ", ".join(map(str, run)))
def test_contributions_are_those_of_plain_gradients(run):
    seed, weight, way = run
    loss, params, batch = _drawn(seed, _WEIGHTS[weight])
    with enable_x64(True), jax.numpy_rank_promotion("allow"):
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        expected = np.stack([jax.grad(loss)(params, x)["w"] for x in batch])
        norms = np.linalg.norm(expected.reshape(4, -1), axis=1)
        clip = float(np.median(norms)) / 2 or 1.0
        alone, among = contributions(loss, params, batch, way, clip, None)
    expected *= np.minimum(1, np.divide(clip, norms, out=np.ones(4), where=norms > 0)).reshape(4, 1, 1, 1)
    np.testing.assert_allclose(alone, expected, rtol=1e-8, atol=1e-9 * clip)
    np.testing.assert_allclose(among, expected, rtol=1e-7, atol=1e-8 * clip)


@pytest.mark.parametrize("engine", ["ghost", "auto"])
def test_experts_are_no_reason_to_take_one_example_after_the_other(engine):
    loss, params, batch = _drawn(0, _WEIGHTS["as it is"])
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = dpopt.per_example_grads(loss, engine=engine)
        jax.eval_shape(lambda p, b: grads(p, b, mask=None).clipped_sum(dpopt.FlatClip(1.0)).sum, params, batch)


@pytest.mark.slow
def test_an_example_that_is_not_finite_stays_apart():
    loss, params, batch = _drawn(3, _WEIGHTS["as it is"])
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))
    grads, mask = dpopt.per_example_grads(loss, engine="ghost"), np.arange(4) != 1
    with jax.numpy_rank_promotion("allow"):
        poisoned = grads(params, batch.at[1, 0].set(jnp.inf), mask=None).clipped_sum(dpopt.FlatClip(1.0)).sum
        without = grads(params, batch, mask=mask).clipped_sum(dpopt.FlatClip(1.0)).sum
    np.testing.assert_allclose(poisoned["w"], without["w"], rtol=1e-6)
