"""Generative models of images (autoencoders, diffusion, a discriminator, autoregressive models, flows) and a U-Net."""

import itertools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, labels, normal, uniform
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen, of_nnx
from benchmarks.zoo.layers import Arrays, binary_cross_entropy, conv2d, cross_entropy, squared_error


class _VAE(nn.Module):
    @nn.compact
    def __call__(self, x, noise):
        h = nn.relu(nn.Dense(500, name="encoder")(x))
        mean, log_variance = nn.Dense(20, name="mean")(h), nn.Dense(20, name="log_variance")(h)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        logits = nn.Dense(784, name="decoder")(nn.relu(nn.Dense(500)(z)))
        return logits, mean, log_variance


@model("VAE", "linen", "google/flax: examples/vae")
def vae() -> Family:
    def loss(outputs, x):
        logits, mean, log_variance = outputs
        divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance))
        return 784 * binary_cross_entropy(logits, x) + divergence

    x = uniform(64, 784)
    return of_linen(_VAE(), loss, (x, normal(64, 20)), x)


class _ConvAutoencoder(nnx.Module):
    """Strided convolutions down, transposed convolutions up."""

    def __init__(self, *, rngs: nnx.Rngs):
        widths = (3, 32, 64, 128)
        self.down = nnx.List([
            nnx.Conv(i, o, (3, 3), strides=2, rngs=rngs) for i, o in itertools.pairwise(widths)
        ])  # fmt: skip
        self.code = nnx.Linear(4 * 4 * 128, 128, rngs=rngs)
        self.decode = nnx.Linear(128, 4 * 4 * 128, rngs=rngs)
        self.up = nnx.List([
            nnx.ConvTranspose(o, i, (4, 4), strides=2, rngs=rngs)
            for i, o in reversed(list(itertools.pairwise(widths)))
        ])  # fmt: skip

    def __call__(self, x):
        for conv in self.down:
            x = nnx.relu(conv(x))
        x = nnx.relu(self.decode(self.code(x.reshape(len(x), -1)))).reshape(len(x), 4, 4, 128)
        for i, conv in enumerate(self.up):
            x = conv(x if i == 0 else nnx.relu(x))
        return x


@model("Convolutional autoencoder", "nnx", "chenjie/PyTorch-CIFAR-10-autoencoder")
def autoencoder() -> Family:
    x = images(8, 32)
    return of_nnx(_ConvAutoencoder(rngs=nnx.Rngs(0)), squared_error, x, x)


class _TimedBlock(nn.Module):
    """A residual block of two convolutions; the time embedding is added between them."""

    features: int

    @nn.compact
    def __call__(self, x, time):
        h = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
        h = h + nn.Dense(self.features)(nn.swish(time))[:, None, None]
        h = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(8)(h)))
        return h + (x if x.shape[-1] == self.features else nn.Conv(self.features, (1, 1))(x))


class _PixelAttention(nn.Module):
    @nn.compact
    def __call__(self, x):
        b, h, w, c = x.shape
        y = nn.GroupNorm(8)(x)
        q, k, v = (nn.Conv(c, (1, 1), name=n)(y).reshape(b, h * w, c) for n in "qkv")
        y = jnp.einsum("bqk,bkc->bqc", nn.softmax(jnp.einsum("bqc,bkc->bqk", q, k) * c**-0.5), v)
        return x + nn.Conv(c, (1, 1))(y.reshape(x.shape))


class _DiffusionUNet(nn.Module):
    width: int = 48

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * np.exp(-np.log(10_000) * np.arange(self.width // 2) / (self.width // 2))
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(x.dtype)
        t = nn.Dense(4 * self.width)(nn.swish(nn.Dense(4 * self.width)(t)))
        x = nn.Conv(self.width, (3, 3))(x)
        kept = [x]
        for level, factor in enumerate((1, 2, 2)):
            x = _TimedBlock(self.width * factor)(x, t)
            x = _PixelAttention()(x) if level == 1 else x
            kept.append(x)
            if level < 2:
                x = nn.Conv(x.shape[-1], (3, 3), strides=2)(x)
                kept.append(x)
        x = _TimedBlock(x.shape[-1])(_PixelAttention()(_TimedBlock(x.shape[-1])(x, t)), t)
        for level, factor in reversed(list(enumerate((1, 2, 2)))):
            for _ in range(2):
                x = _TimedBlock(self.width * factor)(jnp.concatenate([x, kept.pop()], -1), t)
            if level:
                b, h, w, c = x.shape
                x = nn.Conv(c, (3, 3))(jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
        return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))


@model("DDPM U-Net", "linen", "hojonathanho/diffusion")
def ddpm() -> Family:
    noise = normal(4, 16, 16, 3, seed=5)
    time = jnp.asarray([10.0, 200.0, 500.0, 900.0])
    signal = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))[time.astype(int)][:, None, None, None]
    x = jnp.sqrt(signal) * images(4, 16) + jnp.sqrt(1 - signal) * noise
    return of_linen(_DiffusionUNet(), squared_error, (x, time), noise)


@model("DCGAN discriminator", "equinox", "pytorch/examples: dcgan")
def dcgan() -> Family:
    keys, widths = jax.random.split(KEY, 5), (3, 48, 96, 192)
    layers = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(eqx.nn.Conv2d(inputs, outputs, 4, 2, 1, use_bias=False, key=keys[i]))
        layers.append(eqx.nn.GroupNorm(8, outputs) if i else eqx.nn.Identity())
        layers.append(eqx.nn.Lambda(lambda x: jax.nn.leaky_relu(x, 0.2)))
    layers.append(eqx.nn.Conv2d(widths[-1], 1, 4, 1, 0, use_bias=False, key=keys[4]))
    batch = (jnp.moveaxis(images(16, 32), -1, 1), labels(2, 16).astype(jnp.float32))
    return of_equinox(eqx.nn.Sequential(layers), lambda net, e: binary_cross_entropy(net(e[0])[0, 0, 0], e[1]), batch)


@model("RealNVP", "haiku", "senya-ashukha/real-nvp-pytorch")
def real_nvp() -> Family:
    """Coupling layers: half of the coordinates scale and shift the other half, alternately."""
    size, width = 64, 256

    def loss(x):
        total = 0.0
        for step in range(6):
            keep = jnp.asarray((np.arange(size) + step) % 2, jnp.float32)
            scale = hk.nets.MLP([width, width, size], activation=jax.nn.leaky_relu)(x * keep)
            shift = hk.nets.MLP([width, width, size], activation=jax.nn.leaky_relu)(x * keep)
            scale = jnp.tanh(scale) * (1 - keep)
            x = keep * x + (1 - keep) * (x * jnp.exp(scale) + shift)
            total = total + jnp.sum(scale)
        return 0.5 * jnp.sum(x * x) + 0.5 * size * jnp.log(2 * jnp.pi) - total

    return of_haiku(loss, normal(64, size))


@model("MADE", "jax", "karpathy/pytorch-made")
def made() -> Family:
    """An autoencoder with masked weights: each output depends only on the inputs before it."""
    array, rng, sizes = Arrays(), np.random.default_rng(4), (784, 500, 500, 784)
    order = [np.arange(784), *(rng.integers(0, 783, n) for n in sizes[1:-1]), np.arange(784)]
    masks = [order[i][:, None] <= order[i + 1][None] for i in range(2)] + [order[2][:, None] < order[3][None]]
    params = array.mlp(sizes)

    def loss(params, x):
        h = x
        for i, (p, mask) in enumerate(zip(params, masks, strict=True)):
            h = h @ jnp.where(mask, p["w"], 0.0) + p["b"]
            h = jax.nn.relu(h) if i < 2 else h
        return 784 * binary_cross_entropy(h, x)

    return Family(loss, params, jnp.round(uniform(64, 784)))


class _MaskedConv(nn.Module):
    """Convolution over the pixels above and to the left, and over the pixel itself except in the first layer."""

    features: int
    size: int
    includes_itself: bool

    @nn.compact
    def __call__(self, x):
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        mask, middle = np.ones(shape, np.float32), self.size // 2
        mask[middle, middle + self.includes_itself :] = 0
        mask[middle + 1 :] = 0
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return conv2d(x, kernel * mask) + bias


class _PixelCNN(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, x):
        x = _MaskedConv(2 * self.width, 7, False)(x)
        for _ in range(4):
            h = nn.Conv(self.width, (1, 1))(nn.relu(x))
            h = _MaskedConv(self.width, 3, True)(nn.relu(h))
            x = x + nn.Conv(2 * self.width, (1, 1))(nn.relu(h))
        return nn.Conv(32, (1, 1))(nn.relu(nn.Conv(self.width, (1, 1))(nn.relu(x))))


@model("PixelCNN", "linen", "jzbontar/pixelcnn-pytorch")
def pixel_cnn() -> Family:
    grey = labels(32, 4, 24, 24)
    return of_linen(_PixelCNN(), cross_entropy, grey[..., None] / 16.0 - 1.0, grey)


class _UNet(nnx.Module):
    """Segmentation: convolutions down, transposed convolutions up, and skip connections across."""

    def __init__(self, classes: int, width: int = 24, *, rngs: nnx.Rngs):
        def double(inputs, outputs):
            return nnx.Sequential(
                nnx.Conv(inputs, outputs, (3, 3), rngs=rngs),
                nnx.GroupNorm(outputs, num_groups=8, rngs=rngs),
                nnx.relu,
                nnx.Conv(outputs, outputs, (3, 3), rngs=rngs),
                nnx.GroupNorm(outputs, num_groups=8, rngs=rngs),
                nnx.relu,
            )

        widths = [width, 2 * width, 4 * width]
        self.down = nnx.List([double(i, o) for i, o in zip([3, *widths], widths, strict=False)])
        self.bottom = double(widths[-1], 2 * widths[-1])
        self.widen = nnx.List([nnx.ConvTranspose(2 * w, w, (2, 2), strides=(2, 2), rngs=rngs) for w in widths])
        self.up = nnx.List([double(2 * w, w) for w in widths])
        self.head = nnx.Conv(width, classes, (1, 1), rngs=rngs)

    def __call__(self, x):
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = nnx.max_pool(kept[-1], (2, 2), (2, 2))
        x = self.bottom(x)
        for widen, block, across in reversed(list(zip(self.widen, self.up, kept, strict=True))):
            x = block(jnp.concatenate([across, widen(x)], -1))
        return self.head(x)


@model("U-Net, segmentation", "nnx", "milesial/Pytorch-UNet")
def unet() -> Family:
    return of_nnx(_UNet(5, rngs=nnx.Rngs(0)), cross_entropy, images(4, 32), labels(5, 4, 32, 32))
