"""Brings pages and docstrings from elsewhere in the repository into the site, so that each is written once.

MkDocs loads this file as a hook (the ``on_...`` functions), and griffe as an extension (`Docstrings`).
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]

# Pages that live elsewhere in the repository: their place in the site, and their source.
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "benchmarks/RESULTS.md",
    "security.md": "SECURITY.md",
}

# Rooms of dpopt that users do not call.
INTERNAL_ROOMS = {"common", "composition", "engines", "ghost", "normals"}


@cache
def public_names() -> dict[str, str]:
    """Maps every documented name to its identifier in the API reference."""
    names = {}
    for path in sorted((ROOT / "dpopt").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] in INTERNAL_ROOMS or any(p.startswith("_") for p in parts[1:]):
            continue
        module = ".".join(parts)
        names[module] = module
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                names[f"{module}.{node.name}"] = f"{module}.{node.name}"
    for node in ast.parse((ROOT / "dpopt" / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module not in ("importlib", "dpopt"):
            names |= {f"dpopt.{alias.asname}": f"{node.module}.{alias.name}" for alias in node.names}
    # Packages that export the names of their modules
    for package in ("audit", "correlated", "optimizers.baselines", "sklearn", "tuning"):
        path = ROOT / "dpopt" / package.replace(".", "/") / "__init__.py"
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                found = {a.asname or a.name: names.get(f"{node.module}.{a.name}") for a in node.names}
                names |= {f"dpopt.{package}.{name}": target for name, target in found.items() if target}
    for module in ("optimizers.baselines", "run.loading", "run.sharding", "samplers.truncated"):  # exported by dpopt
        long, short = f"dpopt.{module}.", f"dpopt.{module.rpartition('.')[2]}."
        names |= {short + name.removeprefix(long): target for name, target in names.items() if name.startswith(long)}
    names["dpopt.explain"] = "dpopt.ghost.explain.explain"
    return names


def linked(text: str, here: str = "dpopt") -> str:
    """Turns names in single backticks into links to the API reference."""

    def link(match: re.Match) -> str:
        written, called = match["name"], match["call"] or ""
        for name in (written, f"{here}.{written}", f"dpopt.{written}"):
            if name in public_names():
                return f"[`{written}{called}`][{public_names()[name]}]"
        return match[0]

    return re.sub(r"(?<![`\[])`(?P<name>[A-Za-z_][\w.]*)(?P<call>\(\))?`(?!`)", link, text)


def outside_code(change: Any, markdown: str) -> str:
    """Applies ``change`` to the text between fenced blocks."""
    parts = re.split(r"(^```.*?^```[^\n]*$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def on_files(files: Any, *, config: Any) -> Any:
    """Adds pages and plots from elsewhere in the repository."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for plot in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Links full names (``dpopt.dp_sgd``) in the text of a page to the API reference."""
    del config, files
    folder = (ROOT / "docs" / page.file.src_uri).parent
    places = {source: name for name, source in PAGES.items()}

    def moved(match: re.Match) -> str:  # a link between files of the repository, as the site needs it
        return f"]({places.get(match[1], match[1].removeprefix('docs/'))}"

    def link(text: str) -> str:
        text = re.sub(r"(?<![`\[])`dpopt\.[\w.]+(?:\(\))?`(?!`)", lambda m: linked(m[0]), text)
        if page.file.src_uri in PAGES:
            text = re.sub(r"\]\(([\w/]+\.md)", moved, text)
        # Links to other files of the repository work on GitHub; the site has only the pages.
        return re.sub(r"\[([^\]]*)\]\((\.\./[^)]*)\)", lambda m: m[1] if is_elsewhere(m[2]) else m[0], text)

    def is_elsewhere(target: str) -> bool:
        path = (folder / target.partition("#")[0]).resolve()
        return path.exists() and not path.is_relative_to(ROOT / "docs")

    return outside_code(link, markdown)


def _math(tex: str, display: str) -> str:
    if "&" in tex or r"\\" in tex:
        tex = rf"\begin{{align*}} {tex} \end{{align*}}"
    return convert(tex, display=display)


def as_markdown(doc: str, here: str = "dpopt") -> str:
    """Converts a docstring to Markdown: formulas to MathML, doctests to code blocks, names to links."""

    def block(match: re.Match) -> str:
        tex = " ".join(line.strip() for line in match["tex"].splitlines())
        return f"{_math(tex.strip(), 'block')}\n"

    doc = re.sub(r"^\.\. math::(?P<tex>.*?)(?:\n(?=\n\S)|\Z)", block, doc, flags=re.DOTALL | re.MULTILINE)
    doc = re.sub(r":math:`([^`]*)`", lambda m: _math(" ".join(m[1].split()), "inline"), doc)
    doc = re.sub(r"^>>> .*?(?=\n\n|\Z)", lambda m: f"```pycon\n{m[0]}\n```", doc, flags=re.DOTALL | re.MULTILINE)
    doc = re.sub(r"^(Reference|\*Privacy\*): ", lambda m: f"**{m[1].strip('*')}**: ", doc, flags=re.MULTILINE)
    return outside_code(lambda text: linked(text, here), doc)


class Docstrings(griffe.Extension):
    """Rewrites docstrings before mkdocstrings parses them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, obj.module.path)
