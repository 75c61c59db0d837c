"""Under jit, scan, vmap over seeds, sharding; model libraries; stored outputs of jax_privacy."""

import json
from pathlib import Path

import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import assert_trees_close, check, flat_clip, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dpopt import ghost

GOLDEN = Path(__file__).parent.parent / "golden"


def clip(loss_fn, params, batch, **kwargs):
    return ghost.clipped_sum(loss_fn, params, batch, coefficients=flat_clip(0.7), **kwargs)


def model(a):  # promotes no ranks, so that tests notice if the engine does
    def loss(p, x):
        h = jnp.tanh(jnp.einsum("td,de->te", x, p["w"]) + p["b"][None])
        return jnp.sum(jnp.einsum("te,ef->tf", h, p["u"]) ** 2)

    return loss, {"w": a(4, 3), "b": a(3), "u": a(3, 2)}, a(8, 6, 4)


@pytest.mark.slow
def test_eager_and_jitted_agree(x64):
    loss_fn, params, batch = model(ghost_cases.Arrays())
    scale = jax.tree.map(lambda p: p**2 + 0.1, params)
    eager = clip(loss_fn, params, batch, scale=scale, offset=params)
    jitted = jax.jit(lambda p, b, s: clip(loss_fn, p, b, scale=s, offset=p))(params, batch, scale)
    assert_trees_close(eager, jitted, 1e-10)


@pytest.mark.slow
def test_inside_scan_over_microbatches(x64):
    loss_fn, params, batch = model(ghost_cases.Arrays())

    def step(total, micro):
        return jax.tree.map(jnp.add, total, clip(loss_fn, params, micro).sum), None

    micro = batch.reshape(4, 2, 6, 4)
    total, _ = jax.jit(lambda m: lax.scan(step, jax.tree.map(jnp.zeros_like, params), m))(micro)
    assert_trees_close(total, clip(loss_fn, params, batch).sum, 1e-9)


@pytest.mark.slow
def test_vmap_over_seeds(x64):
    """Each lane is a run of its own; a bad example in one lane does not change the others."""
    loss_fn, params, batch = model(ghost_cases.Arrays())
    many = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), params)
    batches = jnp.stack([batch, batch, batch.at[3].set(jnp.nan)])
    got = jax.jit(jax.vmap(lambda p, b: clip(loss_fn, p, b)))(many, batches)
    for i in range(3):
        alone = clip(loss_fn, jax.tree.map(lambda p, i=i: p[i], many), batches[i])
        pick = jax.tree.map(lambda x, i=i: x[i], got)
        assert_trees_close(pick.sum, alone.sum, 1e-9)
        np.testing.assert_array_equal(pick.is_finite, alone.is_finite)


def test_sharded_batch(x64):
    loss_fn, params, batch = model(ghost_cases.Arrays())
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("batch" if len(batch) % len(devices) == 0 else None)
    sharded = jax.device_put(batch, jax.sharding.NamedSharding(mesh, spec))
    got = jax.jit(lambda p, b: clip(loss_fn, p, b))(params, sharded)
    want, _ = plain(loss_fn, params, batch, flat_clip(0.7), np.ones(len(batch), bool))
    assert_trees_close(got.sum, want, 1e-9)


@pytest.mark.slow
def test_donated_parameters():
    loss_fn, params, batch = model(ghost_cases.Arrays())
    want = clip(loss_fn, params, batch).sum
    step = jax.jit(lambda p, b: jax.tree.map(jnp.subtract, p, clip(loss_fn, p, b).sum), donate_argnums=0)
    assert_trees_close(step(jax.tree.map(jnp.copy, params), batch), jax.tree.map(jnp.subtract, params, want), 1e-5)


def test_loss_closing_over_traced_values(x64):
    loss_fn, params, batch = model(ghost_cases.Arrays())

    def scaled(t):
        return clip(lambda p, x: loss_fn(p, x * t), params, batch).sum

    want, _ = plain(loss_fn, params, np.asarray(batch) * 1.5, flat_clip(0.7), np.ones(len(batch), bool))
    assert_trees_close(jax.jit(scaled)(1.5), want, 1e-9)


@pytest.mark.slow
def test_chunks_equal_the_whole(x64, monkeypatch):
    """Gradients formed a few examples at a time, none of them kept."""
    from dpopt.ghost import keeping, splitting

    monkeypatch.setattr(splitting, "CACHED_BYTES", 1 << 9)
    monkeypatch.setattr(keeping, "_KEPT_SHARE", 0.0)
    with jax.numpy_rank_promotion("allow"):
        for case in (ghost_cases.conv2d, ghost_cases.weight_standardized, ghost_cases.dense_sequence):
            loss_fn, params, batch = case(ghost_cases.Arrays())
            batch = jnp.concatenate([batch, batch[:1] * 2])
            check(loss_fn, params, batch, clips=(flat_clip,))


LAYERS = ("dense", "norm", "conv", "recurrent", "attend", "tied", "remat")


@st.composite
def networks(draw):
    """Layers in any order on a sequence of 4 features, some with shared weights, of any length and batch size."""
    layers = draw(st.lists(st.tuples(st.sampled_from(LAYERS), st.integers(0, 1)), min_size=1, max_size=4))
    return layers, draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 99))


@pytest.mark.slow
@given(networks())
@settings(max_examples=6)
def test_random_networks(network):
    layers, size, length, seed = network
    a = ghost_cases.Arrays(seed)

    def loss_fn(params, x):
        for kind, i in layers:
            w, v, g = (params[n][i] for n in ("w", "v", "g"))
            if kind == "dense":
                x = jnp.tanh(x @ w + g)
            elif kind == "norm":
                x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 0.1) * g
            elif kind == "conv":
                x = jnp.tanh(ghost_cases.conv(x, v))
            elif kind == "recurrent":
                x = lax.scan(lambda h, y, w=w: (jnp.tanh(h @ w + y),) * 2, g, x)[1]
            elif kind == "attend":
                x = x + jax.nn.softmax(x @ w @ x.T) @ x
            elif kind == "tied":
                x = jnp.tanh(x @ w) @ w.T
            else:
                x = jax.checkpoint(lambda x, w=w: jnp.sin(x @ w))(x)
        return jnp.mean(x**2)

    from helpers import enable_x64

    with enable_x64(True), jax.numpy_rank_promotion("allow"):
        params = {"w": [a(4, 4), a(4, 4)], "v": [a(3, 4, 4), a(3, 4, 4)], "g": [a(4), a(4)]}
        check(loss_fn, params, a(size, length, 4), clips=(flat_clip,))


def _jax_privacy_models():
    def cross_entropy(logits, label):
        return -jax.nn.log_softmax(logits)[label]

    def mlp(p, x, y):
        h = jax.nn.gelu(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"], approximate=False)
        return cross_entropy(h @ p["w3"] + p["b3"], y)

    def conv(p, x, y):
        h = jnp.tanh(ghost_cases.conv(x, p["cw1"]) + p["cb1"])
        h = h.reshape(4, 2, 4, 2, 4).mean((1, 3))
        h = jax.nn.silu(ghost_cases.conv(h, p["cw2"], strides=2) + p["cb2"])
        return cross_entropy(h.reshape(-1) @ p["fw"] + p["fb"], y)

    def attn(p, x, y):
        e = p["emb"][x] + p["pos"]
        weights = jax.nn.softmax((e @ p["wq"]) @ (e @ p["wk"]).T / 2)
        h = e + weights @ (e @ p["wv"]) @ p["wo"]
        h = h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * p["g"]
        return cross_entropy(h.mean(0) @ p["hw"] + p["hb"], y)

    return {"mlp": mlp, "conv": conv, "attn": attn}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["a", "b"])
@pytest.mark.parametrize("name", ["mlp", "conv", "attn"])
def test_jax_privacy_outputs(name, variant, x64):
    """Sums and norms that jax_privacy 2.0.0 computed (float64; provenance in tests/golden)."""
    data = np.load(GOLDEN / f"jaxprivacy_{name}_{variant}.npz")
    meta, tree = (
        json.loads(str(data["meta"])),
        lambda prefix: {
            k.removeprefix(prefix + "__"): jnp.asarray(data[k]) for k in data.files if k.startswith(prefix + "__")
        },
    )
    model = _jax_privacy_models()[name]
    batch = (jnp.asarray(data["x"]), jnp.asarray(data["y"]))

    def run(bound, **kwargs):
        def loss_fn(p, example):
            return model(p, *example)

        return ghost.clipped_sum(loss_fn, tree("param"), batch, coefficients=flat_clip(bound), **kwargs)

    def total(norms):
        return jnp.sqrt(sum(n**2 for n in jax.tree.leaves(norms)))

    with jax.numpy_rank_promotion("allow"):
        got = run(meta["clip"])
        assert_trees_close(got.sum, tree("sum"), 1e-9, 1e-14)
        assert_trees_close(got.losses, data["losses"], 1e-9)
        assert_trees_close(total(got.leaf_norms), data["norms"], 1e-9)
        assert_trees_close(run(meta["tiny_clip"]).sum, tree("tiny_sum"), 1e-9, 1e-14)
        padded = run(meta["clip"], mask=~jnp.asarray(data["pad_mask"], bool))
        assert_trees_close(padded.sum, tree("pad_sum"), 1e-9, 1e-14)
        scale = jax.tree.map(lambda d: 1 / d, tree("denom"))
        scaled = run(meta["pre_clip"], scale=scale)
        assert_trees_close(scaled.sum, tree("pre_sum"), 1e-9, 1e-14)
        assert_trees_close(total(scaled.leaf_norms), data["pre_norms_true"], 1e-9)


def _compare(loss_fn, params, batch):
    with jax.numpy_rank_promotion("allow"):
        want, norms = jax.jit(
            lambda p, b: plain(loss_fn, p, b, flat_clip(0.7), jnp.ones(len(jax.tree.leaves(b)[0]), bool))
        )(params, batch)
        got = jax.jit(lambda p, b: clip(loss_fn, p, b))(params, batch)
    assert_trees_close(got.leaf_norms, norms, 1e-5, 1e-6)
    assert_trees_close(got.sum, want, 2e-5, 1e-6)


def _tokens(*shape):
    return ghost_cases.Arrays().ids(11, *shape)


@pytest.mark.slow
def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(11, 8)
            x = embed(ids)
            x = nn.RNN(nn.OptimizedLSTMCell(8))(x) + nn.RNN(nn.GRUCell(8), reverse=True)(x)
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            x = nn.GroupNorm(2)(nn.Conv(8, (3,))(x)) + nn.RMSNorm()(x)
            return embed.attend(nn.DenseGeneral((2, 4), axis=-1)(x).reshape(-1, 8)).mean(0)

    net, batch = Net(), _tokens(4, 6)
    params = net.init(jax.random.key(0), batch[0])
    _compare(lambda p, x: jnp.sum(net.apply(p, x) ** 2), params, batch)


@pytest.mark.slow
def test_flax_linen_scanned_layers_with_dropout():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = x + nn.Dense(8, dtype=jnp.float32)(nn.tanh(nn.Dense(16)(nn.LayerNorm()(x))))
            return nn.Dropout(0.3, deterministic=False)(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3
            )
            return nn.Dense(2)(layers()(x, None)[0])

    net, x = Net(), ghost_cases.Arrays()(4, 5, 8)
    params = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x[0])
    keys = jax.random.split(jax.random.key(2), 4)
    _compare(lambda p, e: jnp.sum(net.apply(p, e[1], rngs={"dropout": e[0]}) ** 2), params, (keys, x))


@pytest.mark.slow
def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(11, 8, rngs=rngs)
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.conv = nnx.Conv(8, 4, (3,), rngs=rngs)

        def __call__(self, ids):
            return self.conv(nnx.gelu(self.norm(self.dense(self.embed(ids)))))

    definition, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(p, x):
        return jnp.sum(nnx.merge(definition, p, rest)(x) ** 2)

    _compare(loss_fn, params, _tokens(4, 6))


@pytest.mark.slow
def test_equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    net = (eqx.nn.Conv2d(2, 3, 3, key=keys[0]), eqx.nn.LayerNorm((3, 3, 3)), eqx.nn.MLP(27, 2, 8, 2, key=keys[1]))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss_fn(params, x):
        conv, norm, mlp = eqx.combine(params, static)
        return jnp.sum(mlp(jax.nn.relu(norm(conv(x))).ravel()) ** 2)

    _compare(loss_fn, params, ghost_cases.Arrays()(4, 2, 5, 5))


@pytest.mark.slow
def test_haiku():
    hk = pytest.importorskip("haiku")

    def net(x):
        x = hk.Conv1D(4, 3)(x[None])[0]
        x, _ = hk.dynamic_unroll(hk.LSTM(5), x, hk.LSTM(5).initial_state(None))
        return hk.Linear(2)(hk.LayerNorm(-1, True, True)(x)).sum()

    net = hk.without_apply_rng(hk.transform(net))
    batch = ghost_cases.Arrays()(4, 6, 3)
    _compare(lambda p, x: net.apply(p, x) ** 2, net.init(jax.random.key(0), batch[0]), batch)
