"""The benchmark of large batches on a GPU, run here on a small one."""

import argparse
import json

import jax
import numpy as np
import pytest

from benchmarks import cifar10_recipe
from benchmarks.cost import accelerator, large_families, models
from benchmarks.cost.families import classifier, normal

SMALL = {
    "small MLP": lambda dtype: classifier(models.MLP((8,), 3, dtype), normal(64, 5), 3),
    "small CNN": lambda dtype: classifier(models.CNN(3, dtype), normal(4, 8, 8, 3), 3),
}


@pytest.fixture
def in_this_process(monkeypatch):
    """Cases are compiled one after another; the CNN not at all, as if that had taken too long."""

    def compile_some(cases, ways, folder, patience):
        for case in cases:
            if case[0] != "small CNN":
                accelerator.save(accelerator.compiled(*case, ways), folder / accelerator.file_of(*case))

    monkeypatch.setattr(accelerator, "LARGE", SMALL)
    monkeypatch.setattr(accelerator, "_compile_side_by_side", compile_some)


def options(tmp_path, **others) -> argparse.Namespace:
    given = {"only": None, "dtype": None, "seconds": 0.01, "patience": 1.0, "compile_into": None, "out": tmp_path}
    given["ways"] = list(accelerator.WAYS)
    return argparse.Namespace(**(given | others))


@pytest.mark.slow
def test_every_case_is_recorded_and_one_that_fails_costs_no_other(in_this_process, tmp_path):
    accelerator.run(options(tmp_path))
    content = json.loads((tmp_path / "accelerator.json").read_text())
    assert [(r["family"], r["dtype"]) for r in content["runs"]] == [
        (name, dtype) for name in SMALL for dtype in ("float32", "bfloat16")
    ]
    first, *_, last = content["runs"]
    assert set(first["ratio"]) == set(accelerator.WAYS) and first["ratio"]["ordinary"] == 1
    assert first["largest_relative_error"] < 1e-5, "nothing is rounded to TF32 here"
    assert "FileNotFoundError" in last["failed"]
    table = accelerator.markdown(content)
    assert table.count("small MLP") == 2 and table.count("failed") == 2


@pytest.mark.slow
def test_only_some_families_and_ways(monkeypatch, tmp_path):
    asked = []  # JAX cannot load the same program twice in one process, so this one is not written to a file
    monkeypatch.setattr(accelerator, "LARGE", SMALL)
    monkeypatch.setattr(accelerator, "_compile_side_by_side", lambda cases, ways, *_: asked.append((cases, ways)))
    monkeypatch.setattr(accelerator, "load", lambda _: accelerator.compiled("small MLP", "float32", asked[0][1]))
    accelerator.run(options(tmp_path, only=["mlp", "lstm"], dtype="float32", ways=["ordinary", "flat clip"]))
    assert asked == [([("small MLP", "float32")], ["ordinary", "flat clip"])]
    content = json.loads((tmp_path / "accelerator.json").read_text())
    (run,) = content["runs"]
    assert set(run["ratio"]) == set(run["profile"]) == {"ordinary", "flat clip"}
    assert run["largest_relative_error"] is None, "nothing to compare with"
    assert "small MLP" in accelerator.markdown(content)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"only": ["lstm", "wrn"]}, "no family matches lstm or wrn"), ({"ways": ["flat clip"]}, "--ways")],
)
def test_what_cannot_be_compared_is_refused(in_this_process, tmp_path, wrong, says):
    with pytest.raises(accelerator.arguments.UserError, match=says):
        accelerator.run(options(tmp_path, **wrong))


@pytest.mark.slow
def test_the_recipe_is_that_of_the_example_and_fits_into_a_file():
    """Keys cannot be written, so examples hold their data."""
    family = large_families._recipe(2, None)
    loss_fn, params = cifar10_recipe.loss_and_params()
    examples, keys = cifar10_recipe.noise_batch(2)
    _, key_data = jax.device_get(family.batch)
    jax.tree.map(np.testing.assert_array_equal, family.params, params)
    assert jax.random.wrap_key_data(key_data[1]) == keys[1]
    example, stored = (jax.tree.map(lambda x: x[1], batch) for batch in ((examples, keys), family.batch))
    assert jax.jit(family.loss_fn)(params, stored) == jax.jit(loss_fn)(params, example)


@pytest.mark.slow
def test_an_unfinished_file_is_none(in_this_process, tmp_path, monkeypatch):
    case = accelerator.compiled("small MLP", "float32")
    monkeypatch.setattr(accelerator.Path, "rename", lambda self, to: None)  # killed before
    accelerator.save(case, tmp_path / accelerator.file_of("small MLP", "float32"))
    assert [path.suffix for path in tmp_path.iterdir()] == [".unfinished"]


def test_a_wrong_result_is_no_result(in_this_process):
    case = accelerator.compiled("small MLP", "float32")
    programs = case.programs | {"flat clip": case.programs["ordinary"]}
    with pytest.raises(AssertionError, match="differs from jax_privacy's"):
        accelerator.measure(case._replace(programs=programs), "float32", 0.01)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_wgrad_implicit_gemm_indexed_f32f32_tf32f32", "products"),
        ("nvjet_sm90_tst_128x160_64x5", "products"),
        ("void wgrad_alg0_engine_NHWC<float>", "products"),
        ("loop_convert_fusion", accelerator.OTHER),
        ("input_scatter_fusion", accelerator.OTHER),
        ("memcpy32_post", "copies"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert accelerator.kind_of(kernel) == kind


def test_what_bounds_a_run():
    profile = {"wall": 10.0, "busy": 4.0, "seconds_by_kind": {"products": 3.0, "copies": 1.0}}
    assert accelerator.bound_by(profile) == "waiting for launches (60%)"
    assert accelerator.bound_by(profile | {"wall": 5.0}) == "products (60%)"
