"""Models of fields, differential equations and scenes."""

import itertools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.cost.families import Family
from benchmarks.zoo.data import images, normal, uniform
from benchmarks.zoo.entries import KEY, model, of_equinox, of_haiku, of_linen
from benchmarks.zoo.layers import Arrays, mlp, squared_error


@model("Physics-informed network, Burgers", "jax", "maziarraissi/PINNs")
def pinn() -> Family:
    """The loss contains first and second derivatives of the network at each point."""
    params = Arrays().mlp((2, 128, 128, 128, 128, 1))

    def network(params, t, x):
        return mlp(params, jnp.stack([t, x]), jnp.tanh)[0]

    def residual(params, t, x):
        u = network(params, t, x)
        u_t, u_x = jax.grad(network, argnums=(1, 2))(params, t, x)
        u_xx = jax.grad(jax.grad(network, argnums=2), argnums=2)(params, t, x)
        return u_t + u * u_x - (0.01 / jnp.pi) * u_xx

    def loss(params, example):
        """An example is 16 points inside the domain and one at time 0."""
        points, x = example
        inside = jnp.mean(jax.vmap(lambda p: residual(params, p[0], p[1]))(points) ** 2)
        return inside + (network(params, 0.0, x) + jnp.sin(jnp.pi * x)) ** 2

    points = uniform(32, 16, 2) * jnp.asarray([1.0, 2.0]) - jnp.asarray([0.0, 1.0])
    return Family(loss, params, (points, 2 * uniform(32, seed=3) - 1))


class _SpectralConv(nn.Module):
    """Multiplies the lowest frequencies by complex matrices, one per frequency."""

    modes: int = 8

    @nn.compact
    def __call__(self, x):
        _b, h, w, c = x.shape
        spectrum = jnp.fft.rfft2(x, axes=(1, 2))
        out = jnp.zeros_like(spectrum)
        for name, rows in (("low", slice(0, self.modes)), ("high", slice(h - self.modes, h))):
            shape = (self.modes, self.modes, c, c)
            real, imaginary = (
                self.param(f"{name}_{part}", nn.initializers.normal(1 / c), shape) for part in ("re", "im")
            )
            kept = spectrum[:, rows, : self.modes]
            mixed = jnp.einsum("bxyi,xyio->bxyo", kept, jax.lax.complex(real, imaginary))
            out = out.at[:, rows, : self.modes].set(mixed)
        return jnp.fft.irfft2(out, (h, w), axes=(1, 2))


class _FNO(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, x):
        b, h, w, _ = x.shape
        grid = jnp.stack(jnp.meshgrid(jnp.linspace(0, 1, h), jnp.linspace(0, 1, w), indexing="ij"), -1)
        x = nn.Dense(self.width)(jnp.concatenate([x, jnp.broadcast_to(grid, (b, h, w, 2))], -1))
        for layer in range(4):
            x = _SpectralConv()(x) + nn.Conv(self.width, (1, 1))(x)
            x = nn.gelu(x) if layer < 3 else x
        return nn.Dense(1)(nn.gelu(nn.Dense(128)(x)))


@model("Fourier neural operator", "linen", "neuraloperator/neuraloperator")
def fno() -> Family:
    def relative_error(found, wanted):
        return jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)

    return of_linen(_FNO(), relative_error, images(4, 32, 1), normal(8, 32, 32, 1)[4:])


class _NeRF(eqx.Module):
    """Colour and density at a point, viewed from a direction."""

    trunk: list[eqx.nn.Linear]
    density: eqx.nn.Linear
    feature: eqx.nn.Linear
    view: eqx.nn.Linear
    colour: eqx.nn.Linear

    def __init__(self, width, *, key):
        keys = jax.random.split(key, 10)
        sizes = [63, width, width, width, width + 63, width]
        self.trunk = [eqx.nn.Linear(i, width, key=k) for i, k in zip(sizes, keys, strict=False)]
        self.density, self.feature = eqx.nn.Linear(width, 1, key=keys[6]), eqx.nn.Linear(width, width, key=keys[7])
        self.view = eqx.nn.Linear(width + 27, width // 2, key=keys[8])
        self.colour = eqx.nn.Linear(width // 2, 3, key=keys[9])

    def __call__(self, point, direction):
        def encoded(x, frequencies):
            angles = (x[:, None] * 2.0 ** jnp.arange(frequencies)).reshape(-1)
            return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)])

        start = encoded(point, 10)
        h = start
        for i, layer in enumerate(self.trunk):
            h = jax.nn.relu(layer(jnp.concatenate([h, start]) if i == 4 else h))
        seen = jnp.concatenate([self.feature(h), encoded(direction, 4)])
        return jax.nn.sigmoid(self.colour(jax.nn.relu(self.view(seen)))), jax.nn.softplus(self.density(h)[0] - 1)


@model("NeRF", "equinox", "bmild/nerf")
def nerf() -> Family:
    """An example is a ray: the points along it are rendered into one colour."""
    depths = jnp.linspace(2.0, 6.0, 48)

    def loss(net, example):
        origin, direction, wanted = example
        colours, density = jax.vmap(net, (0, None))(origin + depths[:, None] * direction, direction)
        opacity = 1 - jnp.exp(-density * (depths[1] - depths[0]))
        clear = jnp.concatenate([jnp.ones(1), jnp.cumprod(1 - opacity[:-1] + 1e-10)])
        return squared_error(jnp.sum((opacity * clear)[:, None] * colours, 0), wanted)

    directions = normal(32, 3)
    directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
    return of_equinox(_NeRF(128, key=KEY), loss, (uniform(32, 3), directions, uniform(32, 3, seed=3)))


@model("DeepONet", "haiku", "lululxvi/deepxde")
def deeponet() -> Family:
    """One network reads a function at fixed points, another reads the query points; their product is the output."""

    def loss(example):
        function, places, values = example
        branch = hk.nets.MLP([256, 256, 256], activation=jnp.tanh, name="branch")(function)
        trunk = hk.nets.MLP([256, 256, 256], activation=jnp.tanh, activate_final=True, name="trunk")(places)
        bias = hk.get_parameter("bias", (), init=jnp.zeros)
        return squared_error(trunk @ branch + bias, values)

    return of_haiku(loss, (normal(32, 100), uniform(32, 20, 1), normal(64, 20)[32:]))


@model("Neural ODE", "equinox", "patrick-kidger/diffrax: examples/neural_ode")
def neural_ode() -> Family:
    """A trajectory by fourth-order Runge-Kutta steps, with the same weights at every step."""
    net, step = eqx.nn.MLP(4, 4, 256, 2, jax.nn.softplus, key=KEY), 0.1

    def loss(net, series):
        def advance(y, _):
            k1 = net(y)
            k2 = net(y + step / 2 * k1)
            k3 = net(y + step / 2 * k2)
            k4 = net(y + step * k3)
            y = y + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        _, found = jax.lax.scan(advance, series[0], length=len(series) - 1)
        return squared_error(found, series[1:])

    return of_equinox(net, loss, normal(32, 24, 4))


@model("SIREN", "jax", "vsitzmann/siren")
def siren() -> Family:
    """An image as a function of position, with sine activations; also fitted to the image's gradients."""
    rng, widths = np.random.default_rng(0), (2, 256, 256, 256, 1)
    params = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        bound = 1 / inputs if i == 0 else (6 / inputs) ** 0.5 / 30
        w, b = (rng.uniform(-bound, bound, shape) for shape in ((inputs, outputs), (outputs,)))
        params.append({"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray(b, jnp.float32)})

    def network(params, place):
        return mlp(params, place, lambda h: jnp.sin(30 * h))[0]

    def loss(params, example):
        """An example is a patch of 16 pixels."""
        places, values, slopes = example
        found, slope = jax.vmap(jax.value_and_grad(network, argnums=1), (None, 0))(params, places)
        return squared_error(found, values) + 1e-2 * squared_error(slope, slopes)

    return Family(loss, params, (2 * uniform(32, 16, 2) - 1, uniform(32, 16, seed=3), normal(32, 16, 2)))
