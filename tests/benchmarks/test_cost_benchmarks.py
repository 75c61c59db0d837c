"""The records of the memory, speed and Opacus measurements; times are never tested."""

import importlib.util
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import records
from benchmarks.cost import gradients, memory, mesh, noise, opacus_speed, speed, timing
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.report import figures

SMALLEST = "matrix factorisation 943 x 1682, B 64"


@pytest.fixture
def tiny(monkeypatch):
    """A small family for measurements in this process."""
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    family = Family(
        lambda w, x: jax.numpy.sum(jax.numpy.tanh(x @ w["kernel"]) ** 2),
        {"kernel": jax.numpy.ones((3, 2))},
        jax.numpy.asarray(x),
    )
    monkeypatch.setitem(FAMILIES, "tiny", lambda: family)
    return family


@pytest.mark.slow
def test_memory_sees_the_gradients_that_vmap_holds(monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    found = {name: memory.in_new_process(SMALLEST, name) for name in ("ghost", "vmap")}
    family = FAMILIES[SMALLEST]()
    gradient = sum(p.nbytes for p in jax.tree.leaves(family.params))
    quarter = gradients.batch_size(family) // 4 * gradient
    assert found["vmap"]["compiled_bytes"] > found["ghost"]["compiled_bytes"] + quarter
    if sys.platform != "linux":
        assert found["vmap"]["peak_bytes"] is None and "high-water" in found["vmap"]["not_measured"]
        return
    assert found["vmap"]["peak_bytes"] > found["ghost"]["peak_bytes"] + quarter
    # Parameters and result, and no more than a few gradients: what compiling took would be hundreds.
    assert 1.8 * gradient < found["ghost"]["peak_bytes"] < 6 * gradient


@pytest.mark.slow
def test_a_peak_that_cannot_be_told_is_not_reported(monkeypatch, tiny):
    def refuse(reset=False):
        raise memory.Unmeasurable("no high-water mark")

    monkeypatch.setattr(memory, "_resident_peak", refuse)
    found = memory.measure(tiny, "ghost, diagonal")
    assert found["peak_bytes"] is None and found["not_measured"] == "no high-water mark"
    assert found["compiled_bytes"] >= found["argument_bytes"] == 16 * 3 * 4 + 6 * 4  # the diagonal is not counted


def test_memory_of_other_libraries_is_measured_too(monkeypatch, tiny):
    pytest.importorskip("jax_privacy")
    monkeypatch.setattr(memory, "rise", lambda program, args: 1_000 + bool(program(*args)))
    for name in memory.OTHERS:
        found = memory.measure(tiny, name)
        assert found["peak_bytes"] == found["argument_bytes"] + 1_001 and found["scratch_bytes"] > 0


def test_memory_is_recorded_merged_resumed_and_reported(monkeypatch, tmp_path):
    peaks = {"ordinary": 100, "ghost": 120, "ghost, diagonal": 130, "ghost whole": 140, "vmap": None}
    asked = []

    def fake(family, name):
        asked.append((family, name))
        return {"peak_bytes": peaks[name], "compiled_bytes": 2 * (peaks[name] or 500)}

    monkeypatch.setattr(memory, "in_new_process", fake)
    memory.main(tmp_path, "matrix", others=False, resume=False)
    memory.main(tmp_path, "LSTM", others=False, resume=False)
    assert len(asked) == 10
    memory.main(tmp_path, "LSTM", others=False, resume=True)
    assert len(asked) == 10
    content = json.loads((tmp_path / "memory.json").read_text())
    assert [r["family"] for r in content["runs"]] == ["LSTM T 128, B 64", SMALLEST]
    assert content["runs"][0]["ratio"] == {"ordinary": 1.0, "ghost": 1.2, "ghost, diagonal": 1.3, "ghost whole": 1.4}
    assert content["runs"][0]["compiled_ratio"]["vmap"] == 5.0
    assert (tmp_path / "memory.svg").exists()
    said = memory.markdown(content)
    assert "LSTM T 128, B 64, ghost, diagonal 1.30" in said and "ghost 1.20" not in said
    assert "| ? (5.00) |" in said and "1.20 (1.20)" in said
    page = "<!-- figures: memory -->\n<!-- end of figures -->\n"
    assert f"| {SMALLEST} | 1.20 | 1.30 | 1.40 |  |" in figures.updated(page, tmp_path)
    headline = figures.updated(page.replace("memory", "headline"), tmp_path)
    assert "1.20 to 1.20 times its peak, over 2 model families" in headline


@pytest.mark.slow
def test_speed_times_jax_privacy_at_its_best_microbatch(monkeypatch, tiny, tmp_path):
    pytest.importorskip("jax_privacy")
    once = {"jax_privacy m=1": 3.0, "jax_privacy m=8": 1.0, "jax_privacy m=16": 2.0}
    real = speed.Checked.add

    def add(self, name, fn):
        real(self, name, fn)
        self.once[name] = once.get(name, 0.1)
        return fn

    monkeypatch.setattr(speed.Checked, "add", add)
    row = speed.measure("tiny", others=True, budget_s=0.01)
    assert row["jax_privacy_microbatch"]["best"] == 8
    assert row["jax_privacy_microbatch"]["seconds_of_one_call"] == {"1": 3.0, "8": 1.0, "16": 2.0}
    timed = {"optax contrib", "optax contrib, diagonal", "jax_privacy", "jax_privacy, diagonal", "vmap, diagonal"}
    assert timed <= set(row["ratio"]) and not set(once) & set(row["ratio"])
    assert set(once) <= set(row["largest_relative_error"])  # checked, all of them
    # Compiled anew, not looked up, whatever ran before.
    assert min(row["compile_seconds"].values()) > 0.01 and row["compile_ratio"] > 1
    without = {n: row[n] for n in ("family", "seconds", "parts")} | {"ratio": dict.fromkeys(("ordinary", "ghost"), 1.0)}
    own, foreign = speed.tables([row, without])
    assert own.row_count == foreign.row_count == 2
    content = {"environment": records.environment(), "runs": [row]}
    assert f"{row['ratio']['jax_privacy']:.2f} (m=8)" in speed.markdown(content)
    assert speed.plot([row], tmp_path).exists()


def test_without_opacus_the_command_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install torch opacus"):
        opacus_speed.main(tmp_path, None, 1.0)


def test_the_comparison_with_opacus_needs_no_jax():
    program = "import sys; sys.modules['jax'] = None; sys.modules['dpopt'] = None; import benchmarks.cost.opacus_speed"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=records.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not opacus_speed.installed(), reason=opacus_speed.MISSING)
@pytest.mark.filterwarnings("ignore")
def test_opacus_is_timed_once_its_ways_agree(monkeypatch):
    from benchmarks.cost import opacus_models

    family = opacus_models.lstm(length=5, batch=8)
    row = opacus_speed.measure("tiny", family, 0.01)
    assert set(row["ratio"]) == {"ordinary", "Opacus hooks", "Opacus hooks, diagonal", "Opacus ghost"}
    real = opacus_speed.ghost
    monkeypatch.setattr(opacus_speed, "ghost", lambda family, clip: real(family, 1.01 * clip))
    with pytest.raises(AssertionError, match="results differ"):
        opacus_speed.measure("tiny", family, 0.01)


@pytest.mark.slow
def test_noise_is_timed_beside_jaxs(tmp_path, monkeypatch):
    monkeypatch.setattr(noise, "TREES", {"two": [(3,), (2, 2)]})
    monkeypatch.setattr(noise.timing, "interleaved", lambda calls, budget_s: {n: 1.0 for n in calls if calls[n]()})
    for name, small in {"MODEL": (1, 128), "EXAMPLES": 2, "TOKENS": 3}.items():
        monkeypatch.setattr(noise, name, small)
    monkeypatch.setattr(noise.llm_scaling, "VOCABULARY", 16)
    noise.main(tmp_path)
    found = json.loads((tmp_path / "noise.json").read_text())
    assert set(found["steps"]["ratio"]) == {"independent", "banded, 4 bands", "banded inverse, 4 bands"}
    (run,) = found["runs"]
    assert run["ratio"] == 1.0 and run["ns_per_number"]["dpopt"] == 1e9 / 7


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_batch_on_a_mesh_is_compared_with_the_ordinary_gradient(tmp_path):
    mesh.main(tmp_path, 1, only=("tiny",), budget_s=0.0)
    found = json.loads((tmp_path / "mesh.json").read_text())
    (run,) = found["runs"]
    assert set(run["seconds"]) == set(run["sent"]) == set(mesh.WAYS)
    run |= {"seconds": {"ordinary": 2.0, "auto": 3.0, "auto, diagonal": 5.0}}
    run |= {"scratch_bytes": {"ordinary": 10, "auto": 11, "auto, diagonal": 12}}
    run |= {"sent": {"ordinary": {"all-gather": 1}, "auto": {"all-gather": 1}, "auto, diagonal": {"all-gather": 3}}}
    assert "| tiny | 1.50 | 2.50 | 1.10 | 1.20 | 2 |" in mesh.markdown(found)


def test_what_a_program_gathers_is_counted_and_its_sums_are_not():
    program = """
      %a = f32[8] all-gather(%x), %b = (f32[2], f32[8]) all-gather-start(%y), %c = f32[] all-reduce(%z)
      %d = f32[3] collective-permute(%b), %e = f32[8] fusion(%a), calls=%all-gather-like
    """
    assert mesh.sent(program) == {"all-gather": 2, "collective-permute": 1}


@pytest.mark.parametrize("once, calls", [(0.1, None), (timing.SLOW_S + 1, timing.FEW), (timing.VERY_SLOW_S + 1, 0)])
def test_slow_calls_are_timed_a_few_times_and_very_slow_ones_not_again(once, calls):
    done = []
    found = timing.with_few_slow({"a": lambda: done.append(1)}, {"a": once, "another": 9.0}, budget_s=0.01)
    assert set(found) == {"a"}
    assert len(done) == calls if calls is not None else len(done) >= 2 * timing.FEW  # each is rehearsed
    assert (found["a"] == once) == (calls == 0)
