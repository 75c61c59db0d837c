"""Every diagonal with every rule after the noise, including combinations that are in no paper.

One compiled scan a pair does all: it trains a small logistic regression through a batch with a NaN example and through
an empty batch, and so shows that the pair jits, scans (state of fixed shapes and dtypes), keeps the parameters' dtypes,
and learns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import paid, slow_unless

import dpopt
from dpopt import events

STEPS, BATCH = 40, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, BATCH, 6)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5, 0.0, 1.0, -1.0]) > 0).astype(np.float32)

DIAGONALS = {
    "none": None,
    "side_information": dpopt.side_information({"w": np.linspace(0.5, 2.0, 6), "b": 1.0}),
    "public_moments": dpopt.public_moments(decay=0.9, eps=0.1),
    "delayed_moments": dpopt.delayed_moments((3, 4), eps=0.1, adaptive_clip_ratio=2.0),
    "last_moments": dpopt.last_moments(b2=0.99, eps_scale=0.1),
}
RULES = {
    "sgd": lambda: (optax.sgd(0.3),),
    "momentum": lambda: (optax.sgd(0.1, momentum=0.9),),
    "adam": lambda: (optax.adam(0.05),),
    "adam_bc": lambda: (dpopt.scale_by_adam_bc(gamma=1e-4), optax.scale_by_learning_rate(0.05)),
    "rmsprop": lambda: (optax.rmsprop(0.02, eps=1e-3),),
    "micro_adam": lambda: (dpopt.scale_by_micro_adam(density=0.5), optax.scale_by_learning_rate(0.02)),
}


def loss_fn(params, example):
    x, y = example
    return optax.sigmoid_binary_cross_entropy(x.astype(params["w"].dtype) @ params["w"] + params["b"], y)


def mean_loss(params, x, y):
    return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, (x, y)))


PAIRS = [(diagonal, rule, "float32") for diagonal in DIAGONALS for rule in RULES]
PAIRS += [("delayed_moments", "adam_bc", "bfloat16"), ("last_moments", "micro_adam", "bfloat16")]
ADAPTIVE = [(diagonal, "adam_bc", "float32") for diagonal in DIAGONALS] + [("none", "micro_adam", "bfloat16")]


@pytest.mark.parametrize("pair", slow_unless(PAIRS[::2], PAIRS), ids="-".join)
@pytest.mark.one_in(16)
def test_a_diagonal_and_a_rule_train_together(pair):
    train_together(*pair, clip=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ADAPTIVE, ids="-".join)
def test_they_do_with_an_adaptive_clip_norm(pair):
    train_together(*pair, clip=dpopt.adaptive.quantile_clip({"w": 0.3, "b": 0.1}, count_share=0.1))


def train_together(diagonal, rule, dtype, *, clip):
    optimizer = dpopt.chain(
        dpopt.privatize(
            l2_clip_norm=clip,
            noise_multiplier=0.3,
            expected_batch_size=BATCH,
            key=jax.random.key(1),
            preconditioner=DIAGONALS[diagonal],
        ),
        *RULES[rule](),
    )
    params = {"w": jnp.zeros(6, dtype), "b": jnp.zeros((), dtype)}
    state = optimizer.init(params)
    x = X.copy()
    x[5, 3] = np.nan
    mask = np.ones((STEPS, BATCH), bool)
    mask[7] = False
    public = (jnp.asarray(X[0]), jnp.asarray(Y[0]))

    @jax.jit
    def train(params, state):
        def step(carry, batch):
            params, state = carry
            x, y, mask = batch
            grads = dpopt.per_example_grads(loss_fn, engine="vmap")(params, (x, y), mask=mask)
            extra = {"public_grads": jax.grad(mean_loss)(params, *public)} if diagonal == "public_moments" else {}
            updates, state = optimizer.update(grads, state, params, **extra)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), (x, Y, mask))[0]

    new_params, new_state = train(params, state)
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), new_params, params)
    assert jax.tree.map(jnp.shape, new_state) == jax.tree.map(jnp.shape, state)
    assert events.merged(optimizer.privacy.step_event()).noise_multiplier == pytest.approx(paid(0.3))
    before, after = (float(mean_loss(p, X.reshape(-1, 6), Y.reshape(-1))) for p in (params, new_params))
    assert after < 0.9 * before, (before, after)
