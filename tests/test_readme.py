"""Every Python block of the README runs, and prints what it says it computes."""

import re
from pathlib import Path

import pytest

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_readme_block_runs(index, capsys):
    exec(compile(BLOCKS[index], f"README.md block {index}", "exec"), {})
    printed = capsys.readouterr().out
    if "epsilon" in BLOCKS[index] and "accuracy" in BLOCKS[index]:
        spent = float(re.search(r"epsilon ([\d.]+)", printed).group(1))
        accuracy = float(re.search(r"accuracy ([\d.]+)", printed).group(1))
        assert 2.9 <= spent <= 3.0
        assert accuracy > 0.9


def test_readme_has_the_two_commands_that_the_makefile_has():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in text
        assert f"\n{target}:" in makefile
