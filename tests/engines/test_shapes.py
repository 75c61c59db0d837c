"""Arrays have the shapes that annotations state."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "shapes_run.py"


@pytest.mark.slow
def test_stated_shapes_are_true():
    pytest.importorskip("beartype", reason="shapes are checked by beartype")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == "checked\n"
