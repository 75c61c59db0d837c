"""Faults of tracing: equations that sums are pulled back through, values of any dtype, rows that read each other."""

import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dpopt
import dpopt.flax
from dpopt.engines import fallback

RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(4, 4)), RNG.normal(size=(5, 3, 4))
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@pytest.fixture(autouse=True)
def _warn_again():
    fallback._warned.clear()


@jax.custom_vjp
def clip_gradient(x):
    return x


@jax.custom_vjp
def cubed(x):
    return x


@jax.custom_jvp
def odd(x):
    return x**2


clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
cubed.defvjp(lambda x: (x, None), lambda _, g: (g**3,))
odd.defjvp(lambda x, t: (x[0] ** 2, 5 * x[0] * t[0]))


def clipped(loss, params, batch, clip_norm=1.0, engine="ghost", mask=None, jit=True):
    def run(params, batch, mask):
        promise = dpopt.per_example_grads(loss, engine=engine)(params, batch, mask=mask)
        return promise.clipped_sum(dpopt.FlatClip(clip_norm))

    return (jax.jit(run) if jit else run)(params, batch, mask)


def assert_as_one_by_one(loss, w=W, batch=X, rtol=1e-12, jit=True):
    """Compares the ghost engine's norms and sum with gradients that NumPy sums in float64."""
    dtype = w.dtype
    w, batch = jnp.asarray(w), jnp.asarray(batch)
    rows = range(len(batch))
    gradient = (
        jax.jit(jax.grad(loss)).lower(w, batch[0]).compile(compiler_options=FAST_COMPILE) if jit else jax.grad(loss)
    )
    grads = np.stack([np.asarray(gradient(w, batch[i]), np.float64) for i in rows])
    norms = np.sqrt(np.sum(grads**2, axis=(1, 2)))
    clip_norm = float(np.median(norms)) or 1.0
    want = np.tensordot(np.minimum(1, clip_norm / np.maximum(norms, 1e-300)), grads, 1)

    def run(w, batch):
        got = clipped(loss, w, batch, clip_norm, jit=False)
        return got.sum, got.sensitive.norms

    total, found = (jax.jit(run).lower(w, batch).compile(compiler_options=FAST_COMPILE) if jit else run)(w, batch)
    assert total.dtype == dtype
    np.testing.assert_allclose(found, norms, rtol=rtol, atol=rtol * max(norms.max(), 1e-3))
    np.testing.assert_allclose(total, want, rtol=rtol, atol=rtol * max(np.abs(want).max(), 1e-3))


# Steps from parameter to contact, each of a square matrix.
STEPS = {
    "custom_vjp": clip_gradient,
    "custom_vjp in jit": jax.jit(clip_gradient),
    "custom_vjp in remat": jax.checkpoint(lambda w: 2 * cubed(w)),
    "custom_vjp in scan": lambda w: lax.scan(lambda h, r: (clip_gradient(h * r[None]), None), w, w)[0],
    "custom_vjp in cond": lambda w: lax.cond(w[0, 0] > 0, lambda w: 2 * clip_gradient(w), jnp.sin, w),
    "custom_jvp": odd,
    "custom_jvp in scan": lambda w: lax.scan(lambda h, r: (odd(h * r[None]), None), w, w)[0],
    "complex": lambda w: jnp.real(jnp.fft.ifft(jnp.fft.fft(w) * jnp.exp(1j * w))),
    "complex in cond": lambda w: lax.cond(w[0, 0] > 0, lambda w: jnp.abs(lax.complex(w, w.T)), jnp.sin, w),
    "int cast": lambda w: w - w.astype(jnp.int32).astype(w.dtype),
    "quantised": lambda w: w + lax.stop_gradient(jnp.round(7 * w).astype(jnp.int8).astype(w.dtype) / 7 - w),
    "mask": lambda w: w * (w > 0).astype(jnp.int32),
    "sorted": lambda w: w[jnp.argsort(w[:, 0])],
    "interpolated": lambda w: (lambda i: jnp.sin(jnp.arange(9.0))[i] * (w - i) + i)(jnp.floor(w).astype(jnp.int32)),
    "scan": lambda w: lax.scan(lambda h, r: (jnp.tanh(h * r[None]), None), w, w)[0],
    "remat": jax.checkpoint(jnp.sin),
    "relu": jax.nn.relu,
    "solve": lambda w: jnp.linalg.solve(w + 3 * jnp.eye(4), w),
    "user's solve": lambda w: lax.custom_linear_solve(
        lambda v: 2 * v, w, lambda _, b: b / 2, lambda _, b: jnp.clip(b, -0.1, 0.1)
    ),
}
# Where a weight meets the example, x of shape (3, 4).
CONTACTS = {
    "dense": lambda w, x: jnp.sum(jnp.sin(x @ w)),
    "vector": lambda w, x: jnp.sum(jnp.sin(x[0] @ w)),
    "bias": lambda w, x: jnp.sum(jnp.sin(x @ x.T @ x + w[:3])),
    "look-up": lambda w, x: jnp.sum(jnp.sin(w[jnp.argsort(x[0])])),
    "layers": lambda w, x: jnp.sum(lax.scan(lambda h, r: (jnp.sin(h * r[None]), None), x, w)[0]),
    "time": lambda w, x: jnp.sum(lax.scan(lambda h, u: (jnp.tanh(h @ w + u), None), x[0], x)[0]),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: jnp.sum(jnp.sin(x @ w)), lambda w: jnp.sum(w**2), w),
    "complex": lambda w, x: jnp.sum(jnp.abs(jnp.fft.fft(x, axis=1) @ lax.complex(w, w.T)) ** 2),
    "remat": lambda w, x: jax.checkpoint(lambda w: jnp.sum(jnp.sin(x @ clip_gradient(w))))(w),
    "twice": lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w) @ cubed(w))),
}


def programs(count):
    """Combinations with every step at least once, some after other steps, and the contacts in turn."""
    rng, names, contacts = np.random.default_rng(1), list(STEPS), list(CONTACTS)
    for i in range(count):
        steps = [*rng.choice(names, rng.integers(0, 2)), names[i % len(names)]]
        yield (*steps, contacts[i % len(contacts)])


@pytest.mark.parametrize("names", slow_unless([*programs(30)][::2], programs(30)), ids=" - ".join)
@pytest.mark.one_in(15)
def test_ghost_follows_prologues_of_all_kinds(names, x64):
    *steps, contact = names

    def loss(w, x):
        for step in steps:
            w = STEPS[step](w)
        return CONTACTS[contact](w, x)

    assert_as_one_by_one(loss)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_customvjp(engine):
    """The backward rule gets one example's cotangent, never the sum of a batch."""
    batch = np.full((65, 10), 0.3, np.float32)

    def total(mask):
        return clipped(lambda w, x: cubed(w) @ x, jnp.zeros(10), batch, engine=engine, mask=jnp.asarray(mask)).sum

    moved = total(np.ones(65, bool)) - total(np.arange(65) > 0)
    np.testing.assert_allclose(moved, 0.3**3, rtol=1e-3)


def test_customvjp_with_hidden_transpose(x64):
    """A custom_jvp may hide a linear operation that has the user's transpose and no batching rule."""
    linear_call = jax.custom_derivatives.linear_call

    @jax.custom_jvp
    def hidden(x):
        return x

    @hidden.defjvp
    def _(x, t):
        return x[0], linear_call(lambda _, t: t, lambda _, ct: jnp.clip(ct, -0.1, 0.1), (), t[0])

    with pytest.warns(UserWarning, match="one example after the other"):
        assert_as_one_by_one(lambda w, x: jnp.sum(jnp.sin(x @ hidden(w))))


COMPLEX = {
    "long convolution": lambda w, x: jnp.sum(jnp.fft.irfft(jnp.fft.rfft(w) * jnp.fft.rfft(x[:1])) ** 2),
    "a complex weight": lambda w, x: jnp.sum(jnp.abs(x @ lax.complex(w, w.T)) ** 2),
    "phases": lambda w, x: jnp.sum(jnp.real(jnp.exp(1j * w[:3]) * x)),
    "diagonal recurrence": lambda w, x: jnp.sum(
        jnp.abs(
            lax.scan(
                lambda h, u: (h * jnp.exp(lax.complex(-jnp.abs(w[0]), w[1])) + u, None), jnp.zeros(4, complex), x + 0j
            )[0]
        )
        ** 2
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("loss", COMPLEX.values(), ids=COMPLEX)
def test_complex_prologue(loss, x64):
    assert_as_one_by_one(loss)


def test_f64_params_f32_compute(x64):
    assert_as_one_by_one(lambda w, x: jnp.sum((x.astype(jnp.float32) @ w.astype(jnp.float32)) ** 2), rtol=1e-6)


LOW = {  # and the tolerance: JAX rounds cotangents, the engine does not
    "float8 fake": (lambda w, x: jnp.sum(x @ w.astype(jnp.float8_e4m3fn).astype(w.dtype)), 0.05),
    "int4": (
        lambda w, x: jnp.sum(x @ (w + lax.stop_gradient(jnp.round(w).astype(jnp.int4).astype(w.dtype) - w))),
        1e-5,
    ),
    "float16": (lambda w, x: jnp.sum(x @ w.astype(jnp.float16).astype(w.dtype)), 1e-3),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("loss", "rtol"), LOW.values(), ids=LOW)
def test_fp8(loss, rtol):
    assert_as_one_by_one(loss, W.astype(np.float32), X.astype(np.float32), rtol)


def test_fp8_products_fall_back():
    def loss(w, x):
        w, x = (a.astype(jnp.float8_e4m3fn) for a in (w, x))
        return jnp.sum(lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32))

    with pytest.warns(UserWarning, match="Falling back"):
        assert_as_one_by_one(loss, W.astype(np.float32), X.astype(np.float32), rtol=1e-5)


@pytest.mark.slow
def test_sixteen_bits_lose_nothing_of_a_sum():
    """The prologue computes in bfloat16, and a sum of 512 that is pulled back in bfloat16 loses ones."""
    batch = np.ones((513, 2), np.float32)

    def loss(w, x):
        return jnp.sum((2 * w.astype(jnp.bfloat16)).astype(jnp.float32) * x)

    for step in (loss, lambda w, x: jnp.sum(lax.reduce_precision(w, 8, 2) * x)):
        whole, less = (clipped(step, jnp.ones(2), batch[:n], clip_norm=2**0.5).sum for n in (513, 512))
        np.testing.assert_allclose(whole - less, 1, rtol=1e-3)


def reference(w, x):
    kept = jax.new_ref(jnp.zeros((3, 4), w.dtype))
    kept[...] = x @ w
    return jnp.sum(jnp.sin(kept[...]))


def callback(w, x):
    doubled = io_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)
    return jnp.sum(jnp.sin(doubled @ w))


def one_at_a_time(w, x):
    """``custom_vmap`` passes all rows at once to its rule, which might mix them."""

    @jax.custom_batching.custom_vmap
    def centred(x):
        return x

    centred.def_vmap(lambda _, batched, x: (x - jnp.mean(x, 0, keepdims=True), batched[0]))
    return jnp.sum(jnp.sin(centred(x) @ w))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", [reference, callback, one_at_a_time], ids=lambda f: f.__name__)
@pytest.mark.parametrize("jit", slow_unless({True}, [False, True]), ids=["eager", "jit"])
def test_refs(loss, jit, x64):
    """The ghost engine falls back to vmap, and vmap to one example after the other."""
    with pytest.warns(UserWarning, match="Falling back|one example after the other"):
        assert_as_one_by_one(loss, jit=jit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        jax.eval_shape(lambda w, x: clipped(loss, w, x), jnp.asarray(W), jnp.asarray(X))


def test_an_error_of_the_loss_reaches_the_user():
    def fails(w, x):
        raise RuntimeError("no such layer")

    def fails_when_differentiated(w, x):
        return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c + w, x)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine in ("ghost", "vmap"):
            with pytest.raises(RuntimeError, match="no such layer"):
                clipped(fails, jnp.ones(2), jnp.ones((3, 2)), engine=engine)
            with pytest.raises(ValueError, match="Reverse-mode"):
                clipped(fails_when_differentiated, jnp.ones(2), jnp.ones((3, 2)), engine=engine)


def test_an_error_of_the_clip_reaches_the_user():
    class Broken:
        sensitivity = 1.0

        def coefficients(self, leaf_norms):
            raise RuntimeError("no such norm")

    @jax.jit
    def clipped(w, x):
        return dpopt.per_example_grads(CONTACTS["dense"], engine="ghost")(w, x, mask=None).clipped_sum(Broken()).sum

    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="no such norm"):
        warnings.simplefilter("error")
        clipped(np.ones((4, 4), np.float32), np.ones((2, 3, 4), np.float32))


def of_batch(w, e):
    return jnp.sum(w * e["x"] * jax.random.bernoulli(e["key"], 0.5, (8,)))


def folded(w, e):
    key = jax.random.fold_in(jax.random.key(0, impl="unsafe_rbg"), e["x"][0].astype(jnp.int32))
    return jnp.sum(
        lax.scan(lambda h, k: (h + jax.random.normal(k, (8,)), None), w * e["x"], jax.random.split(key, 2))[0]
    )


def raw(w, e):
    bits = lax.rng_bit_generator(jnp.full(4, e["x"][0].astype(jnp.uint32)), (8,))[1]
    return jnp.sum(w * (bits >> 31).astype(jnp.float32))


@jax.custom_vjp
def noisy(w, seed):
    return w


def _noisy(seed, g):
    key = jax.random.key(seed.astype(jnp.uint32), impl="rbg")
    return g * jax.random.normal(key, g.shape), None


noisy.defvjp(lambda w, seed: (w, seed), _noisy)
RBG = jax.random.key(0, impl="rbg")
BY_RBG = {
    "a key in the batch": of_batch,
    "a key made from the example": folded,
    "the generator itself": raw,
    "in a backward rule": lambda w, e: jnp.sum(noisy(w, e["x"][0])),
    "in a branch that the example selects": lambda w, e: lax.cond(
        e["x"][0] > 0, lambda key: jnp.sum(w * jax.random.normal(key, (8,))), lambda _: jnp.sum(w), RBG
    ),
}


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
@pytest.mark.parametrize("loss", BY_RBG.values(), ids=BY_RBG)
def test_rbgrows(loss, engine):
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(5, impl="rbg"), i))(jnp.arange(3))
    promise = dpopt.per_example_grads(loss, engine=engine)(
        jnp.zeros(8), {"x": jnp.ones((3, 8)), "key": keys}, mask=None
    )
    for use in (lambda: promise.clipped_sum(dpopt.FlatClip(1.0)), promise.materialize):
        with pytest.raises(TypeError, match="threefry"):
            use()


def test_rbgrows_as_default():
    """A raw key has no record of the generator that it is for."""
    with jax.default_prng_impl("rbg"):
        keys = jax.vmap(jax.random.PRNGKey)(jnp.arange(3))
        with pytest.raises(TypeError, match="threefry"):
            clipped(of_batch, jnp.zeros(8), {"x": jnp.ones((3, 8)), "key": keys})


@pytest.mark.slow
def test_keys_that_keep_rows_apart_are_accepted():
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(5, impl="threefry2x32"), i))(jnp.arange(3))
    batch = {"x": jnp.ones((3, 8)), "key": keys}

    def all_alike(w, e):  # one mask for all examples
        mask = jax.random.bernoulli(jax.random.key(0, impl="rbg"), 0.5, (8,))
        return jnp.sum(lax.scan(lambda h, x: (h + x * mask, None), w, e["x"][None])[0])

    for loss in (of_batch, all_alike):
        got, want = (clipped(loss, jnp.zeros(8), batch, engine=engine) for engine in ("ghost", "vmap"))
        np.testing.assert_allclose(got.sum, want.sum, rtol=1e-6)


def test_draws_of_a_loop_stay_in_the_loop():
    """Outside the loop, vmap would map the rbg keys of the steps, which gives other bits."""

    def loss(w, x):
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
        return jnp.sum(lax.scan(lambda h, k: (jnp.sin(h * w * jax.random.normal(k, (4, 4))), None), x[:1] * w, keys)[0])

    assert_as_one_by_one(loss, W.astype(np.float32), X.astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_multisteps_pmean_over_an_outer_axis(engine):
    def lane(batch):
        return clipped(lambda w, x: w.sum() * (x - lax.pmean(x, "lane")), jnp.zeros(3), batch, engine=engine).sum

    with pytest.raises(ValueError, match="axis lane, which is bound outside"):
        jax.vmap(lane, axis_name="lane")(jnp.array([[1.0, 2.0], [5.0, 9.0]]))


@pytest.mark.parametrize("check_vma", [False, True])
def test_gradients_that_shard_map_adds_up_are_refused(check_vma):
    """With ``check_vma``, JAX sums gradients of unsharded parameters over the axis before any clip."""
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("devices")), out_specs=P(), check_vma=check_vma)
    def total(w, x):
        return lax.psum(clipped(lambda w, x: jnp.sum(w * x), w, x, engine="vmap").sum, "devices")

    if not check_vma:
        np.testing.assert_allclose(total(jnp.zeros(2), jnp.ones((3, 2))), 3 * 0.5**0.5, rtol=1e-5)
        return
    with pytest.raises(ValueError, match="check_vma=False"):
        total(jnp.zeros(2), jnp.ones((3, 2)))


def test_an_axis_bound_inside_the_loss_is_its_own():
    def loss(w, x):
        return jnp.sum(jax.vmap(lambda r: lax.psum(jnp.sin(r @ w), "rows"), axis_name="rows")(x))

    assert_as_one_by_one(loss, W.astype(np.float32), X.astype(np.float32), rtol=1e-5)


def test_a_reference_from_outside_is_refused():
    outside = jax.new_ref(jnp.zeros(()))

    def loss(w, x):
        outside[...] += x[0]
        return jnp.sum(w * x) * outside[...]

    with pytest.raises(ValueError, match="mutable reference"):
        clipped(loss, jnp.ones(2), jnp.ones((3, 2)))


class Model(nnx.Module):
    def __init__(self, kind, rngs):
        self.dense = nnx.Linear(4, 3, rngs=rngs)
        self.layer = nnx.Dropout(0.5, rngs=rngs) if kind == "nnx_rngs" else nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.dense(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind, message",
    [
        ("nnx_rngs", "draws random numbers .* the example has no key"),
        ("nnx_batch_norm", "layers that mix examples: layer"),
    ],
)
def test_nnx_models_that_change_themselves(kind, message):
    model = Model(kind, nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        loss, params = dpopt.flax.nnx_loss(model, lambda m, x: jnp.sum(m(x) ** 2))
        clipped(loss, params, jnp.ones((2, 4)))
    model.eval()
    loss, params = dpopt.flax.nnx_loss(model, lambda m, x: jnp.sum(m(x) ** 2))
    assert jnp.isfinite(clipped(loss, params, jnp.ones((2, 4))).sensitive.norms).all()


def test_a_print_of_parameters_alone_is_followed(x64):
    """It has no outputs."""

    def loss(w, x):
        jax.debug.callback(lambda _: None, w)
        return jnp.sum(jnp.tanh(x @ w))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback warns
        assert_as_one_by_one(loss)
