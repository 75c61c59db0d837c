"""What the documentation takes from elsewhere in the repository, so that it is written once.

MkDocs loads this file as a hook (the ``on_...`` functions) and griffe as an extension (`Docstrings`).
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

# Pages that live elsewhere in the repository: where in the site, and where from.
PAGES = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md", "results.md": "benchmarks/RESULTS.md"}

# Rooms of dpopt that users do not call.
INTERNAL_ROOMS = {"common", "composition", "engines", "ghost", "normals"}


@cache
def public_names() -> dict[str, str]:
    """Every documented name, and the identifier that the API reference has for it."""
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
    names["dpopt.explain"] = "dpopt.ghost.explain.explain"
    return names


def linked(text: str, here: str = "dpopt") -> str:
    """Names in single backticks become links to the API reference."""

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
    """Adds the pages and plots that live elsewhere."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for plot in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Links full names (``dpopt.dp_sgd``) in the text of a page to the API reference."""
    del config, files
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def link(text: str) -> str:
        text = re.sub(r"(?<![`\[])`dpopt\.[\w.]+(?:\(\))?`(?!`)", lambda m: linked(m[0]), text)
        # A link to a file of the repository works where the repository is shown; the site has the pages only.
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
    """A docstring of dpopt as Markdown: formulas as MathML, doctests as code, names as links."""

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
