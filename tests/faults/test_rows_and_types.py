"""Rows that read each other or share their noise, across devices and through callbacks; weak types; empty arrays."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dpopt
from dpopt.engines import fallback

RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(4, 4)), RNG.normal(size=(5, 3, 4))


@pytest.fixture(autouse=True)
def _warn_again():
    fallback._warned.clear()


def clipped(loss, params, batch, clip_norm=1.0, engine="ghost"):
    def run(params, batch):
        promise = dpopt.per_example_grads(loss, engine=engine)(params, batch, mask=None)
        return promise.clipped_sum(dpopt.FlatClip(clip_norm))

    return jax.jit(run)(params, batch)


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
@pytest.mark.parametrize("within", ["the loss", "scan", "custom_vjp"])
def test_a_permutation_over_an_outer_axis(engine, within):
    """JAX records no effect for it, as it does for a sum."""

    def permuted(x):
        return lax.ppermute(x, "lane", [(0, 1), (1, 0)])

    @jax.custom_vjp
    def product(w, x):
        return jnp.sum(w * x)

    product.defvjp(lambda w, x: (jnp.sum(w * x), x), lambda x, y: (y * permuted(x), None))
    losses = {
        "the loss": lambda w, x: jnp.sum(w * permuted(x)),
        "scan": lambda w, x: lax.scan(lambda h, _: (h + jnp.sum(w * permuted(x)), None), 0.0, None, length=2)[0],
        "custom_vjp": product,
    }

    def lane(batch):
        return clipped(losses[within], jnp.zeros(3), batch, engine=engine).sum

    with pytest.raises(ValueError, match="axis lane, which is bound outside"):
        jax.vmap(lane, axis_name="lane")(jnp.ones((2, 2, 3)))


@pytest.mark.slow
def test_an_axis_that_shard_map_binds_inside_the_loss_is_its_own(x64):
    mesh = jax.make_mesh((1,), ("own",), axis_types=(AxisType.Auto,))
    swapped = jax.shard_map(
        lambda x: lax.ppermute(x, "own", [(0, 0)]), mesh=mesh, in_specs=P("own"), out_specs=P("own"), check_vma=False
    )

    def loss(w, x):
        return jnp.sum(jnp.sin(swapped(x @ w)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ghost engine does not follow it
        total = clipped(loss, W, X, clip_norm=1e6).sum
    np.testing.assert_allclose(total, jax.vmap(jax.grad(loss), (None, 0))(W, X).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_callback_that_is_given_all_rows(engine):
    """It may mix them: here it returns their mean. So it is given one row at a time."""
    buffer_callback = pytest.importorskip("jax.experimental.buffer_callback").buffer_callback

    def mean(context, out, x):
        del context
        np.asarray(out)[...] = np.asarray(x).mean(0) if np.ndim(x) > 1 else np.asarray(x)

    def loss(w, x):
        of_host = buffer_callback(mean, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method="broadcast_all")(x)
        return jnp.sum(w * lax.stop_gradient(of_host))

    batch = jnp.array([[1.0, 0.0]] * 4).at[0].set(jnp.array([0.0, -9.0]))
    with pytest.warns(UserWarning, match="one example after the other"):
        total = clipped(loss, jnp.ones(2), batch, engine=engine).sum
    np.testing.assert_allclose(total, [3.0, -1.0], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [False, True])
def test_noise_within_shard_map_is_refused(check_vma):
    """Every device would draw the same noise for its own part."""
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))
    noise = dpopt.add_gaussian_noise(1.0, jax.random.key(0))

    @jax.shard_map(mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=check_vma)
    def noised(total):
        return noise.update(total, noise.init(total))[0]

    with pytest.raises(ValueError, match="within shard_map"):
        jax.jit(noised)(jnp.zeros(4))


def test_parameters_that_vary_over_the_devices_of_shard_map():
    """What a loop carries keeps its type there."""
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("devices")), out_specs=P(), check_vma=True)
    def total(w, x):
        w = lax.pcast(w, "devices", to="varying")
        return lax.psum(clipped(lambda w, x: jnp.sum(w * x), w, x, engine="vmap").sum, "devices")

    np.testing.assert_allclose(total(jnp.zeros(2), jnp.ones((3, 2))), 3 * 0.5**0.5, rtol=1e-5)


WEAK = {name: functools.partial(jnp.full, fill_value=x) for name, x in {"int": 100, "float": 1.5, "bool": True}.items()}


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("weak", WEAK)
@pytest.mark.parametrize("form", ["product", "scan"])
@pytest.mark.slow
def test_arrays_of_weak_types_stay_weak(form, weak, dtype):
    """``jnp.full`` makes them, and what they multiply keeps its dtype: an int8 overflows, a carry fits."""
    batch = {"k": WEAK[weak]((3,)), "x": jnp.arange(6).reshape(3, 2).astype(dtype)}
    params = jnp.ones(2, jnp.float32 if dtype == "int8" else dtype)

    def product(w, e):
        return jnp.sum(w.astype(jnp.float32) * (e["k"] * e["x"]).astype(jnp.float32))

    def scanned(w, e):
        carry, _ = lax.scan(lambda h, _: ((h * e["k"]).astype(h.dtype) * h.dtype.type(1), None), e["x"], None, length=2)
        return jnp.sum(w.astype(jnp.float32) * carry.astype(jnp.float32))

    loss = {"product": product, "scan": scanned}[form]
    expected = jax.vmap(jax.grad(loss), (None, 0))(params, batch).astype(jnp.float32).sum(0)
    for engine in ("ghost", "vmap"):
        total = clipped(loss, params, batch, clip_norm=1e6, engine=engine).sum
        np.testing.assert_allclose(total, expected, rtol=1e-2 if dtype in ("bfloat16", "float16") else 1e-6)


EMPTY = {
    "a matrix without columns": lambda w, x: jnp.sum(jnp.tanh(x @ w) @ jnp.ones((4, 0)) @ w[:0]) + jnp.sum(x @ w),
    "no row": lambda w, x: jnp.sum(jnp.tanh(x @ w)) + jnp.sum(jnp.tanh(x[:0] @ w)),
    "no row, alone": lambda w, x: jnp.sum(jnp.tanh(x[:0] @ w)),
    "no step": lambda w, x: jnp.sum(jnp.sin(lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w[None][:0])[0] @ w)),
    "no window": lambda w, x: (
        jnp.sum(jnp.sin(x @ w)) + jnp.sum(lax.reduce_window(x @ w, -jnp.inf, lax.max, (9, 1), (1, 1), "VALID"))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_scan_over_no_layers(engine):
    params = {"w": W, "layers": np.zeros((0, 4, 4), np.float32)}
    square = jnp.asarray(np.eye(4), jnp.float32)

    def loss(p, x):
        return jnp.sum(jnp.sin(lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x @ square, p["layers"])[0] @ p["w"]))

    clip = dpopt.LayerwiseClip(1.0, scanned={"w": False, "layers": True})
    got = dpopt.per_example_grads(loss, engine=engine)(params, X, mask=None).clipped_sum(clip).sum
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, X)["w"]
    scale = np.minimum(1, 1 / np.linalg.norm(np.asarray(grads).reshape(len(X), -1), axis=1))
    np.testing.assert_allclose(got["w"], np.einsum("b,b...->...", scale, grads), rtol=1e-5, atol=1e-6)
    assert got["layers"].shape == (0, 4, 4)


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("memory", [1.25, 1])
@pytest.mark.parametrize("scale", [None, 1.0, np.full(W.shape, 2.0)], ids=["plain", "number", "diagonal"])
@pytest.mark.one_in(30)
def test_what_is_empty_is_no_reason_to_fall_back(name, memory, scale, x64):
    loss = EMPTY[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jax.jit(
            lambda w, x: (
                dpopt.per_example_grads(loss, engine="ghost", memory=memory)(w, x, mask=None)
                .scale(1.0 if scale is None else scale)
                .clipped_sum(dpopt.FlatClip(1e6))
                .sum
            )
        )
        total = run(W, X)
    expected = jax.vmap(jax.grad(loss), (None, 0))(W, X).sum(0) * (1.0 if scale is None else scale)
    np.testing.assert_allclose(total, expected, rtol=1e-9)


@pytest.mark.parametrize("clip", [dpopt.FlatClip(1.0), dpopt.GroupClip({"a": 1.0, "b": 1.0})], ids=["flat", "group"])
@pytest.mark.parametrize("memory", [1.25, 1])
@pytest.mark.slow
def test_the_sum_of_no_example_is_zero_through_an_infinite_derivative(clip, memory):
    """All gradients of ``a`` are infinite, so that its coefficients are 0, and 0 times infinity is NaN."""
    params = {"a": jnp.array([0.0, 1.0]), "b": jnp.ones(2)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 2)), jnp.float32)

    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ (jnp.sqrt(p["a"])[:, None] * jnp.ones((2, 3))))) + jnp.sum(x * p["b"][None])

    def total(engine):
        grads = dpopt.per_example_grads(loss, engine=engine, memory=memory)
        return jax.jit(lambda p, x: grads(p, x, mask=None).clipped_sum(clip).sum)(params, x)

    found, expected = total("ghost"), total("vmap")
    assert np.asarray(found["a"]).tolist() == [0, 0]
    np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-6)


@pytest.mark.slow
def test_a_rule_of_the_user_s_may_index_constants():
    """The times of an ordinary differential equation, which its own derivative rule reads one by one."""
    w, x = W.astype(np.float32), X.astype(np.float32)

    def loss(w, x):
        return jnp.sum(odeint(lambda y, t, w: jnp.tanh(y @ w), x, jnp.array([0.0, 0.5]), w)[-1])

    total = clipped(loss, w, x, clip_norm=1e6).sum  # warns of no fallback
    np.testing.assert_allclose(total, jax.vmap(jax.grad(loss), (None, 0))(w, x).sum(0), rtol=1e-4)


def test_max_pooling_of_numbers_without_an_infinity():
    """Padding that is NaN in 8 bits would be the largest entry of its window."""
    dtype = jnp.float8_e4m3fn

    def loss(p, x):
        pooled = lax.reduce_window((x * p).astype(dtype), jnp.finfo(dtype).min, lax.max, (2,), (2,), [(0, 1)])
        return jnp.sum(pooled.astype(jnp.float32))

    total = clipped(loss, jnp.ones(3), jnp.array([[1.0, 2.0, 4.0]]), clip_norm=1e3).sum
    np.testing.assert_allclose(total, [0, 2, 4])


@pytest.mark.parametrize(("clip_norm", "gamma"), [(3e37, 1e-2), (1e30, 1e-12), (1.0, 0.0)])
def test_a_traced_clip_norm_that_is_too_large_releases_nothing_that_is_not_finite(clip_norm, gamma):
    rows = jnp.array([[1e-3, 0.0], [1.0, 1.0], [0.0, 0.0]])

    def total(clip_norm, gamma):
        clip = dpopt.clipping.NormalizedClip(clip_norm, gamma=gamma)
        return dpopt.per_example_grads(lambda p, x: jnp.sum(p * x))(jnp.ones(2), rows, mask=None).clipped_sum(clip).sum

    found = jax.jit(total)(clip_norm, gamma)
    assert np.isfinite(found).all() and np.linalg.norm(np.asarray(found, np.float64)) <= 3 * clip_norm * (1 + 1e-6)


_STACKS = {
    "floats": lambda: jnp.array([1.0, 2.0, 3.0]),
    "floats of NumPy": lambda: np.array([1, 2, 3], np.float32),
    "integers": lambda: jnp.zeros(3, jnp.uint32),
    "keys": lambda: jax.random.split(jax.random.key(3), 3),
    "a range": lambda: jnp.arange(3),
}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("reads_weight", [True, False])
@pytest.mark.parametrize("kind", _STACKS)
def test_a_scan_may_read_constants_beside_its_layers(kind, reads_weight):
    """Such as the counts of random draws of NNX: all but ranges made the engine fall back, with an internal error."""
    stack = _STACKS[kind]()

    def number(x):
        return jax.random.uniform(x) if kind == "keys" else jnp.sin(jnp.float32(x))

    def loss(p, x):
        def step(h, own):
            w, s = own
            h = jnp.tanh(h @ (w * number(s) if reads_weight else w))
            return h + jnp.cos(x * number(s)), None

        return jnp.sum(lax.scan(step, x, (p, stack))[0] ** 2)

    params = np.float32(RNG.normal(size=(3, 4, 4)))
    batch = np.float32(X[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = clipped(loss, params, batch).sum
    np.testing.assert_allclose(got, clipped(loss, params, batch, engine="vmap").sum, rtol=1e-5, atol=1e-6)
