"""The import rules of the package, read from its source: nothing is imported here."""

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


def _modules() -> dict[str, Path]:
    """Every module of dpopt by its full name; a package is its ``__init__``."""
    paths = sorted((ROOT / "dpopt").rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


MODULES = _modules()

CORE = [
    f"dpopt.{name}"
    for name in (
        # flat modules
        *("gradients", "clipping", "clip_functions", "noise", "chain", "privacy", "private_mean", "events"),
        *("accounting", "sampling", "keys", "inspection", "_stages"),
        # rooms
        *("common", "engines", "ghost", "composition", "normals", "preconditioners"),
    )
]
NOT_FOR_THE_CORE = [
    "flax",
    *(f"dpopt.{name}" for name in ("optimizers", "run", "flax", "federated", "audit", "tuning", "sklearn")),
]

# In modules. A name that stands in annotations only adds no floor: whoever runs the module does not need it.
LONGEST_CHAIN = 14


class Import(NamedTuple):
    """One imported name: ``from target import attribute``, or ``import target`` where ``attribute`` is empty."""

    module: str
    line: int
    level: str  # "module", "function" (run when the function is called) or "typing" (never run)
    is_used: bool  # other than in annotations, or offered to other modules
    target: str
    attribute: str

    def __str__(self) -> str:
        name = f"{self.target}.{self.attribute}" if self.attribute else self.target
        return f"{MODULES[self.module].relative_to(ROOT)}:{self.line} ({self.level} level) imports {name}"


def _statements(nodes: Iterable[ast.AST], level: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """The import statements below ``nodes``, each with the level it runs at."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, level
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _statements(node.body, "typing")
            yield from _statements(node.orelse, level)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and level == "module":
            yield from _statements(node.body, "function")
        else:
            yield from _statements(ast.iter_child_nodes(node), level)


def _names(nodes: Iterable[ast.AST]) -> Counter[str]:
    return Counter(x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name))


def _annotations(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def imports_of(module: str, source: str) -> Iterator[Import]:
    tree = ast.parse(source)
    for_types = _names(_annotations(tree))
    elsewhere = _names([tree]) - for_types
    for node, level in _statements(tree.body, "module"):
        assert isinstance(node, ast.Import) or node.level == 0, f"{module}:{node.lineno}: a relative import"
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            is_used = elsewhere[name] > 0 or for_types[name] == 0
            if isinstance(node, ast.Import):
                yield Import(module, node.lineno, level, is_used, alias.name, "")
            elif (submodule := f"{node.module}.{alias.name}") in MODULES:
                yield Import(module, node.lineno, level, is_used, submodule, "")
            else:
                yield Import(module, node.lineno, level, is_used, node.module, alias.name)


IMPORTS = [found for module, path in MODULES.items() for found in imports_of(module, path.read_text())]


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def owner_of_private_name(found: Import) -> str | None:
    """The package whose modules may import this name: None if no part of it has a leading underscore."""
    parts = [*found.target.split("."), *filter(None, [found.attribute])]
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            owner = ".".join(parts[:i])
            is_package = owner not in MODULES or MODULES[owner].name == "__init__.py"
            return owner if is_package else owner.rpartition(".")[0]
    return None


def refused(broken: Iterable[Import]) -> str:
    return "\n".join(map(str, broken))


@pytest.mark.parametrize("level", ["module", "function", "typing"])
def test_the_core_imports_nothing_that_is_built_on_it(level):
    broken = [
        i for i in IMPORTS if i.level == level and within(i.module, *CORE) and within(i.target, *NOT_FOR_THE_CORE)
    ]
    assert not broken, refused(broken)


@pytest.mark.parametrize("level", ["module", "function", "typing"])
def test_private_names_stay_in_their_package(level):
    owners = ((i, owner_of_private_name(i)) for i in IMPORTS if i.level == level)
    broken = [i for i, owner in owners if owner is not None and not within(i.module, owner)]
    assert not broken, refused(broken)


def test_optimizers_import_private_names_of_their_own_room_only():
    private = [i for i in IMPORTS if within(i.module, "dpopt.optimizers") and owner_of_private_name(i) is not None]
    assert private, "nothing to check: has the room moved?"
    broken = [i for i in private if not within(i.target, "dpopt.optimizers")]
    assert not broken, refused(broken)


def test_the_package_imports_neither_benchmarks_nor_tests():
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")}  # pytest puts them on the path
    broken = [i for i in IMPORTS if within(i.target, "benchmarks", "tests", "examples", "notebooks", *tests)]
    assert not broken, refused(broken)


def _graph(imports: Iterable[Import]) -> dict[str, set[str]]:
    """Module-level imports within the package."""
    graph = {module: set() for module in MODULES}
    for i in imports:
        if i.level == "module" and i.target in MODULES:
            graph[i.module].add(i.target)
    return graph


def test_the_import_graph_has_no_cycles():
    assert list(graphlib.TopologicalSorter(_graph(IMPORTS)).static_order())  # raises CycleError


def test_no_chain_of_imports_is_long():
    graph = _graph(i for i in IMPORTS if i.is_used)
    chains = {}
    for module in graphlib.TopologicalSorter(graph).static_order():
        chains[module] = [module, *max((chains[t] for t in sorted(graph[module])), key=len, default=[])]
    longest = max(chains.values(), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)


def test_the_map_in_contributing_is_in_the_order_of_imports():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    cells = re.findall(r"^\| (`dpopt/.*?) \|", page, re.MULTILINE)
    line = {name: n for n, cell in enumerate(cells) for name in re.findall(r"(\w+)(?:/|\.py)`", cell)}
    assert len(line) > 20 and all(f"dpopt.{name}" in MODULES for name in line)

    def line_of(module: str) -> int | None:
        return line.get(module.split(".")[1]) if "." in module else None

    placed = [
        (i, line_of(i.module), line_of(i.target)) for i in IMPORTS if i.level == "module" and within(i.target, "dpopt")
    ]
    broken = [i for i, here, there in placed if here is not None and there is not None and there > here]
    assert not broken, refused(broken)


def test_every_import_of_the_package_names_a_module_that_exists():
    broken = [i for i in IMPORTS if within(i.target, "dpopt") and i.target not in MODULES]
    assert not broken, refused(broken)


def test_imports_are_read_as_meant():
    source = """
from typing import TYPE_CHECKING
from dpopt import keys, _stages
if TYPE_CHECKING:
    import flax.nnx
try:
    import numpy as np
except ImportError:
    from dpopt.noise import _draw
class A:
    def f(self, stage: _stages.Stage) -> keys.Key:
        keys.check(stage)
        def g():
            import dpopt.run.loop
"""
    found = [i for i in imports_of("dpopt.chain", source) if i.target != "typing"]
    assert [(i.level, i.is_used, i.target, i.attribute) for i in found] == [
        ("module", True, "dpopt.keys", ""),
        ("module", False, "dpopt._stages", ""),
        ("typing", True, "flax.nnx", ""),
        ("module", True, "numpy", ""),
        ("module", True, "dpopt.noise", "_draw"),
        ("function", True, "dpopt.run.loop", ""),
    ]
    assert [owner_of_private_name(i) for i in found] == [None, "dpopt", None, None, "dpopt", None]
