"""The table of large batches. Imports none of the frameworks."""

import statistics
from typing import Any

from benchmarks.report import markdown as tables

HEAD = ("model", "examples", "ordinary (ms)", "auto: time", "memory", "auto takes")


def markdown(content: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    rows, device = content["runs"], content["environment"]
    sizes = sorted({r["batch_size"] for r in rows})
    table = tables.rows(HEAD, [_cells(row) for row in rows])
    medians = "; ".join(f"{size:,} examples: {_median(rows, size)}" for size in sizes)
    return (
        f"Models with their own examples repeated, on {device['device']}, {device['cores']} cores. Time and compiled "
        f"memory are over the ordinary mean gradient's. Medians: {medians}.\n\n{table}"
    )


def _median(rows: list[dict[str, Any]], size: int) -> str:
    own = [r for r in rows if r["batch_size"] == size]
    time, memory = (statistics.median(r[figure] for r in own) for figure in ("ratio", "memory_ratio"))
    return f"time {time:.2f}, memory {memory:.2f}"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        f"{row['batch_size']:,}",
        f"{1e3 * row['seconds']['ordinary']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['memory_ratio']:.2f}",
        row["taken"],
    ]
