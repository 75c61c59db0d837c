"""Every notebook runs from top to bottom in its small setting, and is stored with the outputs of a full run."""

import base64
import re
import struct

import nbformat
import pytest

from notebooks import run

PATHS = run.paths()
IDS = [path.stem for path in PATHS]
COLAB = "colab.research.google.com"


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def text(output):
    return output.get("text", "") + output.get("data", {}).get("text/plain", "")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_a_notebook_runs(path):
    notebook = run.execute(path, DPOPT_NOTEBOOKS_SMALL="1")  # conftest.py's setting of JAX is passed on
    said = "".join(map(text, outputs(notebook)))
    assert "small setting" in said
    assert not [o.text for o in outputs(notebook) if o.get("name") == "stderr"], "a warning, or something like it"
    assert "nan" not in re.findall(r"\w+", said)


@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_stored_outputs_are_those_of_a_full_run_of_this_code(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.dpopt.outputs_of == run.digest(notebook), "edited since: make notebooks"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "full setting" in "".join(map(text, outputs(notebook)))
    assert not [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]


@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_stored_notebooks_are_small_and_name_no_machine(path):
    assert path.stat().st_size < 300_000
    stored = nbformat.read(path, as_version=4)
    images = [o.data["image/png"] for o in outputs(stored) if "image/png" in o.get("data", {})]
    assert images
    for image in images:
        width, height = struct.unpack(">II", base64.b64decode(image)[16:24])
        assert max(width, height) <= 1_000
    said = "".join(map(text, outputs(stored)))
    assert not re.search(r"(?<![\w.])/(?:\w+/)+\w+|[A-Z]:\\|0x[0-9a-f]{6,}", said), "a path, or an address in memory"


@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_a_notebook_opens_in_colab(path):
    stored = nbformat.read(path, as_version=4)
    first, install = stored.cells[0].source, stored.cells[1].source
    assert first.count("\n# ") + first.startswith("# ") == 1
    assert "%pip install" in install and 'find_spec("dpopt")' in install
    assert install == nbformat.read(PATHS[0], as_version=4).cells[1].source
    url = run.project_url()
    # A badge needs the project's address.
    badges = [] if url is None else [f"{url.removeprefix('https://github.com/')}/blob/main/notebooks/{path.name}"]
    assert re.findall(rf"{COLAB}/github/([^)]+)", first) == badges


def test_the_eight_notebooks_are_there():
    assert [int(path.name[:2]) for path in PATHS] == list(range(1, 9))
    assert re.findall(r"\]\(([^)]+)\)", (run.FOLDER / "README.md").read_text()) == [path.name for path in PATHS]


@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_links_between_notebooks_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        for target in re.findall(r"\]\(([^)]+\.ipynb)\)", cell.source):
            assert COLAB in target or (path.parent / target).exists(), target
