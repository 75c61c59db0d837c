"""The utility figures in README and docs: the papers' tables, the frontier, correlated noise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.report import columns, markdown, summaries

Row = dict[str, Any]


def _by(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Rows grouped by ``keys``, the best of each group first."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(k) for k in keys), []).append(row)
    return {k: sorted(g, key=lambda r: -r["mean"] if r["higher_is_better"] else r["mean"]) for k, g in groups.items()}


def _score(row: Row) -> str:
    seeds = len(row["seeds"])
    return f"{summaries.spread(row)}" + (" (one seed)" if seeds == 1 else f" ({seeds} seeds)")


def _published(row: Row) -> str:
    """The paper's figure, or an empty cell."""
    return "" if row["published"] is None else f"{row['published']:g}"


def _epsilon(row: dict[str, Any]) -> str:
    """Epsilon by PLD, or by RDP for a search, which has no PLD."""
    by = row["epsilon"]
    return f"{by['rdp']:.2f} (RDP)" if by["pld"] is None else f"{by['pld']:.2f}"


def _utility(rows: Sequence[Row], *, published: bool) -> str:
    """The rows of one table, the best first."""
    cells = {"optimizer": [row["label"] for row in rows]}
    cells["epsilon"] = [_epsilon(row) for row in rows]
    cells["with tuning"] = [columns.with_tuning(row) for row in rows]
    cells[rows[0]["metric"]] = [_score(row) for row in rows]
    if published:
        cells["published"] = [_published(row) for row in rows]
    cells["state, bytes / parameter"] = [f"{row['state_bytes'] / row['parameters']:.1f}" for row in rows]
    cells["step, MB"] = [columns.step_memory(row) for row in rows]
    cells["seconds"] = [columns.seconds(row) for row in rows]
    cells["not covered by epsilon"] = [columns.not_covered(row) for row in rows]
    return markdown.columns(cells)


def papers(results: Path) -> str:
    """The papers' tables, the best row first."""
    groups = _by(records.load(results, "utility-papers")["rows"], "table")
    return "\n\n".join(f"**{table}**\n\n{_utility(rows, published=True)}" for (table,), rows in groups.items())


def frontier(results: Path) -> str:
    """All contenders at an equal privacy and tuning budget, by data set and epsilon, the best first."""
    groups = _by(records.load(results, "utility-frontier")["rows"], "table", "target_epsilon")
    return "\n\n".join(
        f"**{table}, epsilon {epsilon:g}**\n\n{_utility(rows, published=False)}"
        for (table, epsilon), rows in sorted(groups.items())
    )


def verdict(results: Path) -> str:
    """How far every contender is behind the best one at the same budget, over all epsilons; the best first."""
    groups = _by(records.load(results, "utility-frontier")["rows"], "table", "target_epsilon")
    behind: dict[str, dict[str, list[float]]] = {}  # by contender and data set, at each epsilon
    places: dict[str, list[float]] = {}
    metrics = {table: rows[0]["metric"] for (table, _), rows in groups.items()}
    for (table, _), rows in groups.items():
        for place, row in enumerate(rows):
            behind.setdefault(row["label"], {}).setdefault(table, []).append(abs(row["mean"] - rows[0]["mean"]))
            places.setdefault(row["label"], []).append(place / (len(rows) - 1))
    tables = sorted(metrics)
    lines = [
        [label, *(_mean_and_most(behind[label].get(table)) for table in tables)]
        for label in sorted(behind, key=lambda label: sum(places[label]) / len(places[label]))
    ]
    head = ["optimizer", *(f"{table}, {metrics[table]}" for table in tables)]
    return markdown.rows(head, lines, ["---", *["---:"] * len(tables)])


def _mean_and_most(behind: Sequence[float] | None) -> str:
    return "" if behind is None else f"{sum(behind) / len(behind):.3f}, at most {max(behind):.3f}"


def epochs(results: Path) -> str:
    """The effect of correlated noise at equal epsilon and computation: by contender, and for DP-SGD cell by cell."""
    content = records.load(results, "utility-epochs")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks utility --suite epochs` measures it on your machine."
    cells: dict[tuple, Row] = {(r["contender"], r["table"], r["target_epsilon"]): r for r in content["rows"]}
    pairs = {key: (row, cells.get((key[0] + summaries.CORRELATED, *key[1:]))) for key, row in cells.items()}
    names = [n for n in dict.fromkeys(n for n, _, _ in cells) if not n.endswith(summaries.CORRELATED)]
    lines = []
    for name in names:
        gains = [_gain(a, b) for (n, _, _), (a, b) in pairs.items() if n == name and b is not None]
        counts = [sum(g > 1 for g in gains), sum(abs(g) <= 1 for g in gains), sum(g < -1 for g in gains)]
        lines.append([name, *map(str, counts)])
    head = ["contender", "better", "within the spread", "worse"]
    by_contender = markdown.rows(head, lines, ["---", *["---:"] * 3])
    first, epsilons = names[0], sorted({e for _, _, e in cells})
    lines = []
    for title in dict.fromkeys(t for _, t, _ in cells):
        own = [pairs.get((first, title, e)) for e in epsilons]
        told = [f"{summaries.spread(p[0])}, {summaries.spread(p[1])}" if p and p[1] else "" for p in own]
        lines.append([f"{title}, {next(p for p in own if p)[0]['metric']}", *told])
    head = [first, *(f"epsilon {e:g}" for e in epsilons)]
    cell_by_cell = markdown.rows(head, lines, ["---", *["---:"] * len(epsilons)])
    return (
        "In how many settings (a data set, a number of epochs, an epsilon) correlated noise is better or worse than "
        f"independent noise by more than the spread of both over seeds:\n\n{by_contender}\n\n"
        f"With independent and with correlated noise:\n\n{cell_by_cell}"
    )


def _gain(independent: Row, correlated: Row) -> float:
    """The gain, in units of the spread of the difference."""
    gain = correlated["mean"] - independent["mean"]
    spread = ((independent["std"] or 0) ** 2 + (correlated["std"] or 0) ** 2) ** 0.5
    return (gain if independent["higher_is_better"] else -gain) / max(spread, 1e-12)
