"""Parts of the recipes for larger machines; `test_recipe_runs` has whole runs."""

import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from runs import ROOT

pytest.importorskip("rich")

import dpopt
from benchmarks import cifar10_recipe
from benchmarks.cost import llm_scaling, models, predict
from benchmarks.data import documents


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wide_resnet, decoder = example("cifar10_wide_resnet"), example("train_decoder")


# --- What a run costs


def test_the_cost_of_a_run_is_made_of_its_parts():
    cost = predict.Cost(0.5, 1.2, 2e9, 1.5, microbatches=64, steps=1_000)
    assert cost.step_seconds == pytest.approx(0.5 * 1.2 * 64) and cost.run_seconds == pytest.approx(38_400)
    assert cost.bytes == pytest.approx(3e9)
    assert "38.4 s, and 1,000 steps about 10.7 h" in str(cost) and "3 GB" in str(cost)


def deep(params, x):
    """A scan whose records are larger than what rematerialisation keeps."""
    h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x @ params["first"], params["layers"])
    return jnp.sum(h**2)


DEEP = {"first": jnp.ones((20, 64)), "layers": jnp.ones((12, 64, 64)) / 64}


def of_table(explanation, name):
    """Operations and memory, as `dpopt.explain` words them."""
    (line,) = [line for line in str(explanation).splitlines() if re.match(rf"{name}  +[\d.]+  ", line)]
    return [float(x) for x in line.split()[-2:]]


def test_ratios_are_those_of_the_way_that_is_taken():
    example, options = jnp.ones((64, 20)), {"may_split": False, "may_vmap": False}
    found = predict.explained(deep, DEEP, jnp.ones((512, 64, 20)), may_split=False)
    for memory, name in ((8.0, "ghost"), (1.0, "ghost in two passes")):
        way = dpopt.ghost.choose(found.plan, memory, **options)
        assert (way.plan.streamed != {}) == (name != "ghost")
        given = types.SimpleNamespace(plan=found.plan, way=way, memory=found.memory)
        np.testing.assert_allclose(predict.ratios(given), of_table(found, name), atol=0.006)
    clip = dpopt.LayerwiseClip(1.0, scanned={"first": False, "layers": True})
    layered = dpopt.explain(deep, DEEP, example, batch_size=512, clip=clip)
    np.testing.assert_allclose(predict.ratios(layered)[0], of_table(layered, "ghost")[0], atol=0.006)
    tiny = predict.explained(lambda w, x: jnp.sum((w - x) ** 2), jnp.ones(3), jnp.ones((4, 3)), may_split=True)
    assert tiny.way.plan is None
    np.testing.assert_allclose(predict.ratios(tiny), of_table(tiny, "vmap"), atol=0.006)


def test_a_microbatch_of_a_given_size_is_planned_whole():
    params, batch = jnp.ones((512, 512)), jnp.ones((64, 256, 512))
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
    assert predict.explained(loss, params, batch, may_split=True).way.parts > 1
    assert predict.explained(loss, params, batch, may_split=False).way.parts == 1


def test_cost_takes_the_time_that_was_measured_and_the_ratio_that_was_planned(monkeypatch):
    monkeypatch.setattr(predict.timing, "interleaved", lambda calls, *_, **__: {name: 3.0 for name in calls})
    params, batch = jnp.ones((8, 4)) / 8, jnp.ones((16, 8)) / 8
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
    found = predict.cost(loss, params, batch, microbatches=5, steps=7)
    planned = predict.ratios(predict.explained(loss, params, batch, may_split=False))
    assert (found.time_ratio, found.memory_ratio) == planned and found.ordinary_seconds == 3.0
    assert found.run_seconds == pytest.approx(3.0 * planned[0] * 5 * 7)
    ordinary = predict.ordinary(loss, params, batch)
    np.testing.assert_allclose(
        ordinary(params, batch), jax.grad(lambda w: 16 * loss(w, batch[0]))(params) / 16, rtol=1e-5
    )


@pytest.mark.slow
def test_the_planner_is_near_what_the_speed_table_recorded(monkeypatch):
    network = models.WideResNet
    init = network.init
    # Shapes are enough for a plan.
    monkeypatch.setattr(network, "init", lambda model, *args: jax.eval_shape(lambda: init(model, *args)))
    (row,) = predict.against_speed_table("Wide-ResNet-16-4")
    assert row["planned"] > 1
    for ratio in row["recorded"].values():
        assert 1 / 1.5 < row["planned"] / ratio < 1.5


# --- CIFAR-10


def test_steps_are_those_of_the_paper_and_lie_between_them():
    found = [cifar10_recipe.steps_for(e) for e in (1, 2, 4, 7.9, 8)]
    assert found[0] == 875 and found[-1] == 2_500 and found == sorted(set(found))
    for epsilon in (0.5, 8.5):
        with pytest.raises(ValueError, match=rf"epsilon 1 to 8; got {epsilon}. Set them with --steps"):
            cifar10_recipe.steps_for(epsilon)


def test_the_network_has_the_size_that_the_speed_table_states():
    _, params = jax.eval_shape(lambda: (0, cifar10_recipe.network().init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))))
    assert sum(x.size for x in jax.tree.leaves(params)) == 2_748_890


@pytest.mark.slow
def test_augmentations_are_crops_of_the_mirrored_border_flipped_or_not():
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    keys = jax.random.split(jax.random.key(0), 300)
    made, labels = jax.jit(jax.vmap(cifar10_recipe.flip_and_crop, (None, 0)))((image, 7), keys)
    assert made.shape == (300, 32, 32, 3) and made.dtype == np.uint8 and set(labels.tolist()) == {7}
    known = {}
    for flip, original in enumerate((image, image[:, ::-1])):
        padded = np.pad(original, ((4, 4), (4, 4), (0, 0)), mode="reflect")
        known |= {padded[r : r + 32, c : c + 32].tobytes(): (flip, r, c) for r in range(9) for c in range(9)}
    drawn = [known[np.asarray(x).tobytes()] for x in made]
    assert {d[0] for d in drawn} == {0, 1} and {d[1] for d in drawn} == {d[2] for d in drawn} == set(range(9))


def test_a_step_of_the_recipe_takes_whole_microbatches(monkeypatch):
    taken = {}
    monkeypatch.setattr(predict, "cost", lambda *_, **options: taken.update(options))
    options = wide_resnet.parsed(["--epsilon", "8"])
    wide_resnet.predicted(options, 50_000, None, None)
    assert taken["steps"] == 2_500 and wide_resnet.padded_to(64, 4096) == 512
    assert 64 < taken["microbatches"] < 72  # a Poisson sample is above 4096 as often as below: 8 or 9 times 512 rows
    options = wide_resnet.parsed(["--epsilon", "8", "--batch-size", "100", "--microbatch", "200"])
    wide_resnet.predicted(options, 50_000, None, None)
    assert taken["microbatches"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--depth", "15"], "--depth must be 10, 16, 22"),
        (["--epsilon", "0.5"], "Set them with --steps"),
        (["--microbatch", "0"], "--microbatch must be at least 1; got 0"),
    ],
)
def test_bad_options_of_the_cifar_recipe_are_refused(options, why, capsys):
    with pytest.raises(SystemExit):
        wide_resnet.main(options)
    assert why in capsys.readouterr().err


def test_without_data_the_cifar_recipe_says_where_to_get_them(tmp_path):
    with pytest.raises(SystemExit, match=r"cifar-10-binary\.tar\.gz.*cs\.toronto\.edu"):
        wide_resnet.main(["--data", str(tmp_path)])


# --- The decoder


def decoder_params(vocabulary=16):
    shapes = llm_scaling.parameters(1, 128, vocabulary)
    return shapes, decoder.initialize(jax.random.key(0), shapes)


@pytest.mark.slow
@jax.numpy_rank_promotion("allow")
def test_the_loss_is_that_of_the_benchmark_and_does_not_see_padding():
    _, params = decoder_params()
    window = jnp.array([3, 1, 4, 1, 5, 9])
    loss = jax.jit(decoder.loss_fn)
    np.testing.assert_allclose(loss(params, window), jax.jit(llm_scaling.loss)(params, window), rtol=1e-6)
    padded = jnp.array([3, 1, 4, documents.PAD, documents.PAD, documents.PAD])
    np.testing.assert_allclose(loss(params, padded), jax.jit(llm_scaling.loss)(params, window[:3]), rtol=1e-5)
    assert float(loss(params, jnp.full(6, documents.PAD))) == 0


def test_parameters_start_as_they_are_said_to():
    shapes, params = decoder_params(vocabulary=256)
    jax.tree.map(lambda s, p: np.testing.assert_equal((s.shape, s.dtype), (p.shape, p.dtype)), shapes, params)
    stddev = {name: float(jnp.std(params["layers"][name])) for name in ("qkv", "out", "gate", "up", "down")}
    for name, value in stddev.items():
        assert value == pytest.approx(0.02 / (2**0.5 if name in ("out", "down") else 1), rel=0.05)
    assert bool(jnp.all(params["last"] == 1)) and not bool(jnp.all(params["layers"]["gate"] == params["layers"]["up"]))


def test_the_default_has_a_billion_parameters():
    options = decoder.parsed(["--text", "x"])
    shapes = llm_scaling.parameters(options.layers, options.width, documents.BYTES_VOCABULARY)
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 1_007_222_784


def test_matrices_and_their_moments_lie_in_parts_and_all_else_whole():
    mesh = AbstractMesh((2, 4), ("data", "fsdp"))
    shapes = llm_scaling.parameters(8, 128, 257)
    for tree in (shapes, jax.eval_shape(optax.adam(0.1).init, shapes)[0].mu):
        specs = jax.tree.map(lambda s: s.spec, decoder.layout(tree, mesh))
        assert specs["embedding"] == P(None, "fsdp")  # 257 rows are not split
        assert specs["layers"]["qkv"] == P(None, None, "fsdp") and specs["layers"]["down"] == P(None, "fsdp")
        assert specs["layers"]["before_mlp"] == specs["last"] == P()
    words = decoder.layout(llm_scaling.parameters(8, 128, 256), mesh)["embedding"].spec
    assert words == P("fsdp")
    core = dpopt.dp_adam(0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
    places = decoder.layout(jax.eval_shape(core.init, shapes), mesh)
    split = [s.spec for s in jax.tree.leaves(places) if s.spec != P()]
    assert len(split) == 2 * len(decoder.MATRICES)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--width", "100"], "--width must be a multiple of 128"),
        (["--data", "3"], "--data must divide the number of devices, 1; got 3"),
        (["--windows", "0"], "--windows must be at least 1; got 0"),
    ],
)
def test_bad_options_of_the_decoder_are_refused(options, why, capsys):
    with pytest.raises(SystemExit):
        decoder.main(["--text", "x", *options])
    assert why in capsys.readouterr().err


def test_without_text_the_decoder_says_what_it_expects(tmp_path):
    with pytest.raises(SystemExit, match=r"expected a text file, a folder of \.txt files"):
        decoder.main(["--text", str(tmp_path / "nothing")])
