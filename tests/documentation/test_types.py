"""Types, by pyright's strict rules: in a user's file and in the package."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytest.importorskip("pyright")

ROOT = Path(__file__).parents[2]

FILE = """
import jax
import numpy as np
import optax

import dpopt


def loss_fn(params: jax.Array, example: np.ndarray) -> jax.Array:
    return ((params - example) ** 2).sum()


x, params = np.ones((100, 3)), jax.random.normal(jax.random.key(0), (3,))
opt = dpopt.dp_adam(1e-3, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, key=dpopt.secure_key())
state = opt.init(params)
grads = dpopt.per_example_grads(loss_fn)(params, x[:8], mask=None)
updates, state = opt.update(grads, state, params)
params = optax.apply_updates(params, updates)
print(opt.privacy.step_event())

rate = optax.linear_schedule(1.0, 2.0, 10)
core = dpopt.privatize(l2_clip_norm=1.0, noise_multiplier=rate, expected_batch_size=8, key=dpopt.secure_key())
scheduled = dpopt.chain(core, optax.scale_by_adam(), optax.scale_by_learning_rate(rate))

chained = dpopt.chain(dpopt.clip_and_sum(1.0), dpopt.add_gaussian_noise(1.0, jax.random.key(0)), optax.sgd(0.1))
updates, _ = chained.update(grads, chained.init(params), params)

step = dpopt.make_train_step(loss_fn, opt)
params, state, metrics = step(params, state, x[:8], None)
print(metrics.mean_norm)

builder = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=3, key=dpopt.secure_key())
plan = builder.clip(1.0).noise(1.0).then(optax.sgd(0.1)).build()
result = plan.run(loss_fn, params, lambda rows: x[rows], steps=2)
result = plan.run(loss_fn, params, x)
print(result.params, result.epsilon(delta=1e-3), result.history)
"""
MISTAKES = {
    "plan.run(loss_fn, params, x, stepz=3)": 'No parameter named "stepz"',
    "print(dpopt.dp_adan)": '"dp_adan" is not a known attribute of module "dpopt"',
}


@pytest.mark.slow
def test_pyright_strict_in_a_users_file(tmp_path):
    (tmp_path / "user.py").write_text(FILE + "\n".join(MISTAKES))
    # Optax has no stubs; the rest is strict.
    config = {"typeCheckingMode": "strict", "reportMissingTypeStubs": False, "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    found = [(d["range"]["start"]["line"], d["message"]) for d in json.loads(run.stdout)["generalDiagnostics"]]
    exec(FILE, {})  # the file also runs
    first = FILE.count("\n")
    assert {line for line, _ in found} == {first, first + 1}
    assert set(MISTAKES.values()) <= {message for _, message in found}


@pytest.mark.slow
def test_the_package_passes_its_own_strict_rules():
    """Rules are in pyproject.toml; with an old JAX, whose types say less, they are not asked for."""
    if jax.__version_info__ < (0, 12):
        pytest.skip("types are checked against the newest JAX")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout
