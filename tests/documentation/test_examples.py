"""The example programs run within their budget and print their accuracy. (`ELSEWHERE` names the tests of others.)"""

import importlib.util
import re
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nnx_cnn", ["--steps", "3"]),
        ("linen_transformer_lora", ["--steps", "2", "--public-steps", "2", "--layers", "1"]),
        ("equinox_model", ["--steps", "3"]),
        ("federated_logistic_regression", ["--steps", "4"]),
    ],
)
def test_example_runs_within_its_budget(name, options, capsys):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with jax.numpy_rank_promotion("allow"):
        example.main([*options, "--epsilon", "2", "--seed", "0"])
    printed = capsys.readouterr().out
    spent, delta, accuracy = re.search(r"epsilon ([\d.]+) at delta (\S+?),? .*test accuracy ([\d.]+)", printed).groups()
    assert 1.9 < float(spent) <= 2.0 and float(delta) < 1 / 300
    assert 0 < float(accuracy) <= 1


# The tests that run the other examples.
ELSEWHERE = {
    "common": "run/test_sharding.py",
    "data_parallel": "run/test_sharding.py",
    "fully_sharded": "run/test_sharding.py",
    "multi_process": "run/test_sharding.py",
    "cifar10_wide_resnet": "benchmarks/test_recipe_runs.py",
    "train_decoder": "benchmarks/test_recipe_runs.py",
    "fine_tune_transformer": "benchmarks/test_pretrained.py",
}


def test_every_example_is_tested_here_or_elsewhere():
    (mark,) = [m for m in test_example_runs_within_its_budget.pytestmark if m.name == "parametrize"]
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ELSEWHERE) | {name for name, _ in mark.args[1]}
    for name in ("cifar10_wide_resnet", "train_decoder"):
        assert f'("{name}"' in (Path(__file__).parents[1] / ELSEWHERE[name]).read_text()
