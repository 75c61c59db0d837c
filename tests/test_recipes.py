"""The recipes for larger machines, small: their parts here, whole runs that are killed and resumed when asked for."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from runs import ROOT
from test_cifar10 import batches, binary, pack

pytest.importorskip("rich")

import dpopt
from benchmarks import cifar10_recipe, documents, llm_scaling, predict


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
    """Operations and memory, in the words of `dpopt.explain`."""
    (line,) = [line for line in str(explanation).splitlines() if re.match(rf"{name}  +[\d.]+  ", line)]
    return [float(x) for x in line.split()[-2:]]


def test_ratios_are_those_of_the_way_that_is_taken():
    example, options = jnp.ones((64, 20)), {"may_split": False, "may_vmap": False}
    found = predict.explained(deep, DEEP, jnp.ones((512, 64, 20)), may_split=False)
    for memory, name in ((8.0, "ghost"), (1.0, "ghost in two passes")):
        way = dpopt.ghost.choose(found.plan, deep, DEEP, example, False, memory, **options)
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


def test_the_planner_is_near_what_the_speed_table_recorded():
    (row,) = predict.against_speed_table("Wide-ResNet-16-4")
    assert row["planned"] > 1
    for ratio in row["recorded"].values():
        assert 1 / 1.5 < row["planned"] / ratio < 1.5


# --- CIFAR-10


def test_steps_are_those_of_the_paper_and_lie_between_them():
    found = [cifar10_recipe.steps_for(e) for e in (1, 2, 4, 7.9, 8)]
    assert found[0] == 875 and found[-1] == 2_500 and found == sorted(set(found))
    for epsilon in (0.5, 8.5):
        with pytest.raises(ValueError, match=rf"epsilon 1 to 8; got {epsilon}. Say how many with --steps"):
            cifar10_recipe.steps_for(epsilon)


def test_the_network_has_the_size_that_the_speed_table_states():
    _, params = jax.eval_shape(lambda: (0, cifar10_recipe.network().init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))))
    assert sum(x.size for x in jax.tree.leaves(params)) == 2_748_890


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
        (["--epsilon", "0.5"], "Say how many with --steps"),
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


# --- Whole runs


def command(name, *options, devices=1):
    """Arguments of `subprocess`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "PYTHONPATH": str(ROOT)}
    return {"args": [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options], "env": env, "text": True}


def finished(name, *options, devices=1):
    """What it prints."""
    done = subprocess.run(**command(name, *options, devices=devices), capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def journal(directory):
    path = directory / "ledger.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def killed(name, directory, *options, devices=1):
    """Starts a run, and kills it once three steps are paid for; how many lines its journal then has."""
    process = subprocess.Popen(**command(name, *options, devices=devices), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 1200
    while len(journal(directory)) < 2 + 3:  # the run's own line, and that of its segment
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(journal(directory))


def killed_and_resumed(name, directory, *options, devices=1):
    """What the second run prints. All steps of both stay paid for, and the budget holds for them together."""
    options = (*options, "--directory", str(directory), "--save-every", "2")
    lines = killed(name, directory, *options, devices=devices)
    assert lines < 2 + 8, "it ended before it was killed"
    printed = finished(name, *options, devices=devices)
    assert len(journal(directory)) > lines
    assert 7 < float(re.search(r"\nepsilon ([\d.]+) at delta 0.001", printed)[1]) <= 8.0
    assert re.search(r"all 8 steps are done|stopped by the budget after step [5-7] of 8", printed)
    return printed


@pytest.mark.slow
def test_the_cifar_recipe_predicts_trains_is_killed_and_resumes(tmp_path):
    pack(tmp_path / "cifar-10-binary.tar.gz", binary(batches(40)))
    small = ["--data", str(tmp_path), "--depth", "10", "--width", "1", "--multiplicity", "2", "--batch-size", "16"]
    small += ["--microbatch", "8", "--epsilon", "8", "--delta", "1e-3", "--steps", "8"]
    said = finished("cifar10_wide_resnet", *small, "--predict")
    assert re.search(r"times the time and [\d.]+ times the\s+memory \(planned\)", said) and "8 steps about" in said
    printed = killed_and_resumed("cifar10_wide_resnet", tmp_path / "run", *small)
    assert 0 <= float(re.search(r"test accuracy ([\d.]+)\n", printed)[1]) <= 1
    assert "differentially private for adding or removing one example" in printed


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for i in range(48):
        words = rng.choice(["the", "cat", "sat", "on", "a", "mat"], rng.integers(4, 40))
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(words))
    return tmp_path / "text"


SMALL = ["--layers", "2", "--width", "128", "--length", "16", "--windows", "2", "--batch-size", "12", "--delta", "1e-3"]


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "copies"), [("layerwise", "2"), ("flat", "1")])
def test_the_decoder_predicts_trains_is_killed_and_resumes_on_eight_devices(clip, copies, corpus, tmp_path):
    small = ["--text", str(corpus), *SMALL, "--clip", clip, "--data", copies, "--steps", "8"]
    said = finished("train_decoder", *small, "--predict", devices=8)
    ratio = float(re.search(r": ([\d.]+) times as much", said)[1])
    assert "on 8 devices" in said and 0.5 < ratio < 5
    small += ["--held-out", str(corpus)]
    printed = killed_and_resumed("train_decoder", tmp_path / "run", *small, devices=8)
    assert 1 < float(re.search(r"held-out loss ([\d.]+) a token", printed)[1]) < 8
    assert "differentially private for adding or removing one user" in printed
    assert "Here a user is a document" in printed
