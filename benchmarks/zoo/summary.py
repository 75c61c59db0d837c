"""Tables of the zoo's measurements, compared with targets. Imports none of the frameworks."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

SLOWER = 1.05  # the target for auto's time over vmap's, on every model
MEMORY = 1.25  # the target for auto's memory over the ordinary gradient's, on every model
WITHIN = 1.3  # the target for auto's time over the ordinary gradient's, on 90% of the models

HEAD = (
    "model", "ordinary (ms)", "auto", "ghost (planned)", "vmap (planned)", "compile time: auto", "ghost", "vmap",
    "memory: auto", "ghost", "vmap", "auto takes",
)  # fmt: skip


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

    def beside(way: str) -> str:
        planned = row["predicted"].get(way)
        return f"{row['ratio'][way]:.2f}" + (f" ({planned:.2f})" if planned is not None else "")

    return [
        row["model"],
        f"{1e3 * row['seconds']['ordinary']:.1f}",
        f"{row['ratio']['auto']:.2f}",
        beside("ghost"),
        beside("vmap"),
        *(f"{row['compile_ratio'][n]:.2f}" for n in ("auto", "ghost", "vmap")),
        *(f"{row['memory_ratio'][n]:.2f}" for n in ("auto", "ghost", "vmap")),
        row["taken"],
    ]


def _over(rows: Sequence[dict[str, Any]], figure: dict[str, float], bound: float) -> list[str]:
    return [f"{r['model']} {figure[r['model']]:.2f}" for r in rows if figure[r["model"]] > bound]


def findings(rows: Sequence[dict[str, Any]]) -> list[Finding]:
    """All figures that have a target."""
    rows = measured(rows)
    if not rows:
        return []
    ratios = [r["ratio"]["auto"] for r in rows]
    within = sum(x <= WITHIN for x in ratios) / len(ratios)
    median, compiling = statistics.median(ratios), statistics.median(r["compile_ratio"]["auto"] for r in rows)
    slower = _over(rows, {r["model"]: r["ratio"]["auto"] / r["ratio"]["vmap"] for r in rows}, SLOWER)
    heavy = _over(rows, {r["model"]: r["memory_ratio"]["auto"] for r in rows}, MEMORY)

    def listed(names: list[str]) -> str:
        return f"{len(names)}: {'; '.join(names)}" if names else "none"

    return [
        Finding("median time of auto over the ordinary gradient's", f"{median:.2f}", "at most 1.1", median <= 1.1),
        Finding(
            f"models where auto takes at most {WITHIN} times the ordinary time", f"{within:.0%}", "90%", within >= 0.9
        ),
        Finding(f"models where auto takes more than {SLOWER} times vmap's time", listed(slower), "none", not slower),
        Finding(
            f"models where auto takes more than {MEMORY} times the ordinary memory", listed(heavy), "none", not heavy
        ),
        Finding(
            "median compile time of auto over the ordinary gradient's", f"{compiling:.2f}", "at most 2", compiling <= 2
        ),
    ]


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
