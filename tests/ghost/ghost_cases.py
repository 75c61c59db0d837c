"""Models that the ghost engine must clip exactly: one function per coverage item of its specification.

Each takes `Arrays` and returns ``(loss_fn, params, batch)``. To test a new rule, add a function and list it in
``CASES``: ``test_exact.py`` runs every case with and without a diagonal, an offset and a mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

B = 5


class Arrays:
    """Seeded random arrays in the default precision."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape):
        return jax.device_put(self.rng.normal(size=shape))  # `jnp.asarray` compiles a program for every shape

    def ids(self, high, *shape):
        return jax.device_put(self.rng.integers(0, high, shape))


def conv(x, w, strides=1, groups=1, padding="SAME", dilation=1, lhs_dilation=1):
    n = w.ndim - 2
    spec = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[n]
    return lax.conv_general_dilated(
        x[None], w, (strides,) * n, padding, (lhs_dilation,) * n, (dilation,) * n,
        dimension_numbers=spec, feature_group_count=groups,
    )[0]  # fmt: skip


def half_square(x):
    return jnp.sum(jnp.tanh(x) ** 2) / 2


def dense(a):
    params = {"w": a(4, 3), "b": a(3), "u": a(3, 2)}
    return lambda p, x: half_square(jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]), params, a(B, 4)


def dense_sequence(a):
    loss, params, _ = dense(a)
    return loss, params, a(B, 6, 4)


def dense_long_sequence(a):
    loss, params, _ = dense(a)
    return loss, params, a(B, 2, 9, 4)


def dense_wide(a):  # a short sequence of wide features: the Gram method
    return lambda p, x: half_square(x @ p["w"] @ p["u"]), {"w": a(30, 40), "u": a(40, 30)}, a(B, 2, 30)


def dense_general(a):  # several contracted and several free axes
    params = {"w": a(2, 3, 4, 5), "o": a(4, 5, 3)}

    def loss(p, x):
        h = jnp.einsum("tab,abcd->tcd", x, p["w"])
        return half_square(jnp.einsum("tcd,cde->te", jnp.tanh(h), p["o"]))

    return loss, params, a(B, 6, 2, 3)


def batched_weight(a):  # one matrix per head: a batch axis of the weight
    return lambda p, x: half_square(jnp.einsum("htd,hde->the", x, p["w"])), {"w": a(3, 4, 2)}, a(B, 3, 5, 4)


def weight_first(a):
    return lambda p, x: half_square(p["w"] @ x), {"w": a(3, 4)}, a(B, 4, 5)


def reshaped_weight(a):
    return lambda p, x: half_square(x @ p["w"].reshape(4, 3) * 2), {"w": a(2, 6)}, a(B, 5, 4)


def scaled_weight(a):  # an elementwise function of the weight
    return lambda p, x: half_square(x @ jnp.exp(-0.3 * p["w"]).T), {"w": a(3, 4)}, a(B, 4)


def norms_and_scales(a):
    params = {"g": a(4), "b": a(4), "h": a(4), "s": a()}

    def loss(p, x):
        h = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)
        h = h * p["g"] + p["b"]
        rms = h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3) * (1 + p["h"])
        return half_square(rms * p["s"])

    return loss, params, a(B, 6, 4)


def group_norm(a):
    def loss(p, x):
        h = conv(x, p["w"])
        g = h.reshape(*h.shape[:2], 2, 2)
        g = (g - g.mean((0, 1, 3), keepdims=True)) / jnp.sqrt(g.var((0, 1, 3), keepdims=True) + 1e-3)
        return half_square(g.reshape(h.shape) * p["g"] + p["b"])

    return loss, {"w": a(3, 3, 2, 4), "g": a(4), "b": a(4)}, a(B, 4, 4, 2)


def embedding(a):
    params = {"e": a(90, 3), "pos": a(6, 3), "w": a(3, 2)}  # large enough not to be formed
    return lambda p, x: half_square((p["e"][x] + p["pos"]) @ p["w"]), params, a.ids(7, B, 6)


def embedding_long(a):  # enough repeats for the segment method
    return lambda p, x: half_square(p["e"][x] * p["s"]), {"e": a(900, 3), "s": a(40, 1)}, a.ids(9, B, 40)


def embedding_out_of_range(a):  # reads a fill value, which has no gradient
    def loss(p, x):
        return half_square(jnp.take(p["e"], x, axis=0, mode="fill", fill_value=0.5))

    return loss, {"e": a(40, 3)}, a.ids(70, B, 9).at[:, 5:].set(50)


def embedding_clipped(a):
    return (
        lambda p, x: half_square(jnp.take(p["e"], x, axis=1, mode="clip").sum(1)),
        {"e": a(3, 4)},
        a.ids(7, B, 6),
    )


def table_of_two_indices(a):
    def loss(p, x):
        i, j = x % 5, x // 5
        return half_square(p["t"][i, j] + p["u"][i, :, j])

    return loss, {"t": a(5, 40, 3), "u": a(5, 3, 40)}, a.ids(200, B, 6)


def table_of_two_scalars(a):
    def loss(p, x):
        return half_square(p["t"][x[0], x[1]] * p["s"]) + half_square(p["t"].at[x[2] - 40, :, 1].get(mode="clip"))

    return loss, {"t": a(60, 70, 3), "s": a(3)}, a.ids(60, B, 3)


def table_of_two_indices_out_of_range(a):
    def loss(p, x):
        rows = [p["t"].at[x - 2, x % 3].get(mode=mode, fill_value=0.5) for mode in ("fill", "clip")]
        return half_square(rows[0] + 2 * rows[1] + p["t"].at[x - 2, 50 - x].get(mode="fill", fill_value=0.0))

    return loss, {"t": a(40, 30, 3)}, a.ids(60, B, 9)


def vmapped_embedding(a):
    def loss(p, x):
        rows = jax.vmap(lambda i: jax.lax.dynamic_index_in_dim(p["e"], i, keepdims=False))(x)
        heads = jax.vmap(lambda table, i: table[i], (0, None))(p["heads"], x)  # a table for each head
        return half_square(rows @ p["w"]) + half_square(heads * p["s"])

    return loss, {"e": a(90, 3), "w": a(3, 2), "heads": a(2, 50, 3), "s": a(3)}, a.ids(90, B, 6)


def taken_along_axis(a):
    def loss(p, x):
        return half_square(jnp.take_along_axis(p["e"], x[:, None] + jnp.arange(3), axis=0, fill_value=0.5))

    return loss, {"e": a(90, 3)}, a.ids(95, B, 6)


def tied_embedding(a):
    def loss(p, x):
        h = jnp.tanh(p["e"][x] @ p["w"])
        return -jnp.mean(jax.nn.log_softmax(h @ p["e"].T)[jnp.arange(6), x])

    return loss, {"e": a(7, 3), "w": a(3, 3)}, a.ids(7, B, 6)


def tied_embedding_large(a):  # a table too large to form for every example
    loss, _, batch = tied_embedding(a)
    return loss, {"e": a(300, 20), "w": a(20, 20)}, batch


def conv1d(a):
    return lambda p, x: half_square(conv(x, p["w"]) + p["b"]), {"w": a(3, 2, 4), "b": a(4)}, a(B, 7, 2)


def conv2d(a):
    def loss(p, x):
        return half_square(conv(jnp.tanh(conv(x, p["w"]) + p["b"]), p["v"], strides=2))

    return loss, {"w": a(3, 3, 2, 4), "b": a(4), "v": a(3, 3, 4, 3)}, a(B, 6, 6, 2)


def conv_small_image(a):  # few positions, many channels: the Gram method
    return lambda p, x: half_square(conv(x, p["w"])), {"w": a(3, 3, 20, 20)}, a(B, 3, 3, 20)


def conv_dilated(a):
    return lambda p, x: half_square(conv(x, p["w"], dilation=2)), {"w": a(3, 3, 2, 3)}, a(B, 6, 6, 2)


def conv_groups(a):
    return lambda p, x: half_square(conv(x, p["w"], groups=2)), {"w": a(3, 3, 2, 6)}, a(B, 5, 5, 4)


def scaled_tables(a):  # looked up once, a few times, many times: a norm method for each
    def loss(p, x):
        ids, y = x
        once, few, many = p["a"] * 3.0, jnp.tanh(p["b"]), p["c"] * 2.0
        h = once[ids[0]] + jnp.mean(few[ids[:3]], axis=0) + jnp.mean(many[jnp.tile(ids, 12)], axis=0)
        return half_square(h * y)

    return loss, {"a": a(9, 4), "b": a(9, 4), "c": a(900, 4)}, (a.ids(9, B, 6), a(B, 4))


def conv_own_filter(a):  # the filter depends on the example
    def loss(p, x):
        return half_square(conv(jnp.tanh(x), p["w"] * (1 + jnp.mean(x)), groups=2))

    return loss, {"w": a(3, 3, 2, 4)}, a(B, 5, 5, 4)


def conv_depthwise(a):
    return lambda p, x: half_square(conv(x, p["w"], groups=4)), {"w": a(3, 3, 1, 4)}, a(B, 5, 5, 4)


def conv_depthwise_multiplier(a):
    return lambda p, x: half_square(conv(x, p["w"], groups=4)), {"w": a(3, 3, 1, 8)}, a(B, 5, 5, 4)


def conv_transposed(a):
    def loss(p, x):
        return half_square(lax.conv_transpose(x[None], p["w"], (2, 2), "SAME"))

    return loss, {"w": a(3, 3, 2, 3)}, a(B, 4, 4, 2)


def conv_valid_channels_first(a):
    def loss(p, x):
        return half_square(lax.conv(x[None], p["w"], (2, 1), "VALID"))

    return loss, {"w": a(3, 2, 3, 2)}, a(B, 2, 6, 5)


def standardized(w):
    return (w - w.mean((0, 1, 2))) / jnp.sqrt(w.var((0, 1, 2)) + 1e-3)


def weight_standardized(a):
    return (
        lambda p, x: half_square(conv(x, standardized(p["w"]) * p["g"])),
        {"w": a(3, 3, 2, 4), "g": a(4)},
        a(B, 5, 5, 2),
    )


def weight_standardized_only(a):
    return lambda p, x: half_square(conv(x, standardized(p["w"]))), {"w": a(3, 3, 2, 4)}, a(B, 5, 5, 2)


def conv_pixel_gram(a):  # the products of windows are sums of products of pixels
    return lambda p, x: half_square(conv(x, p["w"])), {"w": a(3, 3, 24, 24)}, a(B, 4, 4, 24)


def weight_standardized_gram(a):  # few positions, many channels
    def loss(p, x):
        y = jnp.tanh(conv(x, standardized(p["w"])))
        return half_square(conv(y, standardized(p["v"]), strides=2))

    return loss, {"w": a(3, 3, 24, 24), "v": a(3, 3, 24, 40)}, a(B, 4, 4, 24)


def weight_normalized(a):  # Salimans and Kingma, without the gain
    def loss(p, x):
        w = p["w"] * lax.rsqrt(jnp.sum(p["w"] ** 2, axis=0, keepdims=True) + 1e-2)
        return half_square(jnp.tanh(x @ w) @ (p["v"] / jnp.linalg.norm(p["v"], axis=0)))

    return loss, {"w": a(12, 16), "v": a(16, 5)}, a(B, 3, 12)


def summed_products(a):  # two products that are added have one cotangent, unless subtracted or read twice
    def loss(p, x):
        u, v = x @ p["u"], jnp.tanh(x) @ p["v"]
        parts = [jnp.tanh(s + t) for s, t in zip(jnp.split(u + p["b"], 2, -1), jnp.split(v, 2, -1), strict=True)]
        w, z = x @ p["w"], jnp.tanh(x) @ p["z"]
        return half_square(parts[0] * parts[1]) + half_square(w - z) + half_square(w + z)

    return loss, {"u": a(4, 6), "v": a(4, 6), "b": a(6), "w": a(4, 3), "z": a(4, 3)}, a(B, 2, 4)


def lora(a):
    params = {"w": a(4, 3), "a": a(4, 2), "b": a(2, 3)}
    return lambda p, x: half_square(x @ (p["w"] + 0.5 * p["a"] @ p["b"])), params, a(B, 4)


def lora_frozen(a):
    params = {"w": a(4, 3), "a": a(4, 2), "b": a(2, 3)}
    return (
        lambda p, x: half_square(x @ lax.stop_gradient(p["w"]) + (x @ p["a"]) @ p["b"]),
        params,
        a(B, 6, 4),
    )


def matrix_factorization(a):
    params = {"u": a(6, 3), "v": a(7, 3), "bu": a(6), "bv": a(7)}

    def loss(p, example):
        user, item, rating = example
        score = p["u"][user] @ p["v"][item] + p["bu"][user] + p["bv"][item]
        return (score - rating) ** 2

    return loss, params, (a.ids(6, B), a.ids(7, B), a(B))


def attention(a):
    params = {k: a(4, 2, 3) for k in "qkv"} | {"o": a(2, 3, 4), "bk": a(2, 3)}

    def loss(p, x):
        q, k, v = (jnp.einsum("td,dhe->the", x, p[n]) for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("the,she->hts", q, k + p["bk"]))
        return half_square(jnp.einsum("hts,she,hed->td", weights, v, p["o"]))

    return loss, params, a(B, 5, 4)


def lstm(a, hidden=3):
    params = {"h": [a(hidden, hidden) for _ in range(4)], "x": a(2, 4 * hidden), "b": a(4 * hidden)}

    def loss(p, xs):
        def step(carry, x):
            c, h = carry
            z = h @ jnp.concatenate(p["h"], axis=1) + x @ p["x"] + p["b"]
            i, f, g, o = jnp.split(z, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), h

        (_, h), hs = lax.scan(step, (jnp.zeros(hidden), jnp.zeros(hidden)), xs)
        return half_square(h) + half_square(hs.mean(0))

    return loss, params, a(B, 7, 2)


def gru_reversed(a):
    params = {"w": a(3, 3), "u": a(2, 3), "z": a(5, 3), "start": a(3)}

    def loss(p, xs):
        def step(h, x):
            z = jax.nn.sigmoid(jnp.concatenate([h, x]) @ p["z"])
            h = z * h + (1 - z) * jnp.tanh(h @ p["w"] + x @ p["u"])
            return h, None

        return half_square(lax.scan(step, jnp.tanh(p["start"]), xs, reverse=True)[0])

    return loss, params, a(B, 6, 2)


def scanned_layers(a):
    params = {"w": a(3, 4, 4), "b": a(3, 4), "g": a(3, 4, 1), "shared": a(4, 4)}

    def loss(p, x):
        def layer(h, q):
            w = (q["w"] * q["g"]).astype(x.dtype)
            return jnp.tanh(h @ w + q["b"]) @ p["shared"], h.sum()

        stacked = {k: p[k] for k in "wbg"}
        h, sums = lax.scan(layer, x, stacked)
        return half_square(h) + half_square(sums)

    return loss, params, a(B, 5, 4)


def scanned_layers_over_time(a):  # a scan over time inside a scan over layers, layer remat
    params = {"w": a(2, 3, 3), "u": a(2, 3, 3)}

    def loss(p, xs):
        @jax.checkpoint
        def layer(hs, q):
            def step(h, x):
                h = jnp.tanh(h @ q["w"] + x @ q["u"])
                return h, h

            return lax.scan(step, jnp.zeros(3), hs)[1], None

        return half_square(lax.scan(layer, xs, p)[0])

    return loss, params, a(B, 4, 3)


def fori_loop(a):  # the weights are a carry, and layers are read by a counter
    params = {"w": a(3, 4, 4), "u": a(4, 4)}

    def loss(p, x):
        def body(i, carry):
            p, h = carry
            return p, jnp.tanh(h @ p["w"][i]) @ p["u"]

        return half_square(lax.fori_loop(0, 3, body, (p, x))[1])

    return loss, params, a(B, 4)


def evolving_weight(a):  # a carry that depends on parameters only, yet changes
    def loss(p, x):
        def body(carry, _):
            w, h = carry
            return (w * p["d"], jnp.tanh(h @ w)), None

        return half_square(lax.scan(body, (p["w"], x), length=3)[0][1])

    return loss, {"w": a(4, 4), "d": a(4)}, a(B, 4)


def unrolled_recurrence(a):
    def loss(p, xs):
        h = jnp.zeros(4)
        for x in xs:
            h = jnp.tanh(h @ p["w"] + x @ p["u"])
        return half_square(h)

    return loss, {"w": a(4, 4), "u": a(3, 4)}, a(B, 3, 3)


def remat(a):
    def loss(p, x):
        block = jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]))
        return half_square(block(p, x))

    return loss, {"w": a(4, 3), "b": a(3), "u": a(3, 2)}, a(B, 6, 4)


def state_handed_back(a):
    """As in `nnx.scan` of `nnx.remat`: the weights of the layers are both inputs and outputs."""

    def loss(p, x):
        @jax.checkpoint
        def layer(h, w):
            return jnp.tanh(h @ w), w

        h, _ = jax.lax.scan(layer, x, p["w"])
        return half_square(h)

    return loss, {"w": a(3, 4, 4)}, a(B, 6, 4)


def remat_policy(a):
    def loss(p, x):
        policy = jax.checkpoint_policies.dots_saveable
        block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=policy)
        return half_square(block(p["u"], block(p["w"], x)))

    return loss, {"w": a(4, 3), "u": a(3, 2)}, a(B, 6, 4)


@jax.custom_jvp
def _odd(w, x):
    return w * x


_odd.defjvp(lambda primals, tangents: (_odd(*primals), 3 * tangents[0] * primals[1] + tangents[1]))


@jax.custom_vjp
def _matmul(x, w):
    return x @ w


_matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, y: (2 * y @ r[1].T, 5 * r[0].T @ y))


def custom_rules(a):  # rules that differ from the true derivative must be obeyed
    def loss(p, x):
        return half_square(_matmul(_odd(p["s"], jax.nn.gelu(jax.nn.relu(x @ p["u"]))), p["w"]))

    return loss, {"s": a(3), "w": a(3, 2), "u": a(4, 3)}, a(B, 5, 4)


def cond(a):
    def loss(p, x):
        h = lax.cond(x[0] > 0, lambda: x @ p["w"], lambda: jnp.sin(x) @ p["u"])
        return half_square(lax.switch(jnp.argmax(h), [lambda: h * p["b"], lambda: h, lambda: h + 1]))

    return loss, {"w": a(4, 3), "u": a(4, 3), "b": a(3)}, a(B, 4)


def nested_jit(a):
    inner = jax.jit(lambda w, x: jnp.tanh(x @ w))
    return lambda p, x: half_square(jax.jit(inner)(p["w"].T, inner(p["w"], x))), {"w": a(4, 3)}, a(B, 4)


def dropout(a):
    def loss(p, example):
        key, x = example
        h = jnp.tanh(x @ p["w"])
        return half_square(jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h * 2, 0) @ p["u"])

    keys = jax.random.split(jax.random.key(0), B)
    return loss, {"w": a(4, 6), "u": a(6, 2)}, (keys, a(B, 4))


def frozen_and_unused(a):
    def loss(p, x):
        return half_square(x @ lax.stop_gradient(p["w"]) + p["b"]) + jnp.sum(p["w"] > 0)

    return loss, {"w": a(4, 3), "b": a(3), "unused": a(2)}, a(B, 4)


def used_twice(a):
    def loss(p, x):
        h = jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"] + p["b"])
        return half_square(h @ p["w"].T)

    return loss, {"w": a(4, 4), "b": a(4)}, a(B, 3, 4)


def filters_shared_by_sizes(a):  # one head for features of several sizes, with groups, a gain, and strided elsewhere
    def loss(p, x):
        first, total = p["w"] * p["g"], 0.0
        for size in (8, 4, 6):
            h = jnp.tanh(conv(x[:size], first, groups=2))
            total += half_square(conv(h, p["v"]) + p["b"])
        return total + half_square(conv(x, first, strides=2, groups=2))

    return loss, {"w": a(3, 2, 6), "g": a(6), "v": a(3, 6, 10), "b": a(10)}, a(B, 8, 4)


def square_used_both_ways(a):  # factors of one shape, but of the transposed matrix
    def loss(p, x):
        w = p["w"] * p["g"]
        h = jnp.tanh(jnp.einsum("ti,io->to", x, w))
        return half_square(jnp.einsum("ti,oi->to", h, w)) + half_square(jnp.einsum("ti,io->to", x[::-1] ** 2, w))

    return loss, {"w": a(6, 6), "g": a(6)}, a(B, 2, 6)


def sliced(a):
    def loss(p, x):
        layers = [jnp.squeeze(w, 0) for w in jnp.split(p["w"], 3)]
        for w in layers:
            x = jnp.tanh(x @ w)
        return half_square(x + p["w"][0, 1])

    return loss, {"w": a(3, 4, 4)}, a(B, 4)


def masked_weight(a):
    mask = jnp.arange(4)[:, None] <= jnp.arange(3)[None]

    def loss(p, x):
        return half_square(jnp.tanh(x @ jnp.where(mask, p["w"], 0)) @ jnp.tril(p["v"]) + jnp.clip(p["b"], -0.5, 0.5))

    return loss, {"w": a(4, 3), "v": a(3, 2), "b": a(2)}, a(B, 4)


def regularized(a):  # a term that does not depend on the example
    def loss(p, x):
        return half_square(x @ p["w"]) + 0.1 * jnp.sum(p["w"] ** 2) + jnp.sum(p["b"] ** 3)

    return loss, {"w": a(4, 3), "b": a(2)}, a(B, 4)


def constant_loss(a):
    return lambda p, x: jnp.sum(p["w"] ** 2), {"w": a(3)}, a(B, 2)


def joined_with_data(a):  # a class token, and a choice between data and a parameter
    def loss(p, x):
        x = jnp.concatenate([p["token"][None], x])
        return half_square(jnp.where(x > 0, x, p["fill"]) @ p["w"])

    return loss, {"token": a(4), "fill": a(4), "w": a(4, 2)}, a(B, 3, 4)


def closed_over(a):
    extra = a(4, 4)
    return lambda p, x: half_square(x @ extra @ (p["w"] * extra[0, 0])), {"w": a(4, 3)}, a(B, 4)


CASES = [
    dense, dense_sequence, dense_long_sequence, dense_wide, dense_general, batched_weight,
    weight_first, reshaped_weight, scaled_weight, norms_and_scales, group_norm, embedding,
    embedding_long, embedding_out_of_range, embedding_clipped, table_of_two_indices, table_of_two_scalars,
    table_of_two_indices_out_of_range, vmapped_embedding, taken_along_axis, scaled_tables, tied_embedding,
    tied_embedding_large,
    conv1d, conv2d, conv_small_image, conv_dilated, conv_groups, conv_own_filter, conv_depthwise,
    conv_depthwise_multiplier, conv_transposed, conv_valid_channels_first, weight_standardized,
    weight_standardized_only, weight_standardized_gram, weight_normalized, conv_pixel_gram,
    lora, summed_products, lora_frozen, matrix_factorization, attention, lstm, gru_reversed,
    scanned_layers, scanned_layers_over_time, fori_loop, evolving_weight, unrolled_recurrence, remat,
    remat_policy, state_handed_back, custom_rules, cond, nested_jit, dropout, frozen_and_unused, used_twice,
    filters_shared_by_sizes, square_used_both_ways, sliced, masked_weight, regularized,
    constant_loss, joined_with_data, closed_over,
]  # fmt: skip
