"""The table of large batches. Imports none of the frameworks."""

import statistics
from typing import Any

from benchmarks.report import markdown as tables

HEAD = (
    "model", "examples", "ordinary (ms)", "one norm: time", "memory", "diagonal: time", "memory", "by layer: time",
    "memory", "takes for one norm",
)  # fmt: skip
_WAYS = {"auto": "one norm", "auto, diagonal": "under a diagonal", "auto, by layer": "a norm for each parameter"}


def markdown(content: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    rows, device = content["runs"], content["environment"]
    sizes = sorted({r["batch_size"] for r in rows})
    table = tables.rows(HEAD, [_cells(row) for row in rows])
    medians = "; ".join(f"{size:,} examples: {_medians(rows, size)}" for size in sizes)
    where = f"{device['device']}, {device['cores']} cores"
    return (
        f"Models with their own examples repeated, on {where}: clipped by one norm, by that under a diagonal (as "
        "preconditioners apply), or by a norm for each parameter. Time and compiled memory are over the ordinary mean "
        f"gradient's. Medians: {medians}.\n\n{table}"
    )


def _medians(rows: list[dict[str, Any]], size: int) -> str:
    own = [r for r in rows if r["batch_size"] == size]
    found = []
    for way, title in _WAYS.items():
        if all(way in r["ratio"] for r in own):
            time, memory = (statistics.median(r[figure][way] for r in own) for figure in ("ratio", "memory_ratio"))
            found.append(f"{title}, time {time:.2f}, memory {memory:.2f}")
    return ", ".join(found)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        f"{row['batch_size']:,}",
        f"{1e3 * row['seconds']['ordinary']:.1f}",
        *(_figure(row[figure], way) for way in _WAYS for figure in ("ratio", "memory_ratio")),
        row["taken"]["auto"],
    ]


def _figure(figures: dict[str, float], way: str) -> str:
    return f"{figures[way]:.2f}" if way in figures else ""
