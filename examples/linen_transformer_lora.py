"""Trains a linen Transformer on digits 0 to 4 publicly, then on 5 to 9 privately by LoRA adapters and a new head.

    python examples/linen_transformer_lora.py --epsilon 3

The eight rows of an image are its tokens. The base is frozen in private training: it gets no noise and has no optimizer
state. Needs dpopt[benchmarks] (scikit-learn).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpopt
import dpopt.flax

DELTA = 1e-4
WIDTH, HEADS, ROWS, CLASSES = 64, 4, 8, 5

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class LoRADense(nn.Module):
    """A matrix in the collection ``frozen`` and, if ``rank`` is positive, a trained product of two thin matrices."""

    features: int
    rank: int

    @nn.compact
    def __call__(self, x):
        shape, init = (x.shape[-1], self.features), nn.initializers.lecun_normal()
        y = x @ self.variable("frozen", "kernel", lambda: init(self.make_rng("params"), shape)).value
        if self.rank:
            a = self.param("a", init, (shape[0], self.rank))
            b = self.param("b", nn.initializers.zeros, (self.rank, self.features))  # the adapters start as zero
            y += (x @ a) @ b
        return y


class Transformer(nn.Module):
    """A small encoder with adapters on its attention; with rank 0, as the base is trained, it has none."""

    layers: int
    rank: int

    @nn.compact
    def __call__(self, x):
        def dense(features, name, rank=0):
            return LoRADense(features, rank, name=name)

        def split(x):
            return x.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS)

        norm = nn.LayerNorm(use_scale=False, use_bias=False)
        x = dense(WIDTH, "embed")(x)
        normal = nn.initializers.normal(0.02)
        x += self.variable("frozen", "positions", lambda: normal(self.make_rng("params"), (ROWS, WIDTH))).value
        for i in range(self.layers):
            q, k, v = jnp.split(dense(3 * WIDTH, f"qkv{i}", self.rank)(norm(x)), 3, axis=-1)
            attended = jax.nn.dot_product_attention(split(q), split(k), split(v)).reshape(x.shape)
            x += dense(WIDTH, f"out{i}", self.rank)(attended)
            x += dense(WIDTH, f"down{i}")(nn.gelu(dense(2 * WIDTH, f"up{i}")(norm(x))))
        return nn.Dense(CLASSES, name="head")(norm(x).mean(-2))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0, help="budget of private training (default 3)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--public-steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters (default 4)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, help="makes the run repeatable; without it the noise key is secret")
    options = parser.parse_args(argv)

    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target
    is_public = labels < CLASSES
    public_x, public_y = images[is_public], labels[is_public]
    train_x, test_x, train_y, test_y = train_test_split(
        images[~is_public], labels[~is_public] - CLASSES, test_size=0.2, random_state=0
    )

    # Publicly: train everything, without noise.
    base = Transformer(options.layers, rank=0)
    rng = np.random.default_rng(0)
    chosen = (rng.integers(len(public_x), size=64) for _ in range(options.public_steps))
    trained = dpopt.warm_start(
        lambda variables, example: cross_entropy(base.apply(variables, example[0][None])[0], example[1]),
        jax.jit(base.init)(jax.random.key(0), images[:1]),
        ((public_x[rows], public_y[rows]) for rows in chosen),
        optimizer=optax.adam(1e-3),
    )

    # Privately: train adapters and a new head.
    model = Transformer(options.layers, rank=options.rank)
    params = jax.jit(model.init)(jax.random.key(1), images[:1])["params"]
    loss_fn = dpopt.flax.linen_loss(model, cross_entropy, variables={"frozen": trained["frozen"]})
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, trained["frozen"])]
    print("{} parameters are trained in private, {} are frozen".format(*sizes))

    plan = (
        dpopt.Builder(
            num_examples=len(train_x),
            expected_batch_size=100,
            steps=options.steps,
            key=dpopt.secure_key() if options.seed is None else jax.random.key(options.seed),
            pad_to=128,  # so that jit compiles once
        )
        .clip(1.0)
        .budget(epsilon=options.epsilon, delta=DELTA)
        .then(optax.adam(optax.linear_schedule(1e-2, 0.0, options.steps)))
        .build()
    )
    print(plan.summary(params))
    result = plan.run(loss_fn, params, lambda rows: (train_x[rows], train_y[rows]))

    logits = jax.jit(model.apply)({"params": result.params, "frozen": trained["frozen"]}, test_x)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == test_y)
    print(f"epsilon {result.epsilon(delta=DELTA):.2f} at delta {DELTA:g}, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
