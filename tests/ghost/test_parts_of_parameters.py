"""Parameters of which several contacts read parts, such as a stack of layers by their indices.

The squares of parts that share no entry add up; of others they do not, which would lose their cross terms.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import contributions, enable_x64, slow_unless
from jax import lax

from dpopt import ghost
from dpopt.ghost import methods

_WAYS = "recorded", "two passes", "one pass"
_SHAPE = (4, 4, 4)

# Matrices that are read from a parameter of shape (4, 4, 4); i is in -4, ..., 3.
READS = {
    "index": lambda w, i: w[i],
    "index, an array": lambda w, i: w[jnp.int32(i)],
    "index that is clamped": lambda w, i: lax.dynamic_index_in_dim(w, 3 * i, keepdims=False),
    "column": lambda w, i: w[:, i],
    "last axis": lambda w, i: w[..., i],
    "transposed first": lambda w, i: w.transpose(2, 0, 1)[i],
    "transposed after": lambda w, i: w[i].T,
    "split": lambda w, i: jnp.split(w, 4, 1)[i].reshape(4, 4),
    "sizes": lambda w, i: jnp.split(w, [1, 3], 1)[i % 3].reshape(-1, 4),
    "unstacked": lambda w, i: jnp.unstack(w, axis=1)[i],
    "iterated": lambda w, i: [*w][i],
    "slice": lambda w, i: w[i % 3 : i % 3 + 2].reshape(-1, 4),
    "slices": lambda w, i: w[i % 4, :, i % 2 * 2 : i % 2 * 2 + 2].reshape(-1, 4),
    "steps": lambda w, i: w[i % 2 :: 2].reshape(-1, 4),
    "reversed": lambda w, i: w[::-1][i],
    "reshaped first": lambda w, i: w.reshape(16, 4)[4 * (i % 4) : 4 * (i % 4) + 4],
    "twice": lambda w, i: w[2 * (i % 2) : 2 * (i % 2) + 2][i % 3 % 2],
    "multiple": lambda w, i: -3 * w[i],
    "tanh": lambda w, i: jnp.tanh(w)[i],
    "sum": lambda w, i: w[i] + w[(i + 1) % 4],
    "gathered": lambda w, i: w[np.array([i])].reshape(4, 4),
    "all": lambda w, i: w.reshape(16, 4),
}
USES = {
    "dense": lambda m, x: jnp.tanh(x @ m.T),
    "vector": lambda m, x: jnp.tanh(m @ x[0]),
    "look-up": lambda m, x: jnp.sin(m[jnp.argmax(x, 1)]),
    "entries": lambda m, x: jnp.sin(m * x[:1]),
    "scan": lambda m, x: lax.scan(lambda h, row: (jnp.tanh(h * row), h), x[0], m)[1],
    "steps": lambda m, x: lax.scan(lambda h, row: (jnp.tanh(row + jnp.sum(m @ h)), h), x[0], x)[1],
}


def _drawn(seed):
    """A loss of one parameter, how it reads that, and whether it has a diagonal."""
    rng = np.random.default_rng(seed)
    # Three in four losses read one kind alone, mostly at different indices.
    kinds = [list(READS)[seed % len(READS)]] if rng.random() < 0.75 else list(READS)
    indices = rng.permutation(4) - 4 * rng.integers(2) if rng.random() < 0.75 else rng.integers(-4, 4, 4)
    chosen = [(READS[rng.choice(kinds)], int(i)) for i in indices[: rng.integers(1, 5)]]
    uses = [USES[rng.choice(list(USES))] for _ in chosen]

    def loss(params, x):
        found = (use(read(params["w"], i), x) for use, (read, i) in zip(uses, chosen, strict=True))
        return sum(jnp.sum(out * (k + 1)) for k, out in enumerate(found))

    return loss, chosen, rng.normal(size=_SHAPE) if rng.random() < 0.4 else None


def _overlap(chosen):
    """Whether two reads have an entry in common."""
    ones = jnp.ones(_SHAPE)
    read = [np.asarray(jax.grad(lambda w, r=r, i=i: jnp.sum(jnp.abs(r(w, i))))(ones) != 0) for r, i in chosen]
    return any(np.any(a & b) for a, b in itertools.combinations(read, 2))


def _plan(loss, scale):
    scale = None if scale is None else {"w": scale}
    example = jax.ShapeDtypeStruct((3, 3, 4), "float32")
    return ghost.plan_clipped_sum(loss, {"w": jax.ShapeDtypeStruct(_SHAPE, "float32")}, example, scale=scale)


_SEEDS = range(len(READS))
_RUNS = slow_unless({(seed, _WAYS[seed % 3]) for seed in _SEEDS}, itertools.product(range(220), _WAYS))


@pytest.mark.parametrize("run", _RUNS, ids=lambda run: f"{run[0]}, {run[1]}")
@pytest.mark.one_in(8)
def test_contributions_are_those_of_plain_gradients(run):
    seed, way = run
    loss, _, diagonal = _drawn(seed)
    rng = np.random.default_rng(seed)
    with enable_x64(True), jax.numpy_rank_promotion("allow"):
        params, batch = {"w": jnp.asarray(rng.normal(size=_SHAPE))}, jnp.asarray(rng.normal(size=(3, 3, 4)))
        scale = None if diagonal is None else {"w": jnp.asarray(diagonal)}
        expected = np.stack([jax.grad(loss)(params, x)["w"] for x in batch]) * (1 if diagonal is None else diagonal)
        norms = np.linalg.norm(expected.reshape(3, -1), axis=1)
        clip = float(np.median(norms)) / 2 or 1.0
        alone, among = contributions(loss, params, batch, way, clip, scale)
    factor = np.minimum(1, np.divide(clip, norms, out=np.ones(3), where=norms > 0))
    expected *= factor.reshape(3, 1, 1, 1)
    np.testing.assert_allclose(alone, expected, rtol=1e-8, atol=1e-9 * clip)
    np.testing.assert_allclose(among, expected, rtol=1e-8, atol=1e-9 * clip)
    contributions.clear_cache()


def test_squares_add_up_where_no_entry_is_read_twice_and_only_there():
    apart, found = 0, set()
    with jax.numpy_rank_promotion("allow"):
        for seed in range(132):
            loss, chosen, scale = _drawn(seed)
            (leaf,) = _plan(loss, scale).leaves
            adds_up = leaf.method is methods.APART
            assert not adds_up or not _overlap(chosen), f"seed {seed}"
            apart += adds_up
            found |= {name for name, read in READS.items() if adds_up and any(read is r for r, _ in chosen)}
    assert apart > 16
    assert found > {"index", "column", "split", "unstacked", "transposed first", "iterated", "tanh"}


def test_layers_by_their_index_have_the_methods_of_separate_layers():
    def stacked(params, x):
        for layer in range(3):
            x = jnp.tanh(x @ params["w"][layer] + params["b"][layer, None])
        return jnp.sum(x)

    params = {"w": jax.ShapeDtypeStruct((3, 64, 64), "float32"), "b": jax.ShapeDtypeStruct((3, 64), "float32")}
    plan = ghost.plan_clipped_sum(stacked, params, jax.ShapeDtypeStruct((8, 2, 64), "float32"))
    assert [[part.method for part in leaf.parts] for leaf in plan.leaves] == [
        [methods.EXPLICIT] * 3,
        [methods.GRAM] * 3,
    ]
    assert {*plan.streaming().streamed} == {*plan.trace.contacts}
