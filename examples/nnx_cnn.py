"""Trains a CNN in Flax NNX on handwritten digits within a privacy budget.

    python examples/nnx_cnn.py --epsilon 3

The plan calibrates the noise, draws Poisson batches, and stops at the budget. Needs dpopt[benchmarks] (scikit-learn).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpopt
import dpopt.flax

DELTA = 1e-4  # well below one over the number of training images


class CNN(nnx.Module):
    """Two convolutions and a dense layer. tanh keeps all gradients in a similar range, so less is clipped."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.tanh(self.conv1(x))
        x = nnx.tanh(self.conv2(x))
        return self.dense(x.reshape(x.shape[0], -1))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0, help="budget of the whole run (default 3)")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, help="makes the run repeatable; without it the noise key is secret")
    options = parser.parse_args(argv)

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)  # pixels go from 0 to 16 by definition
    train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=0.2, random_state=0)

    model = CNN(rngs=nnx.Rngs(0))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    loss_fn, params = dpopt.flax.nnx_loss(model, lambda m, batch: cross_entropy(m(batch[0]), batch[1]).mean())

    plan = (
        dpopt.Builder(
            num_examples=len(train_x),
            expected_batch_size=200,
            steps=options.steps,
            key=dpopt.secure_key() if options.seed is None else jax.random.key(options.seed),
            pad_to=256,  # so that jit compiles once
        )
        .clip(1.0)
        .budget(epsilon=options.epsilon, delta=DELTA)
        .then(optax.adam(optax.linear_schedule(5e-3, 0.0, options.steps)))
        .build()
    )
    print(plan.summary(params))
    result = plan.run(loss_fn, params, lambda rows: (train_x[rows], train_y[rows]))

    nnx.update(model, result.params)
    accuracy = jnp.mean(jnp.argmax(model(test_x), -1) == test_y)
    print(f"epsilon {result.epsilon(delta=DELTA):.2f} at delta {DELTA:g}, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
