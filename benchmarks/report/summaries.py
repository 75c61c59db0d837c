"""Summarises records of single runs into the rows of a table."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

CORRELATED = ", correlated noise"  # suffix of a contender's name


def summarize(records: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A row for the runs of one setting: the scores of all seeds, their mean and spread, and the fields they share."""
    if not records:
        raise ValueError("a row needs at least one run.")
    scores = [r["score"] for r in records]
    first = records[0]
    shared = (
        "label", "setting", "metric", "higher_is_better", "num_examples", "noise_multiplier", "sampling", "event",
        "epsilon", "delta", "relation", "not_covered_by_epsilon", "parameters", "state_bytes", "environment",
    )  # fmt: skip
    return {
        **{key: first[key] for key in shared},
        "seeds": [r["seed"] for r in records],
        "scores": scores,
        "mean": statistics.fmean(scores),
        "std": statistics.stdev(scores) if len(scores) > 1 else None,
        # For one run, although several seeds ran together.
        "seconds": statistics.median(r["seconds"] / r["seeds_together"] for r in records),
        "step_bytes": max((_step_bytes(r) for r in records if "step_bytes" in r), default=None),
        "curve": [
            [points[0][0], statistics.fmean(p[1] for p in points)]
            for points in zip(*(r["curve"] for r in records), strict=True)
        ],
        **more,
    }


def _step_bytes(record: dict[str, Any]) -> int:
    """Scratch memory of the compiled steps of one run."""
    return record["step_bytes"] // record["seeds_together"]


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of ``old``, with those of ``new`` in their place; additional rows follow those of their table."""

    def key(row):
        return row["table"], row["label"], row.get("target_epsilon")

    fresh = {key(row): row for row in new}
    rows = [fresh.pop(key(row), row) for row in old] + list(fresh.values())
    tables = list(dict.fromkeys(row["table"] for row in rows))
    return sorted(rows, key=lambda row: tables.index(row["table"]))


def spread(row: dict[str, Any]) -> str:
    """``mean ± std`` over seeds."""
    return f"{row['mean']:.3f}" + ("" if row["std"] is None else f" ± {row['std']:.3f}")


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A table for the terminal. It is the same for a sweep and a resumed sweep."""
    view = Table(title=title)
    for column in ("", "epsilon (PLD)", "epsilon (RDP)", "score", "published", "seeds"):
        view.add_column(column, justify="left" if not column else "right")
    for row in rows:
        published = row.get("published")
        view.add_row(
            row["label"],
            "" if row["epsilon"]["pld"] is None else f"{row['epsilon']['pld']:.2f}",  # a search has no PLD
            f"{row['epsilon']['rdp']:.2f}",
            spread(row),
            "" if published is None else f"{published:g}",
            str(len(row["seeds"])),
        )
    return view
