"""Models that use a weight several times in a loss, or a multiple of it."""

import functools
import itertools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal, uniform
from benchmarks.zoo.entries import KEY, initial, model, of_equinox, of_haiku, of_nnx
from benchmarks.zoo.layers import Arrays, conv2d


class _NormalizedDiscriminator(nn.Module):
    """Strided convolutions, each divided by its largest singular value."""

    @nn.compact
    def __call__(self, x):
        for features in (32, 64, 128):
            conv = nn.Conv(features, (4, 4), strides=2)
            x = nn.leaky_relu(nn.SpectralNorm(conv)(x, update_stats=False), 0.1)
        return nn.SpectralNorm(nn.Dense(1))(x.reshape(len(x), -1), update_stats=False)[:, 0]


@model("SN-GAN discriminator", "linen", "pfnet-research/sngan_projection")
def sngan() -> Family:
    module = _NormalizedDiscriminator()
    variables = initial(lambda key: module.init(key, images(1, 32)))

    def loss(params, example):
        x, sign = example
        out = module.apply({**variables, "params": params}, x[None])
        return jax.nn.relu(1 - sign * out[0])

    return Family(loss, variables["params"], (images(16, 32), jnp.tile(jnp.asarray([1.0, -1.0]), 8)))


@model("WGAN critic, gradient penalty", "jax", "igul222/improved_wgan_training")
def wgan() -> Family:
    """The critic scores a real and a generated image, and the norm of its gradient between them should be 1."""
    arrays = Arrays()
    params = {"convs": [arrays.conv(4, 4, i, o) for i, o in itertools.pairwise((3, 32, 64, 128))]}
    params["head"] = arrays(4 * 4 * 128, 1)

    def critic(params, x):
        h = x[None]
        for filters in params["convs"]:
            h = jax.nn.leaky_relu(conv2d(h, filters, stride=2))
        return (h.reshape(-1) @ params["head"])[0]

    def loss(params, example):
        real, fake, share = example
        slope = jax.grad(critic, 1)(params, share * real + (1 - share) * fake)
        penalty = (jnp.sqrt(jnp.sum(slope**2) + 1e-8) - 1) ** 2
        return critic(params, fake) - critic(params, real) + 10 * penalty

    return Family(loss, params, (images(16, 32), normal(16, 32, 32, 3), uniform(16)))


@model("Sentence encoder, triplets", "haiku", "UKPLab/sentence-transformers")
def triplets() -> Family:
    """One encoder for three texts: an anchor, one that is close to it, and one that is not."""

    def loss(texts):
        words = hk.Embed(20_000, 64)
        hidden, out = hk.Linear(128), hk.Linear(64)
        anchor, near, far = (out(jnp.tanh(hidden(jnp.mean(words(text), 0)))) for text in texts)
        return jax.nn.relu(1 + jnp.sum((anchor - near) ** 2) - jnp.sum((anchor - far) ** 2))

    return of_haiku(loss, tuple(labels(20_000, 64, 20, seed=i) for i in range(3)))


class _Flow(eqx.Module):
    """A convolutional GRU refines a field of motion; its steps are unrolled and share all filters."""

    encoder: list
    gates: list
    head: eqx.nn.Conv2d
    steps: int = eqx.field(static=True, default=4)

    def __call__(self, x):
        for conv in self.encoder:
            x = jax.nn.relu(conv(x))
        state, flows = jnp.tanh(x), []
        update, reset, new = self.gates
        for _ in range(self.steps):
            both = jnp.concatenate([state, x])
            z, r = jax.nn.sigmoid(update(both)), jax.nn.sigmoid(reset(both))
            state = (1 - z) * state + z * jnp.tanh(new(jnp.concatenate([r * state, x])))
            flows.append(self.head(state))
        return jnp.stack(flows)


@model("RAFT, unrolled", "equinox", "princeton-vl/RAFT")
def raft() -> Family:
    conv = functools.partial(eqx.nn.Conv2d, padding=1)
    keys = iter(jax.random.split(KEY, 6))
    encoder = [conv(6, 32, 3, 2, key=next(keys)), conv(32, 64, 3, 2, key=next(keys))]
    gates = [conv(128, 64, 3, key=next(keys)) for _ in range(3)]
    net = _Flow(encoder, gates, conv(64, 2, 3, key=next(keys)))
    weights = 0.8 ** jnp.arange(4)[::-1]

    def loss(net, example):
        x, flow = example
        return jnp.sum(weights * jnp.mean(jnp.abs(net(x) - flow), (1, 2, 3)))

    return of_equinox(net, loss, (normal(8, 6, 32, 32), normal(8, 2, 8, 8)))


class _Pyramid(nnx.Module):
    """Features of three sizes, and one head for all of them."""

    def __init__(self, *, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        self.down = nnx.List([conv(i, o, strides=2) for i, o in itertools.pairwise((3, 32, 64, 64, 64))])
        self.lateral = nnx.List([nnx.Conv(64, 64, (1, 1), rngs=rngs) for _ in range(3)])
        self.head = nnx.List([conv(64, 64), conv(64, 64), conv(64, 36)])

    def __call__(self, x):
        features = []
        for conv in self.down:
            x = nnx.relu(conv(x))
            features.append(x)
        above, outputs = 0.0, []
        for feature, lateral in zip(features[:0:-1], self.lateral, strict=True):
            b, h, w, c = feature.shape
            above = lateral(feature) + (jax.image.resize(above, (b, h, w, c), "nearest") if outputs else 0.0)
            y = above
            for i, conv in enumerate(self.head):
                y = conv(nnx.relu(y) if i else y)
            outputs.append(y.reshape(b, -1, 36))
        return jnp.concatenate(outputs, 1)


@model("RetinaNet", "nnx", "fizyr/keras-retinanet")
def retinanet() -> Family:
    """Focal loss at every anchor, of which few hold an object."""

    def loss(logits, targets):
        p = jax.nn.sigmoid(logits)
        hit = jnp.where(targets > 0, jax.nn.log_sigmoid(logits) * (1 - p) ** 2, 3 * jax.nn.log_sigmoid(-logits) * p**2)
        return -jnp.mean(hit)

    targets = (uniform(8, 336, 36) < 0.02).astype(jnp.float32)
    return of_nnx(_Pyramid(rngs=nnx.Rngs(0)), loss, images(8, 64), targets)


@model("StyleGAN2 synthesis", "jax", "NVlabs/stylegan2")
def stylegan() -> Family:
    """Filters are scaled by a style, example by example, and then to unit length."""
    arrays, width = Arrays(), 64
    params = {
        "mapping": [arrays(128, 128) for _ in range(3)],
        "start": arrays(4, 4, width),
        "styles": [arrays(128, width) for _ in range(4)],
        "filters": [arrays.conv(3, 3, width, width) for _ in range(4)],
        "colors": arrays.conv(1, 1, width, 3),
    }

    def loss(params, example):
        z, target = example
        for w in params["mapping"]:
            z = jax.nn.leaky_relu(z @ w)
        x = params["start"]
        for i, (style, filters) in enumerate(zip(params["styles"], params["filters"], strict=True)):
            filters = filters * (z @ style + 1)[:, None]
            filters = filters * lax.rsqrt(jnp.sum(filters**2, (0, 1, 2)) + 1e-8)
            x = jax.image.resize(x, (2 * len(x), 2 * len(x), width), "bilinear") if i else x
            x = jax.nn.leaky_relu(conv2d(x[None], filters)[0])
        return jnp.mean((conv2d(x[None], params["colors"])[0] - target) ** 2)

    return Family(loss, params, (normal(8, 128), images(8, 32)))
