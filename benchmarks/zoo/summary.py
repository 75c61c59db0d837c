"""Tables of the zoo's measurements, compared with targets. Imports none of the frameworks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

SLOWER = 1.05  # the target for auto's time over vmap's, on every model
MEMORY = 1.25  # the target for auto's memory over the ordinary gradient's, on every model
WITHIN = 1.3  # the target for auto's time over the ordinary gradient's, on 90% of the models

HEAD = (
    "model", "ordinary (ms)", "auto", "by layer", "ghost (planned)", "vmap (planned)",
    "compile time: auto", "by layer", "ghost", "vmap", "memory: auto", "by layer", "ghost", "vmap", "auto takes",
)  # fmt: skip
BY_LAYER = "auto, by layer"
_COLUMNS = ("auto", BY_LAYER, "ghost", "vmap")


class Finding(NamedTuple):
    """A figure and its target."""

    what: str
    found: str
    target: str
    is_met: bool


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The models that ran."""
    return [r for r in rows if "error" not in r]


def failed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The models that failed."""
    return [r for r in rows if "error" in r]


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    if "error" in row:
        return [row["model"], *[""] * (len(HEAD) - 2), row["error"].partition("\n")[0]]

    def figures(kind: str, planned: Mapping[str, float] | None = None) -> list[str]:
        found = row[kind]  # of rows that were measured before a way had a column, some are missing
        beside = {way: f" ({x:.2f})" for way, x in (planned or {}).items()}
        return [f"{found[way]:.2f}" + beside.get(way, "") if way in found else "" for way in _COLUMNS]

    return [
        row["model"],
        f"{1e3 * row['seconds']['ordinary']:.1f}",
        *figures("ratio", row["predicted"]),
        *figures("compile_ratio"),
        *figures("memory_ratio"),
        row["taken"],
    ]


def _over(rows: Sequence[dict[str, Any]], figure: dict[str, float], bound: float) -> list[str]:
    return [f"{r['model']} {figure[r['model']]:.2f}" for r in rows if figure[r["model"]] > bound]


def findings(rows: Sequence[dict[str, Any]]) -> list[Finding]:
    """All figures that have a target."""
    rows = measured(rows)
    if not rows:
        return []
    slower = _over(rows, {r["model"]: r["ratio"]["auto"] / r["ratio"]["vmap"] for r in rows}, SLOWER)
    compiling = statistics.median(r["compile_ratio"]["auto"] for r in rows)
    flat = _of_way(rows, "auto", "auto")
    flat.insert(2, _none(f"models where auto takes more than {SLOWER} times vmap's time", slower))
    by_layer = _of_way([r for r in rows if BY_LAYER in r["ratio"]], BY_LAYER, "auto by layer")
    what = "median compile time of auto over the ordinary gradient's"
    return [*flat, Finding(what, f"{compiling:.2f}", "at most 2", compiling <= 2), *by_layer]


def _of_way(rows: Sequence[dict[str, Any]], way: str, name: str) -> list[Finding]:
    """Times and memory of one way over the ordinary gradient's."""
    if not rows:
        return []
    ratios = [r["ratio"][way] for r in rows]
    median, within = statistics.median(ratios), sum(x <= WITHIN for x in ratios) / len(ratios)
    heavy = _over(rows, {r["model"]: r["memory_ratio"][way] for r in rows}, MEMORY)
    what = f"models where {name} takes at most {WITHIN} times the ordinary time"
    return [
        Finding(f"median time of {name} over the ordinary gradient's", f"{median:.2f}", "at most 1.1", median <= 1.1),
        Finding(what, f"{within:.0%}", "90%", within >= 0.9),
        _none(f"models where {name} takes more than {MEMORY} times the ordinary memory", heavy),
    ]


def _none(what: str, names: list[str]) -> Finding:
    return Finding(what, f"{len(names)}: {'; '.join(names)}" if names else "none", "none", not names)


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Warnings that dpopt gave, and errors of models that failed."""
    warned = [f"{r['model']}: {m}" for r in measured(rows) for m in r["warnings"]]
    return warned + [f"{r['model']} failed: {r['error']}" for r in failed(rows)]


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Tables for the terminal: all models, then the targets."""
    view = Table(title="Time, compile time and compiled memory over the ordinary mean gradient's")
    for i, column in enumerate(HEAD):
        view.add_column(column, justify="right" if 0 < i < len(HEAD) - 1 else "left")
    for row in rows:
        view.add_row(*cells(row))
    targets = Table(title=f"{len(measured(rows))} models")
    for column in ("figure", "found", "target", ""):
        targets.add_column(column)
    for f in findings(rows):
        targets.add_row(f.what, f.found, f.target, "met" if f.is_met else "missed")
    return [view, targets]


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(content: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    rows, device = content["runs"], content["environment"]
    intro = (
        f"{len(rows)} of {content['models']} models, each modelled on public code, on {device['device']}, "
        f"{device['cores']} cores. Time, compile time and compiled memory are over the ordinary mean gradient's; the "
        "planner's predictions are in brackets. `auto takes` is the way that `engine='auto'` chose."
    )
    targets = [[f.what, f.found, f.target, "met" if f.is_met else "missed"] for f in findings(rows)]
    parts = [intro, _lines(("figure", "found", "target", ""), targets)]
    parts.append(_lines((*HEAD, "modelled on"), [[*cells(r), r["source"]] for r in rows]))
    if notes(rows):
        parts.append("\n".join(f"- {n}" for n in notes(rows)))
    return "\n\n".join(parts)
