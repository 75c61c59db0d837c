"""Runs the notebooks and stores their outputs: all by ``python -m notebooks.run``, one by ``... run 03``."""

import hashlib
import os
import sys
import time
import tomllib
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def paths() -> list[Path]:
    """The notebooks, ordered by number."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, **environment: str) -> nbformat.NotebookNode:
    """Runs a notebook from top to bottom in a fresh kernel, on the CPU, without changing the file.

    Raises:
        CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=1_800,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        # Timings of cells would differ with every run.
        record_timing=False,
    )
    client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu", **environment})
    return notebook


def digest(notebook: nbformat.NotebookNode) -> str:
    """Hash of a notebook's code, stored with the outputs to check that they belong to this code."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def project_url() -> str | None:
    """The project's address on GitHub, if pyproject.toml has one."""
    with open(FOLDER.parent / "pyproject.toml", "rb") as file:
        urls = tomllib.load(file)["project"].get("urls", {}).values()
    return next((url.rstrip("/") for url in urls if url.startswith("https://github.com/")), None)


def normalize(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Removes timings and kernel details, and numbers the cells by position."""
    url = project_url()
    first = notebook.cells[0]
    first.source = "\n".join(line for line in first.source.split("\n") if not line.startswith(BADGE))
    if url is not None:
        at = url.removeprefix("https://github.com/")
        target = f"https://colab.research.google.com/github/{at}/blob/main/notebooks/{path.name}"
        first.source = f"{BADGE}({target})\n{first.source}"
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number:02}"
        cell.metadata.clear()
    notebook.metadata.clear()
    notebook.metadata.update({**METADATA, "dpopt": {"outputs_of": digest(notebook)}})


def main(names: list[str]) -> None:
    """Runs the named notebooks in full (all if none is named) and writes them back with their outputs."""
    chosen = [path for path in paths() if not names or path.name.startswith(tuple(names))]
    if not chosen:
        raise SystemExit(f"no notebook begins with {' or '.join(names)}; there are {[path.name for path in paths()]}")
    for path in chosen:
        started = time.perf_counter()
        notebook = execute(path, DPOPT_NOTEBOOKS_SMALL="0")
        normalize(notebook, path)
        nbformat.write(notebook, path)
        size = path.stat().st_size / 1_000
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {size:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
