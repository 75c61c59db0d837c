"""The zoo: the engines agree on every model, and the command records its measurements."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("equinox")
pytest.importorskip("haiku")

import dpopt
from benchmarks import records
from benchmarks.cost import gradients, speed
from benchmarks.cost.checked import Checked
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.report import command as report
from benchmarks.zoo import command, entries, large_batches, measure, summary
from benchmarks.zoo.entries import Entry
from benchmarks.zoo.registry import ZOO

# One for each framework, and a convolutional network.
TRACED = (
    "VAE (linen)",
    "DeepFM (nnx)",
    "GRU of a time series (equinox)",
    "Neural collaborative filtering (haiku)",
    "GCN (jax)",
    "DCGAN discriminator (equinox)",
)


@pytest.fixture(autouse=True)
def _as_users_run_it():
    with jax.numpy_rank_promotion("allow"):  # public code broadcasts biases across ranks
        yield


def test_the_zoo_is_large_and_every_model_names_its_source():
    assert len(ZOO) >= 44
    assert {e.framework for e in ZOO.values()} == {"linen", "nnx", "equinox", "haiku", "jax"}
    for name, entry in ZOO.items():
        assert name.endswith(f" ({entry.framework})") and ("/" in entry.source or "arXiv" in entry.source)


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.one_in(6)
def test_the_ghost_engine_supports_models_without_a_warning(name, monkeypatch):
    """Shapes only: neither parameters nor gradients are computed."""
    monkeypatch.setattr(entries, "initial", lambda init: init(entries.KEY))

    def sums():
        family = ZOO[name].build()
        promise = dpopt.per_example_grads(family.loss_fn, engine="ghost")(family.params, family.batch, mask=None)
        return promise.clipped_sum(dpopt.FlatClip(1.0)).sum, family.params

    with measure.dpopt_warnings() as messages:
        found, params = jax.eval_shape(sums)
    assert messages == []
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_engines_agree_on_every_model(name):
    with measure.dpopt_warnings():
        family = ZOO[name].build()
        family = family._replace(batch=jax.tree.map(lambda x: x[:2], family.batch))
        clip = speed.clip_norm(family)
        again = speed.rounded(family, clip)
        args = (family.params, family.batch, None)
        vmap, by_layer = (gradients.by_name(family, n, clip) for n in ("vmap", "vmap, by layer"))
        checked = Checked(name, args, {"vmap": vmap}, again, measure.rounding(family))
        for way in ("auto", "ghost"):
            checked.add(way, gradients.by_name(family, way, clip))
        checked.add(summary.BY_LAYER, gradients.by_name(family, summary.BY_LAYER, clip), by_layer(*args))


def _tiny() -> Family:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 3)), jnp.float32)
    return Family(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), jnp.ones((3, 2)), x)


def _unsupported() -> Family:
    """A loss with a mutable reference, which the ghost engine does not support."""

    def loss(w, x):
        kept = jax.new_ref(jnp.zeros(2))
        kept[...] = x @ w
        return jnp.sum(jnp.tanh(kept[...]) ** 2)

    return _tiny()._replace(loss_fn=loss)


def _broken() -> Family:
    raise ValueError("no such model")


@pytest.mark.slow
def test_large_batches_are_checked_and_recorded(monkeypatch, tmp_path):
    monkeypatch.setitem(ZOO, "tiny", Entry("a/b", "jax", _tiny))
    found = large_batches.measure("tiny", 512, 0.01)
    assert found["batch_size"] == 512 and max(found["largest_relative_error"].values()) < 1e-5
    assert found["warnings"] == [] and found["taken"].keys() == found["ratio"].keys() == set(large_batches.WAYS[512])
    environment = {"device": "a processor", "cores": 2}
    records.write_json(tmp_path / "large-batches.json", {"environment": environment, "runs": [found]})
    report.write(tmp_path, tmp_path / "written")
    page = (tmp_path / "written" / "RESULTS.md").read_text()
    assert "## Large batches" in page and "| tiny | 512 |" in page
    with pytest.raises(SystemExit, match="no model matches"):
        large_batches.main(tmp_path, "elephant", 0.01)
    monkeypatch.setattr(large_batches, "SLOW_S", 0.0)
    assert large_batches.measure("tiny", 512, 0.01) is None
    with pytest.raises(AssertionError, match=r"differs from the plain engine's by 0\.5"):
        plain = gradients.by_name(_tiny(), "vmap", 1.0)(*_tiny()[1:], None)
        large_batches._error(_tiny(), "auto", 1.0, 2, plain, large_batches._allowed(_tiny(), 1.0))


def test_large_batches_name_models_that_exist():
    assert set(large_batches.MODELS) <= set(ZOO) | set(FAMILIES)


@pytest.mark.slow
def test_the_command_records_every_model_and_continues_after_a_failure(monkeypatch, tmp_path):
    zoo = {n: Entry("a/b", "jax", build) for n, build in (("tiny", _tiny), ("broken", _broken), ("refs", _unsupported))}
    monkeypatch.setattr(command, "ZOO", zoo)
    with pytest.raises(SystemExit, match="1 of 3 models failed: broken"):
        command.main(tmp_path, None, 0.01)
    with pytest.raises(SystemExit, match="no model matches"):
        command.main(tmp_path, "elephant", 0.01)
    command.main(tmp_path, "tiny", 0.01)
    content = json.loads((tmp_path / "zoo.json").read_text())
    tiny, broken, refs = content["runs"]
    assert refs["taken"] == measure.FELL_BACK and "Falling back" in refs["warnings"][0] and refs["predicted"] == {}
    assert tiny["taken"] == "vmap" and tiny["warnings"] == [] and tiny["parameters"] == 6
    assert set(tiny["seconds"]) == set(tiny["compile_ratio"]) == set(tiny["memory_ratio"]) == set(measure.WAYS)
    assert tiny["ratio"]["ordinary"] == tiny["memory_ratio"]["ordinary"] == 1.0
    assert broken == {"model": "broken", "framework": "jax", "source": "a/b", "error": "ValueError: no such model"}
    section = summary.markdown(content)
    assert section.startswith("3 of 3 models")
    assert "- broken failed: ValueError: no such model" in section and "| a/b |" in section
    report.write(tmp_path, tmp_path / "written")
    assert "## Models of all kinds" in (tmp_path / "written" / "RESULTS.md").read_text()


def _row(model, auto, vmap=2.0, compiling=1.5, memory=1.0, **more):
    ways = dict.fromkeys(("auto", "ghost", "vmap"), 1.0)
    return {
        "model": model,
        "source": "a/b",
        "seconds": {"ordinary": 0.01},
        "ratio": ways | {"auto": auto, "vmap": vmap},
        "compile_ratio": ways | {"auto": compiling},
        "memory_ratio": ways | {"auto": memory},
        "predicted": {"ghost": 1.1},
        "taken": "ghost",
        "warnings": [],
    } | more


def test_targets_are_met_or_missed():
    good = [_row(f"good {i}", 1.05) for i in range(9)]
    assert all(f.is_met for f in summary.findings(good))
    bad = [*good, _row("bad", 2.2, 2.0, 9.0, 1.3, warnings=["dropped"]), _row("worse", 1.4)]
    found = summary.findings(bad)
    assert [f.is_met for f in found] == [True, False, False, False, True]
    assert found[1].found == "82%" and found[2].found == "1: bad 1.10" and found[3].found == "1: bad 1.30"
    assert summary.notes(bad) == ["bad: dropped"] and summary.findings([]) == []
    assert [t.row_count for t in summary.tables(bad)] == [11, 5]
    assert "| good 0 | 10.0 | 1.05 |  | 1.00 (1.10) | 2.00 | 1.50 |" in summary.markdown(
        {"runs": bad, "models": 12, "environment": {"device": "a device", "cores": 2}}
    )


def test_rows_from_before_there_was_a_column_by_layer():
    old, new = _row("old", 1.05), _row("new", 1.05)
    new["ratio"][summary.BY_LAYER], new["memory_ratio"][summary.BY_LAYER] = 1.2, 1.31
    found = summary.findings([old, new])
    assert [f.is_met for f in found] == [True] * 5 + [False, True, False]
    assert found[5].found == "1.20" and found[6].found == "100%" and found[7].found == "1: new 1.31"
    assert summary.cells(old)[2:5] == ["1.05", "", "1.00 (1.10)"]
    assert summary.cells(new)[2:5] == ["1.05", "1.20", "1.00 (1.10)"]
