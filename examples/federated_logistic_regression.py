"""Logistic regression over many clients with a few digits each, with privacy for a client and all its data.

    python examples/federated_logistic_regression.py --epsilon 8

The real digits are dealt out so that a client has few of the ten classes, as in practice. In each round a Poisson
sample of clients trains locally, their changes are clipped, and noise is added to the sum. Needs scikit-learn, as in
dpopt[benchmarks].
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpopt
from dpopt import federated

DELTA = 1e-3  # below one over the number of clients
EXAMPLES = 4  # per client


def deal(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sorts by class and deals two runs of two images to each client. Returns arrays ``(clients, examples, ...)``."""
    order = np.argsort(y, kind="stable")
    runs = order[: len(order) // EXAMPLES * EXAMPLES].reshape(-1, EXAMPLES // 2)
    rows = rng.permutation(runs).reshape(-1, EXAMPLES)
    return x[rows], y[rows]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=8.0, help="budget of the whole run (default 8)")
    parser.add_argument("--steps", type=int, default=40, help="rounds (default 40)")
    parser.add_argument("--clients", type=int, default=120, help="expected number of clients in a round (default 120)")
    parser.add_argument("--seed", type=int, help="makes the run repeatable; without it noise and batches are secret")
    options = parser.parse_args(argv)

    digits = load_digits()
    pixels = (digits.data / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(pixels, digits.target, test_size=0.2, random_state=0)
    clients_x, clients_y = deal(train_x, train_y, np.random.default_rng(0))
    num_clients = len(clients_x)

    def loss_fn(params, example):
        features, label = example
        logits = features @ params["w"] + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    key = dpopt.secure_key() if options.seed is None else jax.random.key(options.seed)
    seed = dpopt.secure_seed() if options.seed is None else options.seed
    sampler = dpopt.PoissonSampler(num_clients, options.clients, seed=seed, pad_to=64)  # of clients
    noise_multiplier = dpopt.calibrate(
        epsilon=options.epsilon, delta=DELTA, sampling_prob=sampler.scheme.sampling_prob, steps=options.steps
    )
    deltas = federated.client_deltas(loss_fn, local_steps=5, local_learning_rate=0.5)
    server = federated.client_level(
        dpopt.dp_sgd(
            1.0,
            l2_clip_norm=0.5,
            noise_multiplier=noise_multiplier,
            expected_batch_size=options.clients,
            key=key,
            momentum=0.9,
        )
    )

    @jax.jit
    def one_round(params, state, clients, mask):
        updates, state = server.update(deltas(params, clients, mask=mask), state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    state = server.init(params)
    for t in range(options.steps):
        rows, mask = sampler.batch(t)
        params, state = one_round(params, state, (clients_x[rows], clients_y[rows]), mask)

    event = dpopt.privacy_event(server, sampling=sampler, steps=options.steps)
    spent = dpopt.epsilon_of_event(event, delta=DELTA)
    accuracy = jnp.mean(jnp.argmax(test_x @ params["w"] + params["b"], -1) == test_y)
    print(f"epsilon {spent:.2f} at delta {DELTA:g} for one {server.privacy.unit} of {num_clients}, "
          f"test accuracy {accuracy:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
