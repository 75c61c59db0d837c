"""A batch processed in parts: how many, and that nothing else changes."""

import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import assert_trees_close

import dpopt
from dpopt import ghost
from dpopt.engines import promises
from dpopt.ghost import memory, splitting
from dpopt.ghost import plan as planning

PROCESSORS = splitting._processors  # before all tests plan as on two
CLIP = dpopt.FlatClip(0.5)


@pytest.fixture
def small_batches_split(monkeypatch):
    for name in ("_WHOLE_BYTES", "_START_BYTES"):
        monkeypatch.setattr(splitting, name, 0)
    monkeypatch.setattr(splitting, "CACHED_BYTES", 1)


def loss_fn(params, example):
    x, target = example
    h = jnp.tanh(ghost_cases.conv(x, params["w"], strides=2) + params["b"][None, None])
    loss = jnp.mean((jnp.mean(h, axis=(0, 1)) - target) ** 2)
    return loss, {"prediction": h[0, 0]}


def inputs():
    a = ghost_cases.Arrays()
    return {"w": a(3, 3, 2, 4), "b": a(4)}, (a(12, 9, 9, 2), a(12, 4))


def loops(function, *args):
    """Lengths of the top-level loops of a program in which the model is run."""
    eqns = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return [
        e.params["length"]
        for e in eqns
        if e.primitive.name == "scan" and "conv_general_dilated" in str(e.params["jaxpr"])
    ]


def clipped(params, batch, mask=None, clip=CLIP, **options):
    grads = dpopt.per_example_grads(loss_fn, has_aux=True, **options)(params, batch, mask=mask)
    grads = grads.scale(jax.tree.map(lambda p: p**2 + 0.1, params))
    return (grads.shift(params) if clip is CLIP else grads).clipped_sum(clip)


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches_split")
@pytest.mark.parametrize("clip, parts", [(CLIP, 6), (dpopt.LayerwiseClip(0.5), 3)], ids=["recorded", "one pass"])
def test_parts_equal_the_whole(clip, parts, x64, monkeypatch):
    """Sum, norms, losses, aux, and the flags of padding and of a gradient that is not finite."""
    monkeypatch.setattr(memory, "_SMALL_BYTES", 0)
    params, (x, target) = inputs()
    batch = np.where(np.arange(12)[:, None, None, None] == 5, np.nan, x), target
    mask = np.arange(12) != 7
    assert loops(lambda p, b: clipped(p, b, mask, clip, engine="ghost"), params, batch) == [parts]
    got, want = (
        jax.device_get(jax.jit(lambda p, b, engine=engine: clipped(p, b, mask, clip, engine=engine))(params, batch))
        for engine in ("ghost", "vmap")
    )
    finite = np.flatnonzero(np.arange(12) != 5)
    assert_trees_close(got.sum, want.sum, 1e-9)
    pick = lambda r: [x[finite] for x in (r.sensitive.losses, r.sensitive.norms, r.sensitive.aux["prediction"])]  # noqa: E731
    assert_trees_close(pick(got), pick(want), 1e-9)
    for name in ("is_example", "is_finite", "was_clipped"):
        np.testing.assert_array_equal(getattr(got.sensitive, name), getattr(want.sensitive, name))
    assert not got.sensitive.is_finite[5] and got.sensitive.is_finite[7]


@pytest.mark.usefixtures("small_batches_split")
def test_a_requested_microbatch_size_is_used():
    params, batch = inputs()
    run = lambda size: loops(lambda p, b: clipped(p, b, engine="ghost", microbatch_size=size), params, batch)  # noqa: E731
    assert run(12) == [] and run(3) == [4] and run(5) == [3]


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches_split")
def test_outside_jit_the_batch_is_whole(monkeypatch):
    params, batch = inputs()
    want = jax.jit(lambda p, b: clipped(p, b, engine="ghost"))(params, batch).sum
    monkeypatch.setattr(ghost.Plan, "parts", property(lambda self: pytest.fail("parts was read")))
    assert_trees_close(clipped(params, batch, engine="ghost").sum, want, 1e-5)


@pytest.mark.usefixtures("small_batches_split")
def test_auto_decides_for_the_batch_not_for_its_parts(monkeypatch):
    """The gradients of a part may be negligible where those of the batch are not."""
    params, batch = inputs()
    formed = 12 * sum(x.nbytes for x in jax.tree.leaves(params))
    monkeypatch.setattr(planning, "TINY_BYTES", formed // 2)
    monkeypatch.setattr(planning, "MARGIN", np.inf)
    plan = ghost.plan_clipped_sum(loss_fn, params, batch, has_aux=True)
    assert not plan.prefers_vmap and plan.of(2).prefers_vmap
    monkeypatch.setattr(promises.stacked, "clip_stacked", lambda *_: pytest.fail("vmap was chosen"))
    assert loops(lambda p, b: clipped(p, b, engine="auto"), params, batch) == [6]


@pytest.mark.usefixtures("small_batches_split")
@pytest.mark.parametrize("batch_size", [12, 24, 30])
def test_every_part_has_as_many_examples_on_each_device(monkeypatch, batch_size):
    plan = ghost.plan_clipped_sum(loss_fn, *inputs(), has_aux=True).of(batch_size)
    found = {}
    for devices in range(1, batch_size + 2):
        monkeypatch.setattr(jax, "device_count", lambda devices=devices: devices)
        found[devices] = plan.parts
    split = {devices: parts for devices, parts in found.items() if parts > 1}
    assert all(batch_size % (devices * parts) == 0 for devices, parts in split.items())
    assert len(split) > 2


@pytest.mark.usefixtures("small_batches_split")
def test_accelerators_take_the_batch_whole(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert ghost.plan_clipped_sum(loss_fn, *inputs(), has_aux=True).parts == 1


def parts(features, positions, batch_size):
    params = jnp.zeros((features, features))
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))  # noqa: E731
    return ghost.plan_clipped_sum(
        loss, params, jax.ShapeDtypeStruct((batch_size, positions, features), jnp.float32)
    ).parts


def test_how_many():
    """A / k + (k + 1) P bytes are touched by k parts: A from the activations, P from the parameters."""
    assert parts(features=64, positions=8, batch_size=32) == 1  # fits a cache
    assert parts(features=2048, positions=1, batch_size=4096) == 1  # 67 MB of activations to 17 MB of parameters
    assert parts(features=2048, positions=1, batch_size=8192) == 2  # 134 MB to 17 MB
    assert parts(features=128, positions=1024, batch_size=64) == 16  # 67 MB to 66 KB; a part of 4 MB is small enough
    assert parts(features=128, positions=1024, batch_size=61) == 1  # 61 has no divisor


@pytest.mark.parametrize("processors, most", [(1, 16), (16, 4), (48, 1), (200, 1)])
def test_no_processor_is_left_without_an_example(processors, most, monkeypatch):
    monkeypatch.setattr(splitting, "_processors", lambda: processors)
    assert parts(features=128, positions=1024, batch_size=64) == most


@pytest.mark.parametrize("available", [2, 48])
def test_processes_of_machines_that_differ_plan_alike(monkeypatch, available):
    monkeypatch.setattr(splitting, "_processors", PROCESSORS)
    monkeypatch.setattr(splitting.os, "sched_getaffinity", lambda _: range(available), raising=False)
    few = {2: 16, 48: 1}[available]
    assert parts(features=128, positions=1024, batch_size=64) == few
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert parts(features=128, positions=1024, batch_size=64) == 16


@pytest.mark.parametrize("batch_size", [2, 4, 6])
def test_small_batches_go_in_the_fewest_parts_that_fit(monkeypatch, batch_size):
    """Parts of one example each cost less than a second pass here: it has much to compute for every parameter."""
    monkeypatch.setattr(memory, "_SMALL_BYTES", 0)

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    shapes = [jnp.zeros((64, 64))] * 8, jax.ShapeDtypeStruct((batch_size, 1024, 64), jnp.float32)
    plan = ghost.plan_clipped_sum(loss, *shapes)
    way = ghost.choose(plan, 1.25, may_split=True, may_vmap=False)
    assert way.parts == 2 and not way.plan.streamed


def test_a_long_loop_costs_its_steps():
    """The same activations and parameters, but each part repeats every step of the loop."""

    def recurrent(w, x):
        return jnp.sum(jax.lax.scan(lambda h, y: (jnp.tanh(h @ w + y), None), x[0], x)[0])

    def parallel(w, x):
        return jnp.sum(jnp.tanh(x @ w + x))

    x = jax.ShapeDtypeStruct((128, 2048, 64), jnp.float32)
    looped, whole = (ghost.plan_clipped_sum(f, jnp.zeros((64, 64)), x).parts for f in (recurrent, parallel))
    assert 1 < looped < whole


def test_explain_says_so(capsys):
    model = lambda w, x: jnp.sum(jnp.tanh(x @ w))  # noqa: E731
    ghost.explain(model, jnp.zeros((128, 128)), jnp.zeros((1024, 128)), batch_size=64)
    assert "16 parts of 4" in capsys.readouterr().out
    clip = dpopt.LayerwiseClip(1.0)
    ghost.explain(model, jnp.zeros((128, 128)), jnp.zeros((1024, 128)), batch_size=64, clip=clip)
    assert "ghost in one pass over each of 8 parts" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("image, kernel", [("NHWC", "HWIO"), ("NCHW", "OIHW")])
def test_convolutions_in_a_loop_are_channels_last(image, kernel, x64):
    """XLA does not change their layout there, and its CPU backend is fast only for this one."""
    a = ghost_cases.Arrays()
    shape = dict(zip("HWIO", (3, 3, 2, 4), strict=True)), dict(zip("HWIO", (3, 3, 4, 3), strict=True))
    params = [a(*(sizes[axis] for axis in kernel)) for sizes in shape]
    batch = a(6, *(dict(zip("HWC", (9, 9, 2), strict=True))[axis] for axis in image[1:]))

    def loss(params, x):
        x = x[None]
        for w, stride in zip(params, (1, 2), strict=True):
            strides = (stride, stride)
            x = jnp.tanh(jax.lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=(image, kernel, image)))
        return jnp.sum(x)

    def two_steps(engine):
        def step(params, x):
            total = dpopt.per_example_grads(loss, engine=engine)(params, x, mask=None).clipped_sum(CLIP).sum
            return jax.tree.map(jnp.subtract, params, total), None

        return jax.jit(lambda p, x: jax.lax.scan(step, p, jnp.stack([x, -x]))[0])

    text = two_steps("ghost").lower(params, batch).as_text()
    orders = [
        line.split("dim_numbers = ")[1].split(", window")[0] for line in text.splitlines() if "convolution(" in line
    ]
    assert len(orders) >= 3 and set(orders) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    assert_trees_close(two_steps("ghost")(params, batch), two_steps("vmap")(params, batch), 1e-9)
