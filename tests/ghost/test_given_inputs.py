"""Contacts whose input is an array of the batch, which the engine neither copies nor cleans as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, preferring
from jax import lax

import dpopt
from dpopt.engines import rounding
from dpopt.ghost import one_by_one
from dpopt.ghost.trace import trace_loss

CLIP = 0.7
CLIPS = {"flat": dpopt.FlatClip(CLIP), "layerwise": dpopt.LayerwiseClip(CLIP)}
KEEPS_BARRIERS = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA drops barriers too early on CPUs")
KINDS = ["vector", "column", "sequence", "flattened", "filters", "twice", "own gradient", "look-up", "absolute"]
SINGLE = ["vector", "column", "flattened", "absolute"]  # whose gradient is one product, in which nothing cancels


def _drawn(rng, kind):
    """A loss that reads its input in one of many shapes, its parameters, and the shape of an input."""
    rows, width, out = (int(n) for n in rng.integers(1, [5, 7, 5]))
    vectors = dict.fromkeys(["vector", "column", "absolute"], (width,))
    shape = (vectors | {"filters": (rows + 3, width)}).get(kind, (rows, width))
    fan_in = {"flattened": rows * width, "filters": 3 * width, "look-up": 1200}.get(kind, width)
    params = {"w": rng.normal(size=(fan_in, out)), "b": rng.normal(size=out), "v": rng.normal(size=(out, 3))}

    def loss_fn(params, example):
        x, y, ids = example
        w = params["w"]
        if kind == "column":
            h = (x[None] @ w)[0]
        elif kind == "flattened":
            h = x.reshape(-1) @ w
        elif kind == "filters":
            filters = w.reshape(3, width, out)
            h = lax.conv_general_dilated(x[None], filters, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))[0]
        elif kind == "look-up":
            h = w[ids]
        elif kind == "absolute":  # where x is zero, the cotangent of this weight is NaN, and no other
            h = jnp.sqrt((x @ w) ** 2)
        elif kind == "twice":
            h = x @ w + jnp.sin(x) @ w
        else:
            h = x @ w
        h = jnp.sum(jnp.tanh(h.reshape(-1, out) + params["b"][None]), axis=0)
        if kind == "own gradient":
            h = h + jnp.sum(jax.grad(lambda x: jnp.sum(jnp.cos(x @ w)))(x))
        return jnp.sum((h @ params["v"] - y) ** 2)

    return loss_fn, jax.tree.map(jnp.asarray, params), shape


def _batch(rng, size, shape):
    """Some examples have an entry that is not finite, in the input or in the label; and who counts."""
    x, y = rng.normal(size=(size, *shape)), rng.normal(size=(size, 3))
    for i in rng.choice(size, max(1, size // 9), replace=False):
        part = [x, y][rng.integers(2)]
        part[(i, *(int(rng.integers(n)) for n in part.shape[1:]))] = rng.choice([np.nan, np.inf, -np.inf])
    for part in (x, y):
        part[(0,) * part.ndim] = np.nan  # what no other entry may follow from
    x[1:][rng.random(size - 1) < 0.1] = 0
    ids = rng.integers(0, 1200, (size, 3))
    return (jnp.asarray(x), jnp.asarray(y), jnp.asarray(ids)), (rng.random(size) < 0.8) | (np.arange(size) == 0)


def _uniform(rng, low, params):
    return jax.tree.map(lambda p: np.asarray(rng.uniform(low, 2, p.shape), p.dtype), params)


def _expected(loss_fn, params, batch, mask, clip, diagonal=None, offset=None):
    """The clipped sum in float64, by NumPy, of plain gradients, scaled and shifted; and who is all right."""
    # One by one: convolutions that `jax.vmap` puts together can make examples NaN that are all right.
    alone = jax.jit(lambda params, batch: lax.map(lambda example: jax.grad(loss_fn)(params, example), batch))
    grads = jax.tree.map(np.float64, alone(params, batch))
    if diagonal is not None:
        grads = jax.tree.map(np.multiply, grads, diagonal)
    if offset is not None:
        grads = jax.tree.map(np.add, grads, offset)
    leaves, tree = jax.tree.flatten(grads)
    rows = [leaf.reshape(len(mask), -1) for leaf in leaves]
    fine = [mask & np.isfinite(r).all(axis=1) for r in rows]
    ok = np.all(fine, axis=0)
    if clip == "flat":  # parameters that are clipped alone are left out alone
        fine = [ok] * len(rows)
    rows = [np.where(own[:, None], r, 0) for r, own in zip(rows, fine, strict=True)]
    norms, limit = [np.linalg.norm(r, axis=1) for r in rows], CLIP / len(rows) ** 0.5
    if clip == "flat":
        norms, limit = [np.linalg.norm(norms, axis=0)] * len(rows), CLIP
    sums = [np.minimum(1, limit / np.maximum(n, 1e-30)) @ r for r, n in zip(rows, norms, strict=True)]
    return tree.unflatten([s.reshape(leaf.shape[1:]) for s, leaf in zip(sums, leaves, strict=True)]), ok


def _clipped(loss_fn, clip, diagonal=None, offset=None, **options):
    """The engine's sum, and who is all right, of parameters, a batch and a mask."""

    @jax.jit
    def clipped(params, batch, mask):
        grads = dpopt.per_example_grads(loss_fn, engine="ghost", **options)(params, batch, mask=mask)
        grads = grads if diagonal is None else grads.scale(diagonal)
        found = (grads if offset is None else grads.shift(offset)).clipped_sum(CLIPS[clip])
        return found.sum, found.sensitive.is_example & found.sensitive.is_finite

    return clipped


@pytest.mark.parametrize("seed", range(180))
@pytest.mark.one_in(180)
def test_bad_examples_contribute_nothing(seed, monkeypatch):
    """Whatever they hold: in blocks or whole, recorded, in one pass or two, with sums that count as large or not.

    In float32 norms pay for the rounding of terms that cancel, so gradients that have any are compared in float64."""
    rng, kind, clip = np.random.default_rng(seed), KINDS[seed % len(KINDS)], [*CLIPS][seed // len(KINDS) % 2]
    has_offset = rng.random() < 0.4
    is_double = has_offset or kind not in SINGLE
    with enable_x64(is_double):
        found, expected = _found_and_expected(rng, kind, clip, has_offset, monkeypatch)
    rtol, atol = (1e-9, 1e-9) if is_double else (1e-5, 2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def _found_and_expected(rng, kind, clip, has_offset, monkeypatch):
    loss_fn, params, shape = _drawn(rng, kind)
    size = int(rng.choice([5, rounding.ROWS, 97, 300, 300]))
    batch, mask = _batch(rng, size, shape)
    monkeypatch.setattr("dpopt.ghost.memory._SMALL_BYTES", 0)  # below which all is recorded
    # Large sums and missing masks hide most of what zeros can do to this one.
    large, whole = (0.2, 0.1) if kind == "absolute" else (0.7, 0.3)
    if rng.random() < large:
        monkeypatch.setattr("dpopt.ghost.large_sums._LARGE_BYTES", 16)
        monkeypatch.setattr("dpopt.ghost.large_sums._PART_BYTES", 16)
    if rng.random() < 0.5:  # two passes, unless one is enough
        monkeypatch.setattr("dpopt.ghost.memory._recorded", lambda *_: None)
    mask = np.ones(size, bool) if rng.random() < whole else mask
    if kind == "absolute":  # as samplers fill up
        batch = (jnp.where(mask[:, None], batch[0], 0), *batch[1:])
    diagonal = _uniform(rng, 0.1, params) if rng.random() < 0.4 else None
    offset = _uniform(rng, -2, params) if has_offset else None
    if rng.random() < 0.4:  # one pass forms gradients wherever it can
        monkeypatch.setattr("dpopt.ghost.plan._streamed_cost", lambda _, method, **__: method != "explicit")
    clipped = _clipped(loss_fn, clip, diagonal, offset, memory=1e9)
    with preferring("joined" if rng.random() < 0.5 else ""):
        found, found_ok = clipped(params, batch, None if mask.all() else mask)
    expected, ok = _expected(loss_fn, params, batch, mask, clip, diagonal, offset)
    assert (found_ok == ok).all()
    return jax.tree.map(np.asarray, found), expected


@pytest.mark.parametrize("large_bytes", [16, 1 << 30])
@pytest.mark.parametrize("size", [5, 97])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.one_in(9)
def test_padding_whose_cotangents_are_not_finite(clip, size, large_bytes, monkeypatch):
    """Where the input is zero, as samplers fill up, the cotangent of one weight is NaN, and no other."""
    loss_fn, params, shape = _drawn(np.random.default_rng(0), "absolute")
    (x, y, ids), mask = _batch(np.random.default_rng(0), size, shape)
    x = jnp.where(mask[:, None], x, 0)
    expected, ok = _expected(loss_fn, params, (x, y, ids), mask, clip)
    monkeypatch.setattr("dpopt.ghost.memory._SMALL_BYTES", 0)  # by layer, in one pass
    monkeypatch.setattr("dpopt.ghost.large_sums._LARGE_BYTES", large_bytes)
    found, _ = _clipped(loss_fn, clip)(params, (x, y, ids), mask)
    assert ok.any() and not mask.all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), found, expected)


@pytest.mark.one_in(4)
@KEEPS_BARRIERS
@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_batch_that_is_computed_in_the_same_program_is_computed_once(size, clip):
    """What is computed several times may be rounded in several ways: the norm and the sum would be of other inputs."""

    def added_up(w, raw):
        promise = dpopt.per_example_grads(lambda w, x: jnp.sum(jnp.tanh(x.reshape(10, 4) @ w)), engine="ghost")
        return promise(w, jnp.floor(raw), mask=None).clipped_sum(CLIPS[clip]).sum

    program = jax.jit(added_up).lower(jnp.zeros((4, 30)), jnp.ones((size, 40))).compile().as_text()
    assert program.count(" floor(") == 1


@pytest.mark.parametrize("has_diagonal", [False, True])
@pytest.mark.parametrize("kind", ["vector", "sequence", "filters", "twice, joined"])
@pytest.mark.one_in(8)
def test_padding_takes_no_slow_path(kind, has_diagonal, monkeypatch):
    """Whatever it holds, norms are not computed one by one, which here would make all of them NaN."""
    kind, _, method = kind.partition(", ")
    loss_fn, params, shape = _drawn(np.random.default_rng(0), kind)
    diagonal = _uniform(np.random.default_rng(0), 0.1, params) if has_diagonal else None
    (x, y, ids), mask = _batch(np.random.default_rng(0), 97, shape)
    mask = mask & np.isfinite(x).all(axis=tuple(range(1, x.ndim))) & np.isfinite(y).all(axis=1)
    expected, _ = _expected(loss_fn, params, (x, y, ids), mask, "flat", diagonal)
    monkeypatch.setattr(one_by_one, "_norms", lambda run, chosen, norms, *_: jnp.full_like(norms, jnp.nan))
    with preferring(method):
        found, _ = _clipped(loss_fn, "flat", diagonal)(params, (x, y, ids), mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@KEEPS_BARRIERS
@pytest.mark.parametrize("has_diagonal", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.one_in(9)
def test_the_batch_is_not_copied(clip, has_mask, has_diagonal):
    batch, params = jnp.ones((512, 4000)), {"w": jnp.zeros((4000, 20)), "b": jnp.zeros(20)}
    mask = jnp.ones(512, bool) if has_mask else None
    diagonal = jax.tree.map(jnp.ones_like, params) if has_diagonal else None
    clipped = _clipped(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + p["b"])), clip, diagonal)
    planned = clipped.lower(params, batch, mask).compile()
    assert planned.memory_analysis().temp_size_in_bytes < 0.4 * batch.nbytes


@KEEPS_BARRIERS
def test_inputs_that_the_loss_computes_are_not_given():
    def given(loss_fn):
        return [c.given is not None for c in trace_loss(loss_fn, jnp.ones((4, 4)), jnp.ones((2, 2))).contacts]

    assert given(lambda w, x: jnp.sum(x.reshape(-1) @ w)) == [True]
    assert given(lambda w, x: jnp.sum(x.reshape(1, 4)[0][None] @ w)) == [True]
    assert given(lambda w, x: jnp.sum(2 * x.reshape(-1) @ w)) == [False]
    assert given(lambda w, x: jnp.sum(x.T.reshape(-1) @ w)) == [False]  # another order of the entries
    assert given(lambda w, x: jnp.sum(jnp.tile(x, (1, 2)) @ w)) == [False]
