"""Every coverage item lowers for GPUs and TPUs, planned as on such devices. None has to be present."""

import ghost_cases
import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest
from ghost_check import leaf_clip
from helpers import slow_unless

import dpopt
from dpopt import ghost

_PLATFORMS = ["cuda", "tpu"]
_QUICK = {
    ghost_cases.conv2d, ghost_cases.embedding_out_of_range, ghost_cases.lstm, ghost_cases.remat,
    ghost_cases.weight_standardized_gram,
}  # fmt: skip
CASES = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in _QUICK else pytest.mark.slow) for case in ghost_cases.CASES],
    ids=lambda case: case.__name__,
)


@pytest.fixture(autouse=True)
def on_an_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")


def lowered(function, *args):
    with jax.numpy_rank_promotion("allow"):
        exported = jax.export.export(jax.jit(function), platforms=_PLATFORMS)(*args)
    assert tuple(exported.platforms) == tuple(_PLATFORMS)
    return exported


@CASES
@pytest.mark.parametrize("way", slow_unless({"recorded", "one pass"}, ["recorded", "two passes", "one pass"]))
@pytest.mark.one_in(10)
def test_clipped_sums_lower(case, way):
    loss_fn, params, batch = case(ghost_cases.Arrays())

    def total(params, batch, mask):
        plan = ghost.plan_clipped_sum(loss_fn, params, batch)
        limits = [0.7] * len(plan.leaves) if way == "one pass" else []
        if way != "recorded":
            plan = plan.streaming(ghost.single_parameters(plan, limits, []))
        return ghost.clipped_sum(
            loss_fn, params, batch, coefficients=leaf_clip(0.7), mask=mask, plan=plan, limits=limits
        ).sum

    size = jax.tree.leaves(batch)[0].shape[0]
    out = lowered(total, params, batch, jnp.ones(size, bool)).out_avals
    assert [x.shape for x in out] == [p.shape for p in jax.tree.leaves(params)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_private_step_lowers(impl):
    """The step includes noise and metrics."""
    loss_fn, params, batch = ghost_cases.dense(ghost_cases.Arrays())
    key = jax.random.key(0, impl=impl)
    optimizer = dpopt.dp_adam(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=key)
    state = optimizer.init(params)

    def step(params, batch):
        grads = dpopt.per_example_grads(loss_fn)(params, batch, mask=None)
        updates, _ = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates)

    lowered(step, params, batch)
