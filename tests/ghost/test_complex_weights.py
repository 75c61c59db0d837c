"""Complex weights that are made of real parameters, which the engine meets as real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64
from jax import lax

import dpopt
from dpopt.ghost.trace import trace_loss

CLIPS = [dpopt.FlatClip(0.7), dpopt.LayerwiseClip(0.7)]


def _weight(rng, shape, which):
    """Real parameters, and a weight of that shape that is made of them, mostly a complex one."""
    re, im, scale = (rng.normal(size=s) for s in (shape, shape, (1,) * (len(shape) - 1) + shape[-1:]))
    constant = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    pairs = jnp.stack([jnp.asarray(re), jnp.asarray(im)], -1)
    both = {"re": jnp.asarray(re), "im": jnp.asarray(im)}
    return [
        (both, lambda p: lax.complex(p["re"], p["im"])),
        (both, lambda p: p["re"] + 1j * p["im"]),
        (both, lambda p: p["re"] - 0.5j * p["im"]),
        (both, lambda p: jnp.conj(lax.complex(p["re"].T, p["im"].T)).T),
        (both, lambda p: (p["re"] + 1j * p["im"]) * (2 - 0.5j)),
        (both, lambda p: (p["re"] + 1j * p["im"]) * constant),
        (both, lambda p: -lax.complex(p["im"], p["re"]) / 3),
        (both, lambda p: (p["re"] + 1j * p["im"]) / (1 + 2j)),
        (
            both | {"g": jnp.asarray(scale)},
            lambda p: (p["re"] + 1j * p["im"]) * jnp.exp(p["g"]),
        ),
        (both, lambda p: jnp.exp(p["re"] + 1j * p["im"])),
        ({"w": pairs}, lambda p: p["w"][..., 0] + 1j * p["w"][..., 1]),
        ({"re": both["re"]}, lambda p: p["re"] + 0j),
        ({"im": both["im"]}, lambda p: 1j * p["im"]),
        ({"re": both["re"]}, lambda p: p["re"]),
    ][which % 14]


def _meeting(rng, width, out):
    """A function of ``x`` [T, width] and a weight, and the weight's shape."""
    kind = rng.choice(["matrix", "left", "batched", "filter", "of steps", "over time", "recomputed"])
    shape = {"filter": (2, width, out), "batched": (width, out), "of steps": (3, width, width)}.get(kind, (width, out))
    if kind == "matrix":
        return shape, lambda x, w: x @ w
    if kind == "left":
        return shape, lambda x, w: (w.T @ x.T).T
    if kind == "batched":  # a weight for each frequency
        return shape, lambda x, w: jnp.einsum("ti,io->tio", x, w).sum(-1)
    if kind == "of steps":
        return shape, lambda x, w: lax.scan(lambda h, w: (jnp.tanh(h.real) + h @ w, None), x + 0j, w)[0]
    if kind == "over time":
        start = jnp.zeros(out, complex)
        return shape, lambda x, w: lax.scan(lambda h, x: (0.5 * h + x @ w, h * 1j), start, x + 0j)[1]
    if kind == "recomputed":  # the weight is made outside
        return shape, lambda x, w: jax.checkpoint(lambda x: x @ w)(x)
    numbers = ("NWC", "WIO", "NWC")

    def convolved(x, w):
        x = x.astype(jnp.result_type(x, w))
        return lax.conv_general_dilated(x[None], w.astype(x.dtype), (1,), "SAME", dimension_numbers=numbers)[0]

    return shape, convolved


def _drawn(seed):
    """A loss, its parameters and a batch."""
    rng = np.random.default_rng(seed)
    width, out, size, length = (int(n) for n in rng.integers(1, [5, 5, 7, 4]))
    shape, meet = _meeting(rng, width, out)
    params, weight = _weight(rng, shape, seed)
    params = {**params, "b": jnp.asarray(rng.normal(size=2))}
    is_real, wrapped, ending = rng.random() < 0.4, rng.integers(4), rng.integers(4)

    def applied(params, x):
        w = weight(params)
        h = meet(x, w) + params["b"][0] + 1j * params["b"][1]
        if ending == 0:
            return h.real
        if ending == 1:
            return jnp.abs(h) ** 2
        return (h * jnp.exp(1j * params["b"][0])).imag if ending == 2 else (jnp.fft.fft(h, axis=0) * h).real

    run = [applied, jax.checkpoint(applied), jax.jit(applied), lambda p, x: applied(p, jnp.sin(x))][wrapped]

    def loss_fn(params, example):
        x, y = example
        x = x[..., 0] if is_real else lax.complex(x[..., 0], x[..., 1])
        return jnp.sum(jnp.tanh(run(params, x)) * y)

    x, y = (jnp.asarray(rng.normal(size=(size + 1, *s))) for s in ((length, width, 2), (1, 1)))
    return loss_fn, params, (x, y), rng


@pytest.mark.parametrize("seed", range(280))
@pytest.mark.one_in(280)
def test_exact(seed, monkeypatch):
    """In one pass, two or recorded; also where complex weights stay complex."""
    with enable_x64(True):
        loss_fn, params, batch, rng = _drawn(seed)
        clip = CLIPS[rng.integers(2)]
        scale = (
            jax.tree.map(lambda p: jnp.asarray(rng.uniform(0.1, 2, p.shape)), params) if rng.random() < 0.4 else None
        )
        monkeypatch.setattr("dpopt.ghost.memory._SMALL_BYTES", 0)  # by layer, in one pass
        if rng.random() < 0.5:
            monkeypatch.setattr("dpopt.ghost.memory._recorded", lambda *_: None)  # two passes

        if rng.random() < 0.3:
            monkeypatch.setattr("dpopt.ghost.trace.in_real_numbers", lambda closed, *_: closed)

        def clipped(engine):
            grads = dpopt.per_example_grads(loss_fn, engine=engine)(params, batch, mask=None)
            return (grads if scale is None else grads.scale(scale)).clipped_sum(clip).sum

        found, expected = jax.jit(clipped, static_argnums=0)("ghost"), clipped("vmap")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), found, expected)


@pytest.mark.parametrize("length", [1, 3, 40])
@pytest.mark.slow
def test_a_real_weight_that_meets_complex_numbers(length):
    """Its gradient is the real part of a product: no example's contribution exceeds the clip norm, and none is short.

    (The norms of the products of complex factors are not those of gradients: some were smaller.)"""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, length, 5)).astype(np.float32)
    z, w = jnp.asarray(x[0] + 1j * x[1]), jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)
    grads = dpopt.per_example_grads(lambda w, z: jnp.sum(jnp.abs(z @ w - 1) ** 2), engine="ghost")
    alone = [grads(w, z, mask=jnp.arange(8) == i).clipped_sum(dpopt.FlatClip(1.0)).sum for i in range(8)]
    expected = 2 * np.real(np.einsum("bti,bto->bio", z.conj(), np.asarray(z) @ np.asarray(w) - 1))
    expected /= np.linalg.norm(expected, axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(np.stack(alone), expected, atol=1e-5)


def _contacts(meet, shape):
    """The primitives and the weights' shapes of a loss with a weight of 4 by 3 and a complex example."""
    params, x = {"re": jnp.ones((4, 3)), "im": jnp.ones((4, 3))}, jnp.ones(shape) + 1j
    contacts = trace_loss(lambda p, x: jnp.sum(jnp.abs(meet(p["re"] + 1j * p["im"], x))), params, x).contacts
    return sorted((c.primitive is not None, c.weight.shape) for c in contacts)


def _are_products(meet, shape):
    return [is_product for is_product, _ in _contacts(meet, shape)]


def test_parts_are_weights_of_their_own():
    assert _are_products(lambda w, x: x @ w, (4,)) == [True] * 2
    assert _are_products(lambda w, x: w.T @ x, (4,)) == [True] * 2
    assert _are_products(lambda w, x: (x.real @ w).imag, (4,)) == [True]  # nothing reads the real parts
    assert _are_products(lambda w, x: jnp.tanh(x @ w) @ w.T, (4,)) == [True] * 4
    assert _are_products(lambda w, x: jax.checkpoint(lambda x: jnp.abs(x @ w))(x), (4,)) == [True] * 2


def test_parts_enter_loops():
    def over_time(w, x):
        return lax.scan(lambda h, x: (h + x @ w, None), jnp.zeros(3) + 0j, x)[0]

    def of_steps(w, x):
        return lax.scan(lambda h, w: (h + x @ w, None), jnp.zeros(3) + 0j, w.reshape(2, 2, 3))[0]

    assert _are_products(over_time, (5, 4)) == _are_products(of_steps, (2,)) == [True] * 2


def test_what_data_multiply_entry_by_entry_stays_complex():
    """A gradient of what is broadcast would be larger than one of the weight."""

    def meet(w, x):
        return (lax.complex(x.real, x.imag) * jnp.broadcast_to(w[None], (50, 4, 3))).real

    contacts = _contacts(meet, (50, 4, 3))
    assert contacts == [(False, (4, 3))] * 2
