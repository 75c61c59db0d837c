"""Convolutions as the engine computes them on a GPU, which is emulated: slices, joint copies, and gradients kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu

import dpopt
from dpopt.ghost import contacts, keeping, memory, plan_clipped_sum
from dpopt.ghost.methods import EXPLICIT, explicit
from dpopt.ghost.rows import summed_products

CLIP = 0.3
SIDES = "WHD"


def random_convolution(rng: np.random.Generator, is_plain: bool = False):
    """A loss with one convolution, its filter and a batch; if it is plain, of images, without strides or groups."""
    sides, size = 2 if is_plain else int(rng.integers(1, 4)), int(rng.integers(1, 7))
    groups, strides = (1, [1]) if is_plain else (int(rng.choice([1, 1, 1, 2])), [1, 1, 2])
    a, b = (int(n) for n in rng.integers(1, 4, 2))
    window = [int(n) for n in rng.integers(1, 4, sides)]
    spatial = [int(n) for n in rng.integers(4, 8, sides)]
    apart = [int(n) for n in rng.choice(strides, sides)]
    options = {
        "window_strides": apart,
        "lhs_dilation": [2] * sides if max(apart) == 1 and not is_plain and rng.random() < 0.3 else [1] * sides,
        "rhs_dilation": [int(n) for n in rng.choice([1, 1, 2], sides)],
        "padding": [tuple(int(n) for n in rng.integers(0, 3, 2)) for _ in range(sides)],
        "feature_group_count": groups,
        "dimension_numbers": ("NC" + SIDES[:sides], "OI" + SIDES[:sides], "NC" + SIDES[:sides]),
    }
    w = np.float32(rng.normal(size=(b * groups, a, *window)))
    images = int(rng.integers(1, 3))
    x = np.float32(rng.normal(size=(size, images, a * groups, *spatial)))
    v = rng.normal(size=(size, *jax.eval_shape(lambda w: jax.lax.conv_general_dilated(x[0], w, **options), w).shape))

    def loss_fn(w, example):
        x, v = example
        return jnp.sum(jnp.tanh(jax.lax.conv_general_dilated(x, w.astype(x.dtype), **options)).astype(v.dtype) * v)

    return loss_fn, w, (x, np.float32(v))


def gradients(loss_fn, w, batch):
    grads = np.asarray(jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0)))(w, batch))
    return grads, np.sqrt(np.sum(grads**2, axis=tuple(range(1, grads.ndim))))


@pytest.mark.parametrize("keeps", [False, True], ids=["recorded", "kept"])
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.slow
def test_random_convolutions(seed, keeps):
    """What vmap computes is added up: by products of windows, or of gradients that are kept."""
    loss_fn, w, batch = random_convolution(np.random.default_rng(seed))
    grads, lengths = gradients(loss_fn, w, batch)
    with emulated_gpu():
        plan = plan_clipped_sum(loss_fn, w, batch)
        (contact,) = plan.trace.contacts
        assert contact.is_rounded and not plan.kept
        if keeps:  # whatever that costs
            leaves = [dataclasses.replace(plan.leaves[0], method=EXPLICIT)]
            plan = dataclasses.replace(plan, leaves=leaves, kept=frozenset({contact}))
        clip = dpopt.FlatClip(CLIP).coefficients
        clipped = jax.jit(lambda w, b: dpopt.ghost.clipped_sum(loss_fn, w, b, coefficients=clip, plan=plan))
        found = jax.device_get(clipped(w, batch))
    tolerance = 4e-3 if keeps else 1e-5  # gradients that are kept are rounded like the loss
    # (Norms have an allowance for terms that cancel.)
    assert np.all(found.leaf_norms >= (1 - tolerance) * lengths) and np.all(found.leaf_norms <= 1.1 * lengths)
    expected = np.tensordot(np.minimum(1, CLIP / found.leaf_norms), grads, 1)
    np.testing.assert_allclose(found.sum, expected, atol=tolerance * np.max(np.abs(expected)))


@pytest.mark.slow  # forty convolutions
def test_joint_copies_give_the_gradient():
    """Rows of the cotangent and columns of the input are copied instead of windows, where that takes fewer bytes."""
    offered = 0
    for seed in range(40):
        rng = np.random.default_rng(1_000 + seed)
        loss_fn, w, batch = random_convolution(rng, is_plain=True)
        (contact,) = plan_clipped_sum(loss_fn, w, batch).trace.contacts
        if contact.factors.joint is not None:
            x, y = batch[0][0], jnp.asarray(rng.normal(size=contact.tap_shape), jnp.float32)
            found = contact.factors.joint(x, y, summed_products)
            np.testing.assert_allclose(found, explicit.formed(contact.factors, x, y), rtol=1e-4, atol=1e-4)
            offered += 1
    assert offered >= 5, "too few were offered"


def convolved(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_half_precision_is_copied_jointly(monkeypatch):
    """In float32 that takes as long."""
    rng, calls = np.random.default_rng(0), []
    monkeypatch.setattr(explicit, "formed_together", lambda *args: calls.append(args) or jnp.zeros((1, 9, 2, 1)))
    w, x, v = (np.float32(rng.normal(size=s)) for s in ((3, 3, 2, 1), (4, 1, 8, 8, 2), (4, 1, 8, 8, 1)))

    def loss_fn(w, example):
        x, v = example
        numbers = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(
            jax.lax.conv_general_dilated(x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=numbers) * v
        )

    for dtype, by_windows in ((jnp.bfloat16, 0), (jnp.float32, 1)):
        batch = (x.astype(dtype), v.astype(dtype))
        (contact,) = plan_clipped_sum(loss_fn, w, batch).trace.contacts
        with emulated_gpu():
            jax.eval_shape(functools.partial(explicit.formed, contact.factors), batch[0][0], batch[1][0])
        assert len(calls) == by_windows


def small_cnn(rng: np.random.Generator, size: int):
    """Two convolutions whose gradients take more than their inputs and outputs, and a batch."""
    params = [jnp.asarray(rng.normal(size=s) / 10, jnp.float32) for s in ((3, 3, 3, 32), (3, 3, 32, 96))]

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(convolved(x, w))
        return jnp.sum(x**2)

    return loss_fn, params, jnp.asarray(rng.normal(size=(size, 1, 8, 8, 3)), jnp.float32)


def test_a_gpu_keeps_more_where_that_saves_time_and_memory_allows_it(monkeypatch):
    monkeypatch.setattr(memory, "_STARTED", 0)
    loss_fn, params, batch = small_cnn(np.random.default_rng(0), 256)
    with emulated_gpu(keeps=True):
        plan = plan_clipped_sum(loss_fn, params, batch)
        large = next(c for c in plan.trace.contacts if c.factors.shape == (9, 1, 32, 96))
        more = keeping.keeping_more(plan)
        assert large not in plan.kept and large in more[-1].kept
        costs = [p.ghost_cost for p in (plan, *more)]
        assert costs == sorted(costs, reverse=True), "every one saves more"
        assert [len(p.kept) for p in more] == [len(plan.kept) + 1 + i for i in range(len(more))]
        sizes = {}
        for allowed in (1.05, 1.25, 4.0, 100.0):
            way = memory.choose(plan, allowed, may_split=True, may_vmap=False)
            sizes[allowed] = way.parts
            if large in way.plan.kept:
                found = memory.estimate(more[-1])
                assert found.recorded(way.parts) <= allowed * found.ordinary
        assert large in way.plan.kept and way.parts == 1, "with memory enough, of the whole batch"
        assert sizes == dict(sorted(sizes.items(), key=lambda s: (-s[1], s[0]))), "more memory, fewer parts"
        assert keeping.keeping_more(plan_clipped_sum(loss_fn, params, batch, offset=params)) == []
    assert not memory.choose(plan, 100.0, may_split=True, may_vmap=False).plan.kept - plan.kept, "not on a CPU"


def test_exact_losses_and_products_of_matrices_keep_no_more():
    """Where the loss asks for full precision a GPU may not round; sums of products are rounded without keeping."""
    loss_fn, params, batch = small_cnn(np.random.default_rng(0), 4)
    with emulated_gpu(keeps=True), jax.default_matmul_precision("highest"):
        assert keeping.keeping_more(plan_clipped_sum(loss_fn, params, batch)) == []
    with emulated_gpu():
        dense = plan_clipped_sum(lambda w, x: jnp.sum(jnp.tanh(x @ w)), jnp.ones((64, 64)), jnp.ones((4, 128, 64)))
        assert keeping.keeping_more(dense) == []


def test_kept_gradients_are_added_up_in_stacks_on_a_gpu():
    """A filter's gradient that is kept is summed by one kernel for several blocks."""
    loss_fn, params, batch = small_cnn(np.random.default_rng(0), 4)
    (contact, *_) = plan_clipped_sum(loss_fn, params, batch).trace.contacts
    assert not contacts.may_stack(contact)
    assert contacts.may_stack(contact, contacts.Formed(jnp.zeros((4, *contact.factors.shape))))
