"""Trains an Equinox GRU that reads digits row by row, in an ordinary training loop with three changes.

    python examples/equinox_model.py --epsilon 3

Equinox models take single examples, as dpopt needs, so there is no adapter. Needs equinox and scikit-learn (dpopt[dev]
has both).
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpopt

DELTA = 1e-4
BATCH_SIZE = 200


class Reader(eqx.Module):
    """A GRU over the rows of an image, and a linear layer on its last state."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array, hidden: int = 48):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, hidden, key=keys[0])
        self.head = eqx.nn.Linear(hidden, 10, key=keys[1])

    def __call__(self, image: jax.Array) -> jax.Array:
        state = jnp.zeros(self.cell.hidden_size)
        state, _ = jax.lax.scan(lambda state, row: (self.cell(row, state), None), state, image)
        return self.head(state)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0, help="budget of the whole run (default 3)")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, help="makes the run repeatable; without it noise and batches are secret")
    options = parser.parse_args(argv)

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=0.2, random_state=0)

    params, static = eqx.partition(Reader(key=jax.random.key(0)), eqx.is_inexact_array)

    def loss_fn(params, example):
        image, label = example
        return optax.softmax_cross_entropy_with_integer_labels(eqx.combine(params, static)(image), label)

    # The batches: Poisson samples, whose seed is as secret as the noise.
    key = dpopt.secure_key() if options.seed is None else jax.random.key(options.seed)
    seed = dpopt.secure_seed() if options.seed is None else options.seed
    sampler = dpopt.PoissonSampler(len(train_x), BATCH_SIZE, seed=seed, pad_to=256)

    # The optimizer: a named one, with noise calibrated to the budget.
    noise_multiplier = dpopt.calibrate(
        epsilon=options.epsilon, delta=DELTA, sampling_prob=sampler.scheme.sampling_prob, steps=options.steps
    )
    optimizer = dpopt.dp_adam_bc(
        optax.linear_schedule(1e-2, 0.0, options.steps),
        l2_clip_norm=1.0,
        noise_multiplier=noise_multiplier,
        expected_batch_size=BATCH_SIZE,
        key=key,
        gamma=1e-5,  # floor of the corrected second moment; with the learning rate it bounds a step
    )

    @jax.jit
    def step(params, state, batch, mask):
        grads = dpopt.per_example_grads(loss_fn)(params, batch, mask=mask)  # the gradients: a promise
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for t in range(options.steps):
        rows, mask = sampler.batch(t)
        params, state = step(params, state, (train_x[rows], train_y[rows]), mask)

    event = dpopt.privacy_event(optimizer, sampling=sampler, steps=options.steps)
    logits = jax.vmap(eqx.combine(params, static))(test_x)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == test_y)
    print(f"epsilon {dpopt.epsilon_of_event(event, delta=DELTA):.2f} at delta {DELTA:g}, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
