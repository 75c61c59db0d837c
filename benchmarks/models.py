"""Models of the benchmarks, in Flax."""

import jax
from flax import nnx


class SmallCNN(nnx.Module):
    """Two convolutions and a dense layer for 8 x 8 images; tanh, which suits clipped gradients better than relu."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.tanh(self.conv1(x))
        x = nnx.tanh(self.conv2(x))
        return self.dense(x.reshape(x.shape[0], -1))
