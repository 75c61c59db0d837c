"""The planner chooses the intended method, `explain` prints it, and vmap is preferred where ghost would be slower."""

import dataclasses
import inspect

import chex
import ghost_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import flat_clip
from helpers import slow_unless
from jax import lax

import dpopt
from dpopt import ghost
from dpopt.engines import promises
from dpopt.ghost import term_sizes
from dpopt.ghost.memory import estimate
from dpopt.ghost.trace import trace_loss

METHODS = [
    (ghost_cases.dense, "w", "rank_one"),
    (ghost_cases.dense_wide, "w", "gram"),
    (ghost_cases.dense_long_sequence, "w", "explicit"),
    (ghost_cases.dense_general, "w", "gram"),
    (ghost_cases.batched_weight, "w", "explicit"),
    (ghost_cases.conv2d, "w", "explicit"),
    (ghost_cases.conv_small_image, "w", "gram"),
    (ghost_cases.conv_pixel_gram, "w", "gram"),
    (ghost_cases.conv_transposed, "w", "explicit"),
    (ghost_cases.conv_depthwise, "w", "explicit"),
    (ghost_cases.matrix_factorization, "u", "rank_one"),
    (ghost_cases.matrix_factorization, "bu", "rank_one"),
    (ghost_cases.embedding, "e", "gram"),
    (ghost_cases.embedding_long, "e", "segments"),
    (ghost_cases.embedding_out_of_range, "e", "segments"),
    (ghost_cases.embedding_clipped, "e", "explicit"),
    (ghost_cases.scaled_tables, "a", "rank_one"),
    (ghost_cases.scaled_tables, "b", "gram"),
    (ghost_cases.scaled_tables, "c", "segments"),
    (ghost_cases.tied_embedding_large, "e", "shared_gram"),
    (ghost_cases.weight_standardized, "w", "pulled_back"),
    (ghost_cases.weight_standardized_only, "w", "explicit"),
    (ghost_cases.weight_standardized_gram, "w", "gram"),
    (ghost_cases.weight_standardized_gram, "v", "gram"),
    (ghost_cases.weight_normalized, "w", "gram"),
    (ghost_cases.scanned_layers, "shared", "explicit"),
    (ghost_cases.scaled_weight, "w", "rank_one"),
    (ghost_cases.frozen_and_unused, "unused", "none"),
    (ghost_cases.frozen_and_unused, "w", "none"),
]


def plan_of(case):
    loss_fn, params, batch = case(ghost_cases.Arrays())
    with jax.numpy_rank_promotion("allow"):
        plan = ghost.plan_clipped_sum(loss_fn, params, batch)
    names = [path.strip("[]'") for path in plan.paths]
    return plan, dict(zip(names, plan.leaves, strict=True))


@pytest.mark.parametrize("case, name, method", METHODS, ids=lambda v: getattr(v, "__name__", v))
def test_method(case, name, method):
    _, leaves = plan_of(case)
    assert leaves[name].method.name == method


def _uses(looked_up, rows):
    """A loss that looks up a table in several places and multiplies by a matrix in others, and its arguments."""

    def loss(p, x):
        read = sum(jnp.sum(jnp.sin(p["w"][x["ids"][:n]])) for n in looked_up)
        return read + sum(jnp.sum(jnp.sin(x["x"][:n] @ p["w"])) for n in rows)

    batch = {"ids": jnp.zeros((2, 300), int), "x": jnp.zeros((2, 40, 6000))}
    return loss, {"w": jnp.zeros((6000, 40))}, batch


@pytest.mark.parametrize(
    "looked_up, rows, method, plain",
    [
        ((1, 1, 1), (), "shared_gram", "shared_gram"),
        ((300, 9), (), "shared_segments", "shared_segments"),
        ((), (3,), "pairs", "gram"),
        ((), (30,), "explicit", "gram"),
        ((), (1, 1), "shared_pairs", "shared_gram"),
        ((), (1, 30), "pulled_back", "shared_gram"),
        ((1, 1), (1,), "pulled_back", "shared_gram"),
    ],
)
def test_method_under_a_diagonal(looked_up, rows, method, plain):
    loss, params, batch = _uses(looked_up, rows)
    for scale, expected in (({"w": jnp.ones((6000, 40))}, method), (None, plain)):
        assert ghost.plan_clipped_sum(loss, params, batch, scale=scale).leaves[0].method.name == expected


@pytest.mark.parametrize(
    "shape, uses, method",
    [
        ((5000, 2, 20), ["t[i]", "t[i]"], "shared_gram"),
        ((5000,), ["t[i]", "t[i]"], "shared_segments"),
        ((50, 8, 20), ["ti,ihk->thk", "thk,ihk->ti"], "shared_gram"),  # one transposes the other
        ((50, 8, 20), ["ti,ihk->thk", "ti,ihk->thk"], "shared_gram"),
        ((50, 8, 50), ["ti,ihk->thk", "tk,ihk->tih"], "pulled_back"),  # no one matrix for both
    ],
)
def test_an_array_of_any_rank_may_be_used_several_times(shape, uses, method):
    """A table of several axes, or of single numbers, was formed as a whole for every example: nine times the time."""

    def loss(t, x):
        sizes = dict(zip("ihk", shape, strict=False)) | {"t": 3}
        total = 0.0
        for n, use in enumerate(uses):
            if use == "t[i]":
                total = total + jnp.sum(jnp.sin(t[x["ids"] + n]))
            else:
                read, _ = use.split(",")
                total = total + jnp.sum(jnp.sin(jnp.einsum(use, jnp.ones([sizes[i] for i in read]) * x["x"], t)))
        return total

    batch = {"ids": jnp.zeros((2, 3), int), "x": jnp.zeros(2)}
    assert ghost.plan_clipped_sum(loss, jnp.zeros(shape), batch).leaves[0].method.name == method


@pytest.mark.parametrize("uses, positions, is_joined", [(4, 60, True), (1, 60, False), (4, 3, False)])
def test_gradients_of_unrolled_uses_are_kept_where_that_saves_products(uses, positions, is_joined):
    def loss(params, x):
        for _ in range(uses):
            x = jnp.tanh(x @ params["w"])
        return jnp.sum(x @ params["v"])

    params = {"v": jnp.zeros((32, 2)), "w": jnp.zeros((32, 32))}
    plan = ghost.plan_clipped_sum(loss, params, jnp.zeros((8, positions, 32)))
    assert [own.leaves for own in plan.joined] == ([[1]] if is_joined else [])
    text = str(ghost.explain(loss, params, jnp.zeros((positions, 32)), batch_size=8))
    assert ("pulled_back, kept" in text) == is_joined
    # With an offset norms are of factors, and two passes keep nothing.
    assert not ghost.plan_clipped_sum(loss, params, jnp.zeros((8, positions, 32)), offset=params).joined
    assert not plan.streaming().joined
    assert plan.streaming().contacts == plan.trace.contacts


@pytest.mark.parametrize("kept", range(3))
def test_more_gradients_that_are_formed_are_kept_where_memory_allows_it(kept):
    """Those of these filters take more memory than their inputs and cotangents, and less time to read than to form."""

    def loss(params, x):
        for w in params:
            x = jnp.tanh(lax.conv(x[None], w, (1, 1), "SAME")[0])
        return jnp.sum(x)

    params, size = [jnp.zeros((24, 12, 3, 3)), jnp.zeros((12, 24, 3, 3))], 256
    plan = ghost.plan_clipped_sum(loss, params, jnp.zeros((size, 12, 8, 8)))
    assert not plan.kept and [leaf.method.name for leaf in plan.leaves] == ["explicit"] * 2
    memory = int(estimate(plan).recorded(1)) + (kept * size + 1) * params[0].nbytes
    way = ghost.choose(plan, memory, may_split=False, may_vmap=False)
    assert len(way.plan.kept) == kept and way.plan.ghost_cost <= plan.ghost_cost
    # In more parts there is room for both.
    way = ghost.choose(plan, memory, may_split=True, may_vmap=False)
    assert len(way.plan.kept) == 2 and (way.parts > 1) == (kept < 2)
    explanation = ghost.explain(loss, params, jnp.zeros((12, 8, 8)), batch_size=size, memory=memory)
    assert str(explanation).count("explicit, kept") == 2


@pytest.mark.parametrize("kept", range(3))
def test_gradients_of_several_uses_are_kept_where_memory_allows_it(kept):
    def loss(params, x):
        for w in params:
            for _ in range(3):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    params, size = [jnp.zeros((256, 256))] * 2, 16
    plan = ghost.plan_clipped_sum(loss, params, jnp.zeros((size, 35, 256)))
    assert not plan.joined
    memory = int(estimate(plan).recorded(1)) + (kept * size + 1) * params[0].nbytes
    way = ghost.choose(plan, memory, may_split=False, may_vmap=False)
    assert len(way.plan.joined) == kept and way.plan.ghost_cost <= plan.ghost_cost
    rng = np.random.default_rng(0)
    values = [np.float32(rng.normal(size=p.shape) / 16) for p in params], np.float32(rng.normal(size=(size, 35, 256)))
    sums = [ghost.clipped_sum(loss, *values, coefficients=flat_clip(1.0), plan=p).sum for p in (plan, way.plan)]
    chex.assert_trees_all_close(*sums, rtol=1e-4, atol=1e-5)
    with_offset = ghost.plan_clipped_sum(loss, params, jnp.zeros((size, 35, 256)), offset=params)
    assert not ghost.choose(with_offset, memory, may_split=False, may_vmap=False).plan.joined


@pytest.mark.parametrize("positions, width, method", [(2, 256, "gram"), (256, 64, "explicit")])
def test_one_pass_forms_gradients_only_where_that_takes_least(positions, width, method):
    """It formed all of them, since the sum can be read from them: a VGG took twice the time."""
    w, x = jax.ShapeDtypeStruct((width, width), "float32"), jax.ShapeDtypeStruct((8, positions, width), "float32")
    plan = ghost.plan_clipped_sum(lambda w, x: jnp.sum(jnp.tanh(x @ w)), w, x)
    assert [m.name for m in plan.streaming(ghost.single_parameters(plan, [1.0], [])).streamed.values()] == [method]


@pytest.mark.parametrize(
    "dilation, groups, padding", [(1, 1, "SAME"), (2, 1, "SAME"), (1, 2, "SAME"), (1, 2, [(2, 0), (0, 1)])]
)
def test_products_of_windows_are_sums_of_products_of_pixels(dilation, groups, padding, x64):
    """A convolution's `inner` is the Gram matrix of its `left`, computed at lower cost."""
    x, w = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(8, 8, 32 * groups), (3, 3, 32, 4)]))
    convolve = lambda w, x: ghost_cases.conv(x, w, dilation=dilation, groups=groups, padding=padding)  # noqa: E731
    with jax.numpy_rank_promotion("allow"):
        trace = trace_loss(lambda w, x: jnp.sum(convolve(w, x) ** 2), w, x)
    (factors,) = (c.factors for c in trace.contacts)
    left, _ = jax.jit(factors.split)(x[None], np.zeros((1, *jax.eval_shape(convolve, w, x).shape)))
    inner = jax.jit(lambda x: factors.inner(x, lambda z: jnp.einsum("nsa,nta->nst", z, z)))(x[None])
    np.testing.assert_allclose(inner, np.einsum("nta,nsa->nts", left, left), rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", slow_unless({0, 1, 2, 5, 11, 12, 21, 24}, range(25)))  # one to three axes
def test_transposed_convolutions_are_factored_by_pixels_of_the_input(seed, x64):
    """Not by windows of the input, most of which are the zeros between its pixels."""
    rng = np.random.default_rng(seed)
    axes, groups, images = (int(rng.integers(1, n)) for n in (4, 3, 3))
    a, b = (int(n) for n in rng.integers(1, 4, 2))
    most = (9, 5, 4)[axes - 1]
    window, sides = (tuple(rng.integers(low, most, axes).tolist()) for low in (1, 3))
    dilation, rhs = (tuple(rng.integers(1, 4, axes).tolist()) for _ in range(2))
    dilation = (2, *dilation[1:])
    padding = [tuple(p) for p in rng.integers(-1, most, (axes, 2)).tolist()]
    along = "XYZ"[:axes]
    image, kernel = (f"NC{along}", f"OI{along}") if rng.random() < 0.5 else (f"N{along}C", f"{along}IO")
    numbers = (image, kernel, image)
    spec = lax.conv_dimension_numbers((1,) * (axes + 2), (1,) * (axes + 2), numbers)

    def arranged(order, *lengths):
        shape = [0] * len(lengths)
        for axis, length in zip(order, lengths, strict=True):
            shape[axis] = length
        return rng.normal(size=shape)

    x, w = arranged(spec.lhs_spec, images, groups * a, *sides), arranged(spec.rhs_spec, groups * b, a, *window)

    def convolve(w, x):
        return lax.conv_general_dilated(
            x, w, (1,) * axes, padding, dilation, rhs, dimension_numbers=numbers, feature_group_count=groups
        )

    (contact,) = trace_loss(lambda w, x: jnp.sum(convolve(w, x) ** 2), w, x).contacts
    factors, y = contact.factors, rng.normal(size=jax.eval_shape(convolve, w, x).shape)
    assert factors.positions == images * np.prod(sides)
    split = jax.jit(factors.split)
    left, right = split(x, y)
    exact = jax.jit(lambda w, x, y: jax.vjp(lambda w: convolve(w, x), w)[1](y)[0])(w, x, y)
    found = jax.jit(lambda left, right: factors.unfold(jnp.einsum("nta,ntp->nap", left, right)[None]))(left, right)
    np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(jax.jit(lambda w: factors.unfold(factors.fold(w)))(w), w)
    # What bounds the rounding error: of equal terms, whose windows overlap, it comes close.
    x, y = np.ones_like(x), np.ones_like(y)
    left, right = split(x, y)
    terms = np.linalg.norm(np.einsum("nta,ntp->nap", left, right))
    number, arrays, square = jax.jit(
        lambda x, y: (*term_sizes.as_product(factors, x, y, None), term_sizes.square(factors, x, y, None).value)
    )(x, y)
    assert terms <= number * np.prod([np.linalg.norm(z) for z in arrays]) * (1 + 1e-9)
    assert terms <= np.sqrt(square) * (1 + 1e-9)


def test_rules_are_used_where_they_should_be():
    """No weight of a layer falls back to its own tap."""
    expected = {
        ghost_cases.lstm: {"x": "dot_general", "h[0": "dot_general"},
        ghost_cases.attention: {"q": "dot_general", "o": "dot_general"},
        ghost_cases.conv_groups: {"w": "conv_general_dilated"},
        ghost_cases.embedding: {"e": "gather", "w": "dot_general"},
        ghost_cases.matrix_factorization: {"u": "gather", "v": "gather"},
        ghost_cases.table_of_two_indices: {"t": "gather", "u": "gather"},
        ghost_cases.table_of_two_scalars: {"t": "gather"},
        ghost_cases.vmapped_embedding: {"e": "gather", "heads": "gather"},
        ghost_cases.taken_along_axis: {"e": "gather"},
        ghost_cases.scanned_layers_over_time: {"w": "dot_general"},
        ghost_cases.remat: {"w": "dot_general"},
        ghost_cases.masked_weight: {"w": "dot_general", "v": "dot_general"},
        ghost_cases.state_handed_back: {"w": "dot_general"},
    }
    for case, uses in expected.items():
        _, leaves = plan_of(case)
        leaves = {name.replace("']", "").replace("['", ""): leaf for name, leaf in leaves.items()}
        for name, primitive in uses.items():
            assert {c.primitive and c.primitive.name for c in leaves[name].contacts} == {primitive}, (
                case.__name__,
                name,
            )


def test_products_that_are_added_up_share_a_tap():
    _, leaves = plan_of(ghost_cases.summed_products)
    shares = {name: leaf.contacts[0].shares for name, leaf in leaves.items()}
    assert [name for name, owner in shares.items() if owner] == ["v"]
    assert shares["v"] is leaves["u"].contacts[0]


def test_explain_prints_a_row_per_parameter(capsys):
    loss_fn, params, batch = ghost_cases.dense_sequence(ghost_cases.Arrays())
    example = batch[0]
    with jax.numpy_rank_promotion("allow"):
        explanation = ghost.explain(loss_fn, params, example, batch_size=8)
    text = capsys.readouterr().out
    assert text.strip() == str(explanation).strip()
    for word in ("parameter", "['w']", "dot_general", "identity", "ordinary gradient"):
        assert word in text


def test_explain_groups_equal_layers_and_states_the_way_and_the_reason():
    def loss_fn(p, x):
        for i in range(12):
            x = jnp.tanh(x @ p[f"layer_{i}"]["w"])
        return jnp.sum(x)

    params = {f"layer_{i}": {"w": jnp.zeros((256, 256))} for i in range(12)}
    text = str(ghost.explain(loss_fn, params, jnp.zeros((512, 256)), batch_size=64))
    assert "['layer_*']['w'] (x12)" in text and text.count("dot_general") == 1
    assert "engine='auto' takes ghost in" in text and "it should be the fastest" in text
    long = jax.ShapeDtypeStruct((16384, 256), jnp.float32)
    text = str(ghost.explain(loss_fn, params, long, batch_size=1))
    assert "takes ghost in two passes" in text and "more memory than is allowed" in text
    one_pass = ghost.explain(loss_fn, params, long, batch_size=1, clip=dpopt.LayerwiseClip(1.0))
    assert "takes ghost in one pass" in str(one_pass)


def test_explain_gives_the_reason_for_a_way_that_is_not_the_cheapest_in_its_table():
    """Tiny gradients are formed whatever they cost, and ghost may cost 5% more than vmap."""
    loss_fn, params, example = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), jnp.zeros((8, 4)), jnp.zeros(8)
    tiny, small = (ghost.explain(loss_fn, params, example, batch_size=size) for size in (256, 4096))
    assert tiny.plan.ghost_cost < tiny.plan.vmap_cost and tiny.way.plan is None
    assert "at most 64 kB" in tiny.way.reason and "fastest" not in tiny.way.reason
    assert small.way.plan is not None and small.way.reason.startswith("it should be the fastest")
    plan = dataclasses.replace(small.plan, vmap_cost=small.plan.ghost_cost / 1.04)
    way = ghost.choose(plan, 1.25, may_split=True, may_vmap=True)
    assert way.plan is not None and way.reason.startswith("it should be within 5% of the fastest")


def test_weights_computed_by_a_call_that_holds_tanh_meet_the_data_in_a_product():
    """JAX 0.12 differentiates tanh by a primitive of its own, `one_minus_square`."""

    def loss_fn(w, x):
        return jnp.sum(x @ jax.checkpoint(lambda w: jnp.tanh(w) + jnp.exp2(w))(w))

    plan = ghost.plan_clipped_sum(loss_fn, jnp.zeros((8, 4)), jnp.zeros((6, 8)))
    assert [c.primitive.name for c in plan.trace.contacts] == ["dot_general"]


def test_prefers_vmap_where_nothing_is_saved():
    """A low-rank product of huge matrices has to be formed and pulled back, which vmap does at a lower cost."""
    params = {"w": jnp.zeros((900, 900)), "a": jnp.zeros((900, 2)), "b": jnp.zeros((2, 900))}

    def loss_fn(p, x):
        return jnp.sum(x @ (p["w"] + p["a"] @ p["b"]))

    plan = ghost.plan_clipped_sum(loss_fn, params, jnp.zeros((4, 2000, 900)))
    assert plan.ghost_cost > 0.9 * plan.vmap_cost
    dense = ghost.plan_clipped_sum(lambda p, x: jnp.sum(x @ p["w"]), params, jnp.zeros((4, 900)))
    assert not dense.prefers_vmap and dense.ghost_cost < 0.2 * dense.vmap_cost


def test_prefers_ghost_for_weight_standardized_convolutions():
    """Forming and pulling back is still faster than vmap's grouped convolutions."""
    loss_fn, _, _ = ghost_cases.weight_standardized_only(ghost_cases.Arrays())
    params, batch = {"w": jnp.zeros((3, 3, 64, 64))}, jnp.zeros((32, 16, 16, 64))
    with jax.numpy_rank_promotion("allow"):
        assert not ghost.plan_clipped_sum(loss_fn, params, batch).prefers_vmap


def test_no_batch_of_weights_beyond_the_activations():
    _, leaves = plan_of(ghost_cases.tied_embedding_large)
    plan, _ = plan_of(ghost_cases.conv_small_image)
    assert not plan.kept
    assert leaves["e"].method.name == "shared_gram"


def test_a_batch_of_unequal_sizes_is_refused():
    with pytest.raises(ValueError, match="leading axis"):
        ghost.plan_clipped_sum(lambda w, x: w * x[0] * x[1], jnp.float32(1), (jnp.ones(3), jnp.ones(4)))


def test_the_default_memory_is_the_same_in_three_signatures():
    """It is written out in each, where users read it."""
    given = (dpopt.per_example_grads, dpopt.explain, promises.ExampleRows)
    assert {inspect.signature(f).parameters["memory"].default for f in given} == {1.25}
