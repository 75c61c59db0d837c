"""README and documentation: every Python block runs, figures match the results, and quotes match the source."""

import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import doc_outputs
import jax
import jax.numpy as jnp
import pytest
from test_docstrings import EXPORTED, PUBLIC

import dpopt
from benchmarks.report import figures
from dpopt.ghost.rules import base as rules

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUOTE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
# The blocks of a page run in order and share their names, as a reader would run them. (Blocks after a diff belong to
# the program in the diff, and run in their own test.)
WITH_CODE = [page for page in PAGES if PYTHON.search(page.read_text()) and "```diff" not in page.read_text()]


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", {**rules._RULES})  # rules that a page registers are for that page only
    with jax.numpy_rank_promotion("allow"):  # forbidden in the tests, allowed for readers
        yield


@pytest.mark.one_in(2)
@pytest.mark.parametrize("index", range(len(PYTHON.findall(README.read_text()))))
def test_readme_block_runs(index, capsys):
    """Blocks run in order; a block that imports JAX starts a new program."""
    blocks = PYTHON.findall(README.read_text())[: index + 1]
    first = max(i for i, block in enumerate(blocks) if block.startswith("import jax"))
    names = {}
    for block in blocks[first:]:
        capsys.readouterr()
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    if "epsilon" in block and "accuracy" in block:
        spent = float(re.search(r"epsilon ([\d.]+)", printed).group(1))
        accuracy = float(re.search(r"accuracy ([\d.]+)", printed).group(1))
        assert 2.9 <= spent <= 3.0
        assert accuracy > 0.9


QUICK = ("concepts.md", "privacy_argument.md", "adding_a_ghost_rule.md")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "page",
    [page if page.name in QUICK else pytest.param(page, marks=pytest.mark.slow) for page in WITH_CODE],
    ids=lambda p: str(p.relative_to(ROOT / "docs")),
)
def test_blocks_of_a_page_print_what_it_shows(page):
    printed = []
    for block, output in doc_outputs.run(page):
        if output is None:
            continue
        printed.append(output)
        shown = block["output"] or ""
        assert doc_outputs.agrees(shown, output), f"run python -m tests.doc_outputs {page}\n{output}"
    if page.name == "getting_started.md":
        spent, accuracy = re.search(r"epsilon ([\d.]+), accuracy ([\d.]+)", "".join(printed)).groups()
        assert 2.9 <= float(spent) <= 3.0 and float(accuracy) > 0.9


def test_what_a_page_shows_is_compared():
    assert doc_outputs.agrees("epsilon 3.00 of ...\n", "epsilon 3.00 of 10\n")
    assert doc_outputs.agrees("a 3.00 1e-05\nb\n", "a 3.1 1e-05\nb\n")
    for other in ("a 3.20 1e-05\nb\n", "a 3.00 1e-05\n", "a 3.00 1e-05\nc\n", "a 3.00\nb\n", ""):
        assert not doc_outputs.agrees("a 3.00 1e-05\nb\n", other)


@pytest.mark.slow
def test_an_nnx_loop_becomes_private_in_six_lines(tmp_path, capsys):
    page = ROOT / "docs" / "how_to" / "nnx_loop.md"
    (diff,) = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 6
    for sign in "-+":
        program = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign))
        names = {"FOLDER": tmp_path / ("before" if sign == "-" else "after")}
        exec(compile(program, f"{page.name} ({sign})", "exec"), names)
        assert float(re.findall(r"step 200: accuracy ([\d.]+)", capsys.readouterr().out)[0]) > 0.9
        assert names["checkpoints"].latest_step() == 199
    (after,) = PYTHON.findall(page.read_text())
    exec(after, names)
    assert 1 < names["epsilon"] < 8


def test_readme_has_the_commands_that_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "docs"):
        assert f"make {target}" in README.read_text()
        assert f"\n{target}:" in makefile


def test_the_example_of_the_readme_is_short():
    example = next(b for b in PYTHON.findall(README.read_text()) if "accuracy" in b)
    training = [line for line in example.splitlines() if line and not line.startswith(("import", "from", "print"))]
    assert len(training) <= 20


def test_bytes_of_state_in_the_readme():
    four = dict(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0))
    params = jax.ShapeDtypeStruct((1_000, 1_000), jnp.float32)
    state = jax.eval_shape(dpopt.dp_micro_adam(1e-3, **four).init, params)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / params.size
    (stated,) = re.findall(r"`dp_micro_adam` .*?([\d.]+) bytes of state per parameter", README.read_text())
    assert stated == f"{size:.1f}"


@pytest.mark.parametrize("page", figures.pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_figures_are_those_of_the_results(page):
    text = page.read_text()
    assert figures.updated(text) == text, "run python -m benchmarks report"
    # A measurement outside the markers would be typed by hand and go out of date.
    assert "±" not in re.sub(r"<!-- figures:.*?<!-- end of figures -->", "", text, flags=re.DOTALL).replace(
        "mean ±", ""
    )


def test_figures_follow_the_results(tmp_path):
    for path in figures.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text().replace('"mean": 0.', '"mean": 10.'))
    page = "<!-- figures: headline -->\nold\n<!-- end of figures -->\n"
    assert " 10." in figures.updated(page, tmp_path) and "old" not in figures.updated(page, tmp_path)

    runs = [
        {"method": method, "target_epsilon": epsilon, "mean": mean, "std": None}
        for method, epsilon, mean in (("DP-SGD", 3.0, 0.7), ("DP-Adam", 3.0, 0.8), ("Adam", None, 0.9))
    ]
    (tmp_path / "quickstart.json").write_text(json.dumps({"runs": runs}))
    ratios = [
        {"family": f, "ratio": {"ghost": r, "ghost, diagonal": 2.0, "ghost whole": r + 1, "vmap": 9.0}}
        for f, r in (("a", 1), ("b", 3))
    ]
    (tmp_path / "speed.json").write_text(json.dumps({"environment": {"device": "d", "cores": 2}, "runs": ratios}))
    assert "epsilon 3: DP-Adam 0.800; not private: Adam 0.900" in figures.updated(page, tmp_path)
    assert "1.00 to 3.00 times its time, over 2 model families (2.00 to 4.00 where" in figures.updated(page, tmp_path)
    assert "| b | 3.00 | 2.00 | 4.00 | 9.00 |" in figures.updated(page.replace("headline", "speed"), tmp_path)
    with pytest.raises(ValueError, match="no section of figures 'headlines'"):
        figures.updated(page.replace("headline", "headlines"), tmp_path)


QUOTES = [(page, *q) for page in PAGES for q in QUOTE.findall(page.read_text())]


@pytest.mark.parametrize(("page", "path", "quote"), QUOTES, ids=[f"{q[1]}-{i}" for i, q in enumerate(QUOTES)])
def test_quoted_lines_are_in_the_source(page, path, quote):
    source = (ROOT / path).read_text()
    indented = ["".join(" " * n + line for line in quote.splitlines(keepends=True)) for n in range(0, 24, 4)]
    assert any(f"\n{text}" in source for text in indented), f"{page.name} quotes lines that {path} does not have"


def test_tests_that_the_privacy_argument_names_exist():
    text = (ROOT / "docs" / "privacy_argument.md").read_text()
    sources = "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    names = re.findall(r"`(test_\w+)`", text)
    assert len(names) > 5 and all(f"def {name}(" in sources for name in names)
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/]+\.py)`", text))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as by ``make docs``: a broken link, anchor or name is an error."""
    pytest.importorskip("mkdocs")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", target]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.slow
def test_the_site_builds_and_documents_every_public_name(site):
    entries = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split(" ", 1)[0] for line in entries.splitlines()}
    assert {name for name in PUBLIC if id(PUBLIC[name]) in EXPORTED} <= documented


@pytest.mark.slow
def test_the_site_shows_formulas_and_doctests_as_such(site):
    for page in (site / "api").rglob("*.html"):
        shown = re.sub(r"<details.*?</details>", "", page.read_text(), flags=re.DOTALL)  # the source code
        assert ":math:" not in shown and ".. math" not in shown, page
        assert "<blockquote>" not in shown, f"{page}: a doctest became a quotation"


@pytest.mark.slow
def test_the_site_asks_no_other_machine_for_anything(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page} loads {loaded}"
