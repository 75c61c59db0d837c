"""State space models of long sequences."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import labels, next_token, normal
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen, of_nnx
from benchmarks.zoo.layers import cross_entropy, haiku_layer_norm
from benchmarks.zoo.long_convolutions import fft_convolved


class _S4DLayer(nn.Module):
    """Diagonal complex states; the sequence is convolved with their impulse response."""

    states: int = 32

    @nn.compact
    def __call__(self, x):
        length, width = x.shape
        log_step = self.param("log_dt", lambda key: jax.random.uniform(key, (width,), minval=-6.9, maxval=-2.3))
        log_real = self.param("log_A_real", nn.initializers.constant(np.log(0.5)), (width, self.states))
        imaginary = self.param("A_imag", lambda key: jnp.tile(np.pi * jnp.arange(self.states), (width, 1)))
        c = self.param("C", nn.initializers.normal(0.5**0.5), (width, self.states, 2))
        skip = self.param("D", nn.initializers.normal(1.0), (width,))
        a = lax.complex(-jnp.exp(log_real), imaginary)
        step = jnp.exp(log_step)[:, None]
        weights = lax.complex(c[..., 0], c[..., 1]) * (jnp.exp(a * step) - 1.0) / a
        powers = jnp.exp((a * step)[..., None] * jnp.arange(length))
        filters = 2 * jnp.einsum("hn,hnl->lh", weights, powers).real
        y = nn.gelu(fft_convolved(x, filters) + x * skip)
        value, gate = jnp.split(nn.Dense(2 * width)(y), 2, -1)
        return value * nn.sigmoid(gate)


class _S4D(nn.Module):
    width: int = 96
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        for _ in range(self.depth):
            x = x + nn.vmap(_S4DLayer, variable_axes={"params": None}, split_rngs={"params": False})()(
                nn.LayerNorm()(x)
            )
        return nn.Dense(10)(x.mean(1))


@model("S4D", "linen", "state-spaces/s4")
def s4d() -> Family:
    return of_linen(_S4D(), cross_entropy, normal(8, 256, 1), labels(10, 8))


def _scan_states(decay, inputs):
    """States ``h_t = decay_t h_(t-1) + inputs_t``, by a parallel scan over time."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (decay, inputs))[1]


class _S5Layer(eqx.Module):
    """One system with many inputs: diagonal complex states, computed by an associative scan."""

    spectrum: jax.Array
    b: jax.Array
    c: jax.Array
    skip: jax.Array
    log_step: jax.Array
    norm: eqx.nn.LayerNorm
    gate: eqx.nn.Linear

    def __init__(self, width, states, *, key):
        keys = jax.random.split(key, 4)
        self.spectrum = jnp.stack([-0.5 * jnp.ones(states), np.pi * jnp.arange(states)], -1)
        self.b = jax.random.normal(keys[0], (states, width, 2)) / width**0.5
        self.c = jax.random.normal(keys[1], (width, states, 2)) / states**0.5
        self.skip = jnp.ones(width)
        self.log_step = jax.random.uniform(keys[2], (states,), minval=-6.9, maxval=-2.3)
        self.norm, self.gate = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, width, key=keys[3])

    def __call__(self, x):
        spectrum, b, c = (lax.complex(p[..., 0], p[..., 1]) for p in (self.spectrum, self.b, self.c))
        u = jax.vmap(self.norm)(x)
        decay = jnp.exp(spectrum * jnp.exp(self.log_step))
        b = ((decay - 1) / spectrum)[:, None] * b
        driven = jax.vmap(lambda u: b @ u.astype(b.dtype))(u)
        states = _scan_states(jnp.broadcast_to(decay, driven.shape), driven)
        y = jax.nn.gelu(jax.vmap(lambda s: 2 * (c @ s).real)(states) + self.skip * u)
        return x + y * jax.nn.sigmoid(jax.vmap(self.gate)(y))


@model("S5", "equinox", "lindermanlab/S5")
def s5() -> Family:
    keys = jax.random.split(KEY, 4)
    net = (
        eqx.nn.Linear(2, 96, key=keys[0]),
        [_S5Layer(96, 64, key=k) for k in keys[1:3]],
        eqx.nn.Linear(96, 10, key=keys[3]),
    )

    def loss(net, example):
        encoder, layers, decoder = net
        x = jax.vmap(encoder)(example[0])
        for layer in layers:
            x = layer(x)
        return cross_entropy(decoder(x.mean(0)), example[1])

    return of_equinox(net, loss, (normal(8, 256, 2), labels(10, 8)))


@model("LRU", "haiku", "NicolasZucchet/minimal-LRU")
def lru() -> Family:
    """Linear recurrent units; the eigenvalues are moduli and phases inside the unit circle."""
    width, states = 96, 96

    class _Layer(hk.Module):
        def __call__(self, x):
            uniform, normal_ = hk.initializers.RandomUniform, hk.initializers.RandomNormal
            nu = hk.get_parameter("nu_log", (states,), init=uniform(-4.0, -1.0))
            theta = hk.get_parameter("theta_log", (states,), init=uniform(-3.0, 1.0))
            modulus = jnp.exp(-jnp.exp(nu))
            decay = modulus * jnp.exp(1j * jnp.exp(theta))
            scale = jnp.log(jnp.sqrt(1 - modulus**2))
            gamma = hk.get_parameter("gamma_log", (states,), init=lambda shape, dtype: scale)
            b_re, b_im = (hk.get_parameter(n, (states, width), init=normal_(0.07)) for n in ("B_re", "B_im"))
            c_re, c_im = (hk.get_parameter(n, (width, states), init=normal_(0.1)) for n in ("C_re", "C_im"))
            skip = hk.get_parameter("D", (width,), init=normal_())
            driven = x @ ((b_re + 1j * b_im) * jnp.exp(gamma)[:, None]).T
            h = _scan_states(jnp.tile(decay[None], (len(x), 1)), driven)
            return (h @ (c_re + 1j * c_im).T).real + skip * x

    def loss(example):
        x = hk.Linear(width)(example[0])
        for _ in range(2):
            y = jax.nn.gelu(_Layer()(haiku_layer_norm(x)))
            x = x + hk.Linear(width)(y) * jax.nn.sigmoid(hk.Linear(width)(y))
        return cross_entropy(hk.Linear(10)(x.mean(0)), example[1])

    return of_haiku(loss, (normal(8, 256, 2), labels(10, 8)))


class _MambaBlock(nnx.Module):
    """A scan whose step sizes, input matrices and output matrices depend on the input."""

    def __init__(self, width: int, states: int = 16, rank: int = 8, *, rngs: nnx.Rngs):
        inner = 2 * width
        self.rank, self.states = rank, states
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.inputs = nnx.Linear(width, 2 * inner, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(inner, inner, (4,), padding="CAUSAL", feature_group_count=inner, rngs=rngs)
        self.selection = nnx.Linear(inner, rank + 2 * states, use_bias=False, rngs=rngs)
        self.step = nnx.Linear(rank, inner, rngs=rngs)
        self.log_a = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1))))
        self.skip = nnx.Param(jnp.ones(inner))
        self.outputs = nnx.Linear(inner, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h, gate = jnp.split(self.inputs(self.norm(x)), 2, -1)
        h = nnx.silu(self.conv(h))
        step, b, c = jnp.split(self.selection(h), [self.rank, self.rank + self.states], -1)
        step = nnx.softplus(self.step(step))
        decay = jnp.exp(step[..., None] * -jnp.exp(self.log_a[...]))
        driven = (step * h)[..., None] * b[:, :, None]

        def advance(state, inputs):
            decay, driven, c = inputs
            state = decay * state + driven
            return state, jnp.einsum("bds,bs->bd", state, c)

        by_time = (jnp.moveaxis(z, 1, 0) for z in (decay, driven, c))
        _, y = lax.scan(advance, jnp.zeros_like(driven[:, 0]), tuple(by_time))
        y = jnp.moveaxis(y, 0, 1) + h * self.skip[...]
        return x + self.outputs(y * nnx.silu(gate))


class _Mamba(nnx.Module):
    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([_MambaBlock(width, rngs=rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(self.norm(x))


@model("Mamba", "nnx", "state-spaces/mamba")
def mamba() -> Family:
    return of_nnx(_Mamba(2048, 128, rngs=nnx.Rngs(0)), cross_entropy, *next_token(2048, 4, 64))
