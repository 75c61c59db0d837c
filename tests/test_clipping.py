import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RTOL32, RTOL64, assert_near, distance, dot_loss, enable_x64, loop_clipped_sum, norm, random_tree
from hypothesis import given
from hypothesis import strategies as st

import dpopt
from dpopt.clipping import FlatClip, GroupClip, NormalizedClip, clip_and_sum
from dpopt.engines import stacked
from dpopt.gradients import stacked_grads

# Entries of an example's gradient: ordinary, zero, denormal, huge, NaN and infinite.
ENTRIES = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-20, 1e30, -1e30, 3.4e38, np.nan, np.inf, -np.inf]),
)
FINITE_SIZES = st.sampled_from([1e-30, 1e-3, 0.5, 1.0, 7.3, 1e4, 1e30])


def batches(size):
    return st.lists(st.lists(ENTRIES, min_size=5, max_size=5), min_size=size, max_size=size).map(
        lambda values: np.array(values, np.float32)
    )


def as_tree(values):
    return {"a": values[:, :3], "b": values[:, 3:]}


@jax.jit
def flat_sum(grads, mask, c):
    return stacked_grads(grads, mask=mask).clipped_sum(FlatClip(c)).sum


@given(st.integers(0, 2**31), FINITE_SIZES)
def test_clip_and_sum_equals_a_loop(seed, c):
    grads = random_tree(seed, batch=6)
    transformation = clip_and_sum(c)
    total, _ = transformation.update(grads, transformation.init(random_tree(0)), random_tree(0))
    # Terms may cancel: the error is relative to the sum of their norms, at most 6 C.
    clipped = min(6 * c, 6 * max(norm(jax.tree.map(lambda g, i=i: g[i], grads)) for i in range(6)))
    assert distance(total, loop_clipped_sum(grads, c)) <= RTOL32 * clipped


def test_clip_and_sum_equals_a_loop_in_relative_error():
    update = jax.jit(clip_and_sum(2.0).update)
    for seed in range(5):
        grads = random_tree(seed, batch=64)
        total, _ = update(grads, optax.EmptyState(), random_tree(0))
        assert_near(total, loop_clipped_sum(grads, 2.0))


def test_clip_and_sum_equals_a_loop_in_64_bits(x64):
    grads = jax.tree.map(lambda g: g.astype(np.float64), random_tree(0, batch=64))
    total, _ = jax.jit(clip_and_sum(2.0).update)(grads, optax.EmptyState(), random_tree(0))
    assert_near(total, loop_clipped_sum(grads, 2.0), RTOL64)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e18, 1e30, 1e37])
def test_norms_do_not_overflow_or_underflow(size):
    grads = np.full((1, 4), size, np.float32)  # squares are outside float32's range
    total, _ = clip_and_sum(size).update(grads, optax.EmptyState(), grads[0])
    assert_near(total, loop_clipped_sum(grads, size))


def test_a_long_gradient_keeps_its_norm():
    grads = np.random.default_rng(0).normal(size=(1, 3_000_000)).astype(np.float32)
    total, _ = clip_and_sum(1.0).update(grads, optax.EmptyState(), grads[0])
    assert abs(norm(total) - 1) <= RTOL32


CLIPS = {
    "flat": FlatClip(0.7),
    "tiny flat": FlatClip(1e-6),
    "per leaf": GroupClip({"a": 0.5, "b": 1.2}),
    "one group": GroupClip(0.9),
    "normalised": NormalizedClip(0.7),
    "normalised, tiny gamma": NormalizedClip(2.0, gamma=1e-12),
}


@functools.cache
def summing(clip_name):
    clip = CLIPS.get(clip_name) or WRONG_CLIPS[clip_name]
    return jax.jit(lambda grads, mask: stacked_grads(grads, mask=mask).clipped_sum(clip).sum), clip.sensitivity


@functools.cache
def summing_by_engine(engine):
    grads = dpopt.per_example_grads(dot_loss, engine=engine)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    return jax.jit(lambda batch, mask: grads(params, batch, mask=mask).clipped_sum(FlatClip(0.7)).sum), 0.7


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["vmap", "auto"])
@given(batches(4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_bound_holds_for_gradients_of_a_loss(engine, values, mask):
    check_sensitivity(*summing_by_engine(engine), values, np.array(mask))


def check_sensitivity(run, bound, values, mask):
    """Removing any one example, by masking it or by deleting its row, moves the sum by at most the sensitivity."""
    whole = run(as_tree(values), mask)
    assert all(np.isfinite(leaf).all() for leaf in whole.values())
    for i in range(len(values)):
        masked = run(as_tree(values), mask & (np.arange(len(values)) != i))
        deleted = run(as_tree(np.delete(values, i, axis=0)), np.delete(mask, i))
        for without in (masked, deleted):
            assert distance(whole, without) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("clip_name", CLIPS)
@given(batches(4), st.lists(st.booleans(), min_size=4, max_size=4))
@pytest.mark.one_in(6)
def test_adding_or_removing_one_example_moves_the_sum_by_at_most_the_sensitivity(clip_name, values, mask):
    check_sensitivity(*summing(clip_name), values, np.array(mask))


@dataclasses.dataclass(frozen=True)
class EachLeafToC:
    """Wrong: clips every leaf to C, with a stated sensitivity of C."""

    sensitivity: float = 0.7

    def coefficients(self, leaf_norms):
        return jax.tree.map(lambda n: jnp.minimum(1.0, self.sensitivity / n), leaf_norms)


@dataclasses.dataclass(frozen=True)
class FlooredNorm:
    """Wrong: a stability constant that keeps small denominators, and an example a per mille above the bound."""

    sensitivity: float = 0.7

    def coefficients(self, leaf_norms):
        c = jnp.minimum(1.0, self.sensitivity / (stacked.global_norms(leaf_norms) * 0.999))
        return jax.tree.map(lambda _: c, leaf_norms)


WRONG_CLIPS = {"each leaf": EachLeafToC(), "floored": FlooredNorm()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clip_name", WRONG_CLIPS)
def test_the_sensitivity_check_has_power(clip_name):
    with pytest.raises(AssertionError):
        check_sensitivity(*summing(clip_name), np.full((3, 5), 4.0, np.float32), np.ones(3, bool))


@given(batches(3), st.sampled_from([1e-3, 1.0, 50.0]))
def test_the_bound_holds_after_a_diagonal_and_an_offset(values, size):
    scale = {"a": np.array([size, 1.0, 1e6], np.float32), "b": np.float32(size)}
    clip = FlatClip(0.7)

    def run(values):
        return stacked_grads(as_tree(values), mask=None).scale(scale).shift(3.0).clipped_sum(clip).sum

    for i in range(3):
        assert distance(run(values), run(np.delete(values, i, axis=0))) <= 0.7 * (1 + 1e-6)


@given(batches(5))
def test_the_bound_holds_in_64_bits_to_the_last_digits(values):
    with enable_x64(True):
        values = values.astype(np.float64)
        whole = flat_sum(as_tree(values), np.ones(5, bool), 0.7)
        for i in range(5):
            assert distance(whole, flat_sum(as_tree(values), np.arange(5) != i, 0.7)) <= 0.7 * (1 + RTOL64)


@pytest.mark.slow
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_examples_do_not_interact(seed, other):
    """What an example adds does not depend on the other examples."""
    grads, others = random_tree(seed, batch=1), random_tree(other, batch=3)
    both = jax.tree.map(lambda a, b: np.concatenate([a, b]), grads, others)
    alone = loop_clipped_sum(grads, 0.5)
    with_others = stacked_grads(both, mask=None).clipped_sum(FlatClip(0.5)).sum
    only_others = stacked_grads(others, mask=None).clipped_sum(FlatClip(0.5)).sum
    assert distance(jax.tree.map(np.subtract, with_others, only_others), alone) <= 4 * 0.5 * RTOL32


def test_group_clip_clips_each_group_alone():
    grads = {"a": {"x": np.array([[3.0]]), "y": np.array([[4.0]])}, "b": np.array([[0.3]])}
    total = stacked_grads(grads, mask=None).clipped_sum(GroupClip({"a": 1.0, "b": 0.1})).sum
    assert_near(total, {"a": {"x": np.array([0.6]), "y": np.array([0.8])}, "b": np.array([0.1])})
    assert GroupClip({"a": 1.0, "b": 0.1}).sensitivity == pytest.approx(math.hypot(1.0, 0.1))


@pytest.mark.slow
def test_group_clip_of_one_group_is_a_flat_clip():
    grads = random_tree(0, batch=5)
    one, flat = (stacked_grads(grads, mask=None).clipped_sum(c).sum for c in (GroupClip(0.8), FlatClip(0.8)))
    assert_near(one, flat)


def test_normalised_clip_follows_its_formula():
    total = stacked_grads(np.array([[3.0, 4.0]], np.float32), mask=None).clipped_sum(NormalizedClip(2.0, gamma=0.5)).sum
    assert_near(total, np.array([3.0, 4.0]) * 2.0 / 5.5)


def test_an_infinite_clip_norm_sums_unchanged():
    grads = random_tree(0, batch=5)
    total, _ = clip_and_sum(math.inf).update(grads, optax.EmptyState(), random_tree(0))
    assert_near(total, jax.tree.map(lambda g: g.astype(np.float64).sum(0), grads))


def test_zero_gradients_stay_zero():
    for clip in CLIPS.values():
        total = stacked_grads(as_tree(np.zeros((2, 5), np.float32)), mask=None).clipped_sum(clip).sum
        assert norm(total) == 0.0


@pytest.mark.parametrize("make", [clip_and_sum, FlatClip, GroupClip, NormalizedClip])
@pytest.mark.parametrize(
    ("c", "error", "shown"),
    [
        (-1.0, ValueError, "-1.0"),
        (1e-31, ValueError, "1e-31"),
        (math.nan, ValueError, "nan"),
        (jnp.float32(-2.0), ValueError, "-2.0"),
        ("1", TypeError, "'1'"),
        (None, (TypeError, ValueError), "l2_clip_norm"),
        (True, TypeError, "True"),
        (1j, TypeError, "1j"),
    ],
)
def test_a_bad_clip_norm_is_refused_and_shown(make, c, error, shown):
    with pytest.raises(error, match="l2_clip_norm") as caught:
        make(c)
    assert shown in str(caught.value)


@pytest.mark.parametrize("make", [GroupClip, NormalizedClip])
def test_only_a_flat_clip_may_be_infinite(make):
    with pytest.raises(ValueError, match="finite"):
        make(math.inf)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("engine", ["vmap", "ghost"])
@pytest.mark.parametrize(
    "clip",
    [FlatClip(0.0), GroupClip({"a": 0.0, "b": 0.0}), dpopt.LayerwiseClip(0.0), NormalizedClip(0.0, gamma=0.1)],
    ids=lambda clip: type(clip).__name__,
)
def test_a_clip_norm_of_zero_leaves_nothing(engine, clip):
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["a"]) * p["b"])  # noqa: E731
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
    batch = jnp.asarray([[1.0, 2, 3], [np.inf, 0, 0], [0, 0, 0]])
    total = dpopt.per_example_grads(loss, engine=engine)(params, batch, mask=None).clipped_sum(clip)
    assert clip.sensitivity == 0 and norm(total.sum) == 0


def test_a_group_of_clip_norm_zero_is_left_out():
    grads = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 4))}
    clip = GroupClip({"a": 0.0, "b": 1.0})
    total = stacked_grads(grads, mask=None).clipped_sum(clip).sum
    assert clip.sensitivity == 1.0 and norm(total["a"]) == 0
    assert_near(norm(total["b"]), 2.0)


def test_there_is_no_noise_for_a_clip_norm_of_zero():
    with pytest.raises(ValueError, match="scales every example to zero"):
        dpopt.dp_sgd(0.1, l2_clip_norm=0.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    with pytest.raises(ValueError, match="scales every example to zero"):
        dpopt.chain(
            clip_and_sum(0.0), dpopt.add_gaussian_noise(1.0, jax.random.key(0)), dpopt.normalize_by(4), optax.sgd(0.1)
        )


def test_a_group_tree_that_does_not_fit_is_refused():
    for groups in ({"a": 1.0}, {"a": 1.0, "c": 1.0}, [1.0, 1.0]):
        with pytest.raises(ValueError, match="prefix of the parameters' tree"):
            stacked_grads(as_tree(np.ones((2, 5))), mask=None).clipped_sum(GroupClip(groups))


@pytest.mark.parametrize(
    ("updates", "params", "message"),
    [
        ({"w": np.ones((3, 2))}, {"w": np.ones(2), "b": np.ones(2)}, "tree structure"),
        ({"w": np.ones(2)}, {"w": np.ones(2)}, r"\['w'\] has shape \(2,\) for a parameter of shape \(2,\)"),
        ({"w": np.ones((3, 5))}, {"w": np.ones(2)}, r"\['w'\] has shape \(3, 5\)"),
        (
            {"w": np.ones((3, 2)), "b": np.ones((4, 2))},
            {"w": np.ones(2), "b": np.ones(2)},
            "disagree on the batch size",
        ),
        ({"w": np.float32(1.0)}, {"w": np.float32(1.0)}, r"has shape \(\)"),
    ],
)
def test_gradients_without_a_batch_axis_are_refused(updates, params, message):
    with pytest.raises(ValueError, match=message):
        clip_and_sum(1.0).update(updates, optax.EmptyState(), params)


def test_the_state_is_empty_and_public_arguments_pass():
    transformation = clip_and_sum(1.0)
    state = transformation.init(jnp.zeros(2))
    assert jax.tree.leaves(state) == []
    transformation.update(jnp.ones((1, 2)), state, jnp.zeros(2), public_grads=1)
    assert isinstance(transformation, optax.GradientTransformation)
    assert dpopt.clip_and_sum is clip_and_sum


def test_layerwise_clip_shares_the_norm_among_parameters_and_layers():
    clip = dpopt.LayerwiseClip(2.0, scanned={"layers": True, "head": False})
    params = {"layers": jnp.ones((3, 2)), "head": jnp.ones(4)}
    assert clip.sensitivity == 2.0
    assert clip.layer_axes(params) == [0, 1] and clip.own_clip_norms(params) == [1.0, 1.0]
    rng = np.random.default_rng(0)
    grads = {"layers": jnp.asarray(rng.normal(size=(5, 3, 2)) * 9), "head": jnp.asarray(rng.normal(size=(5, 4)) * 9)}
    total = stacked_grads(grads, mask=jnp.arange(5) == 2).clipped_sum(clip).sum  # one example, all of it clipped
    np.testing.assert_allclose(np.linalg.norm(total["layers"], axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(total["head"]), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"l2_clip_norm": -1.0}, ValueError, "l2_clip_norm"),
        ({"l2_clip_norm": 1.0, "scanned": {"w": 1}}, TypeError, "scanned.*True or False"),
    ],
)
def test_layerwise_clip_refuses(options, error, message):
    with pytest.raises(error, match=message):
        dpopt.LayerwiseClip(**options)


def test_layerwise_clip_refuses_layers_that_are_none():
    with pytest.raises(ValueError, match="no axis of layers"):
        stacked_grads(jnp.ones(3), mask=None).clipped_sum(dpopt.LayerwiseClip(1.0, scanned=True))
    with pytest.raises(ValueError, match="scanned must have the tree structure"):
        grads = {"w": jnp.ones((3, 2))}
        stacked_grads(grads, mask=None).clipped_sum(dpopt.LayerwiseClip(1.0, scanned={"v": True}))


@pytest.mark.slow
@pytest.mark.parametrize("make", [FlatClip, lambda c: GroupClip({"a": c, "b": c / 2}), dpopt.LayerwiseClip])
def test_a_clip_norm_may_be_traced(make):
    """Such as one of several that ``vmap`` tries."""
    grads = {"a": jnp.asarray([[3.0, 4.0], [0.3, 0.4]]), "b": jnp.asarray([[1.0], [9.0]])}

    def total(c):
        stage, like = clip_and_sum(make(c)), jax.tree.map(lambda g: g[0], grads)
        return stage.update(grads, stage.init(like), like)[0], jnp.asarray(make(c).sensitivity)

    norms = np.array([0.5, 2.0, 1e30], np.float32)
    sums, sensitivities = jax.vmap(total)(norms)
    for i, c in enumerate(norms):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-6), sums, total(float(c))[0])
        np.testing.assert_allclose(sensitivities[i], make(float(c)).sensitivity, rtol=1e-6)
