"""The memory that XLA plans for a clipped sum, over an ordinary gradient's, where parameters are most of it.

It includes the slow path for norms that float32 cannot compute, for which accelerators reserve memory, too.
"""

import itertools

import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from ghost_check import flat_clip
from helpers import scratch

import dpopt
from dpopt import ghost
from dpopt.ghost import leaf_norms, memory, one_by_one
from dpopt.ghost.trace import trace_loss


def draw(seed):
    """A network of random widths, with biases or without, on a batch that is small beside its weights."""
    rng = np.random.default_rng(seed)
    widths = [int(128 * rng.integers(2, 7)) for _ in range(rng.integers(3, 6))]
    shapes = [{"w": jax.ShapeDtypeStruct((a, b), jnp.float32)} for a, b in itertools.pairwise(widths)]
    if rng.random() < 0.7:
        shapes = [s | {"b": jax.ShapeDtypeStruct(s["w"].shape[1:], jnp.float32)} for s in shapes]
    steps = int(rng.choice([1, 1, 5]))
    return shapes, jax.ShapeDtypeStruct((int(rng.choice([4, 8, 16])), steps, widths[0]), jnp.float32)


def loss_fn(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer.get("b", 0.0))
    return jnp.sum(x)


def planned(function, *args):
    program = jax.jit(function).lower(*args).compile().memory_analysis()
    return program.argument_size_in_bytes + program.output_size_in_bytes + program.temp_size_in_bytes


def ratio(params, batch):
    def ordinary(params, batch):
        return jax.grad(lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0))(p, batch)))(params)

    clipped = lambda p, b: ghost.clipped_sum(loss_fn, p, b, coefficients=flat_clip(0.7)).sum  # noqa: E731
    with jax.numpy_rank_promotion("allow"):
        return planned(clipped, params, batch) / planned(ordinary, params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_it_is_at_most_a_quarter_more(seed):
    assert ratio(*draw(seed)) <= 1.25


@pytest.mark.slow
def test_a_sum_of_several_blocks_is_added_up_in_the_memory_of_the_result():
    params = [{"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)} for _ in range(2)]
    assert ratio(params, jax.ShapeDtypeStruct((200, 1, 1024), jnp.float32)) <= 1.3


@pytest.mark.slow
@pytest.mark.parametrize("size", [512, 700])
def test_the_squares_of_wide_inputs_are_never_in_memory_as_a_whole(size):
    params = [{"w": jax.ShapeDtypeStruct((4000, 100), jnp.float32)}]
    batch = jax.ShapeDtypeStruct((size, 1, 4000), jnp.float32)

    def clipped(params, batch, scale=None):
        return ghost.clipped_sum(loss_fn, params, batch, coefficients=flat_clip(0.7), scale=scale).sum

    with jax.numpy_rank_promotion("allow"):
        plain, scaled = planned(clipped, params, batch), planned(clipped, params, batch, params)
    assert scaled <= plain + 4 * (4 * 4000 * 100)  # some diagonals; the inputs are 5 or 7


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_one_pass_over_a_small_network_takes_at_most_a_quarter_more(seed):
    """Windows of all images were in memory together, 64 MB of them: up to three times an ordinary gradient's."""
    rng = np.random.default_rng(seed)
    widths = [3, *(int(n) for n in rng.choice([8, 16, 32], rng.integers(2, 5)))]
    filters = [jax.ShapeDtypeStruct((3, 3, a, b), jnp.float32) for a, b in itertools.pairwise(widths)]
    images = jax.ShapeDtypeStruct((int(rng.choice([16, 32])), 32, 32, 3), jnp.float32)

    def loss(filters, x):
        for w in filters:
            x = jnp.tanh(ghost_cases.conv(x, w))
        return jnp.sum(x)

    def ordinary(filters, images):
        return jax.grad(lambda w: jnp.mean(jax.vmap(loss, (None, 0))(w, images)))(filters)

    def clipped(filters, images):
        return dpopt.per_example_grads(loss)(filters, images, mask=None).clipped_sum(dpopt.LayerwiseClip(1.0)).sum

    with jax.numpy_rank_promotion("allow"):
        assert planned(clipped, filters, images) <= 1.25 * planned(ordinary, filters, images)


BARRIERS = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA drops barriers too early on CPUs")


@pytest.mark.slow
@BARRIERS
def test_norms_under_a_diagonal_hold_what_one_parameter_needs(monkeypatch):
    """Neither formed gradients nor the squared diagonals of all parameters are in memory together.

    (In a chain of layers XLA never keeps them; in a Transformer whose layers read one another it does.)"""
    from benchmarks.zoo.registry import ZOO  # imports every framework

    with jax.numpy_rank_promotion("allow"):
        loss, params, batch = ZOO["T5 (linen)"].build()[:3]

    def of_program():
        clipped = lambda p, b, s: ghost.clipped_sum(loss, p, b, coefficients=flat_clip(0.7), scale=s).sum  # noqa: E731
        with jax.numpy_rank_promotion("allow"):
            return planned(clipped, params, batch, params)

    found = of_program()
    monkeypatch.setattr(leaf_norms, "_LARGE_BYTES", 1 << 40)
    assert found < 0.75 * of_program()


@pytest.mark.slow
@BARRIERS
def test_rare_examples_hold_one_large_gradient_at_a_time(monkeypatch):
    filters = [jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.float32)] * 8
    images = jax.ShapeDtypeStruct((2, 6, 6, 128), jnp.float32)

    def loss(filters, x):
        for w in filters:
            x = jnp.tanh(ghost_cases.conv(x, ghost_cases.standardized(w)))
        return jnp.sum(x)

    def of_program():
        clipped = lambda p, b: ghost.clipped_sum(loss, p, b, coefficients=flat_clip(0.7)).sum  # noqa: E731
        with jax.numpy_rank_promotion("allow"):
            return planned(clipped, filters, images)

    found = of_program()
    monkeypatch.setattr(one_by_one, "_LARGE", 1 << 40)
    assert found < 0.8 * of_program()


def test_records_in_bfloat16_take_float32_on_a_cpu():
    """Which computes in float32 and keeps that."""
    half = jnp.bfloat16
    w, x = jax.ShapeDtypeStruct((8, 5), jnp.float32), jax.ShapeDtypeStruct((3, 8), jnp.float32)

    def recorded():
        loss = lambda w, x: jnp.sum((x.astype(half) @ w.astype(half)).astype(jnp.float32) ** 2)  # noqa: E731
        (contact,) = trace_loss(loss, w, x).contacts
        return memory._recorded_bytes(contact)

    assert recorded() == 4 * 3 * (8 + 5)
    with emulated_gpu():
        assert recorded() == 2 * 3 * (8 + 5)


def _convolved(params, x):
    for w in params:
        x = jnp.tanh(jax.lax.conv(x[None], w, (1, 1), "SAME")[0])
    return jnp.sum(x)


def _unrolled(params, x):
    for w in params:
        for _ in range(3):
            x = jnp.tanh(x @ w)
    return jnp.sum(x)


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize(
    "loss, weights, inputs",
    [
        (_convolved, [(24, 12, 3, 3), (12, 24, 3, 3)], (256, 12, 8, 8)),
        (_unrolled, [(256, 256)] * 2, (16, 35, 256)),
    ],
    ids=["single", "several uses"],
)
def test_gradients_that_are_kept_where_there_is_room_take_no_more_than_is_counted_for_them(loss, weights, inputs, kept):
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in weights]
    batch = jax.ShapeDtypeStruct(inputs, jnp.float32)
    plan = ghost.plan_clipped_sum(loss, params, batch)
    counted = kept * batch.shape[0] * 4 * params[0].size
    allowed = int(memory.estimate(plan).recorded(1)) + counted + 1
    way = ghost.choose(plan, allowed, may_split=False, may_vmap=False)
    assert len(way.plan.kept) == kept

    def clipped(plan):
        return lambda params, batch: ghost.clipped_sum(loss, params, batch, coefficients=flat_clip(1.0), plan=plan).sum

    assert scratch(clipped(way.plan), params, batch) <= scratch(clipped(plan), params, batch) + counted
