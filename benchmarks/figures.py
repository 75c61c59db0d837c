"""The figures in README and docs: written between markers from the committed JSON, never by hand.

A page asks for a section by ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; what stands between them is
replaced. `python -m benchmarks report` does so, and a test compares.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import summaries

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_SECTION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

Row = dict[str, Any]


def _load(results: Path, name: str) -> Any:
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[str] | None = None) -> str:
    lines = [head, align or ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _by(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Rows in groups that agree on ``keys``, the best of each group first."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(k) for k in keys), []).append(row)
    return {k: sorted(g, key=lambda r: -r["mean"] if r["higher_is_better"] else r["mean"]) for k, g in groups.items()}


def _score(row: Row) -> str:
    seeds = len(row["seeds"])
    return f"{summaries.spread(row)}" + (" (one seed)" if seeds == 1 else f" ({seeds} seeds)")


def _epsilons(rows: Sequence[Row]) -> str:
    found = sorted({f"{row['epsilon']['pld']:.2f}" for row in rows}, key=float)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _published(row: Row) -> str:
    """The paper's figure, or nothing where it has none."""
    return "" if row["published"] is None else f"{row['published']:g}"


def headline(results: Path) -> str:
    """The four figures that a newcomer asks for, with the commands that measure them again."""
    lines = []
    speed_runs = _load(results, "speed")
    if speed_runs:
        own, whole = ([run["ratio"][way] for run in speed_runs["runs"]] for way in ("ghost", "ghost whole"))
        said = f"{min(own):.2f} to {max(own):.2f} times its time, over {len(own)} model families"
        said += f" ({min(whole):.2f} to {max(whole):.2f} where the batch is not taken in parts)"
        lines.append(["clipped gradient against the ordinary one", said, "`python -m benchmarks speed`"])
    memory_runs = _load(results, "memory")
    if memory_runs:
        found = [run["ratio"]["ghost"] for run in memory_runs["runs"] if "ghost" in run["ratio"]]
        said = f"{min(found):.2f} to {max(found):.2f} times its peak, over {len(found)} model families"
        lines.append(["memory of a clipped gradient", said, "`python -m benchmarks memory`"])
    quickstart = _load(results, "quickstart")
    if quickstart:
        lines.append(["digits, small CNN: test accuracy", _digits(quickstart["runs"]), "`make demo`"])
    if _load(results, "audit"):
        lines.append(["attacks on the claimed epsilon", _attacks(results), "`python -m benchmarks audit`"])
    return _table(["measured", "result", "command"], lines)


def _digits(runs: Sequence[Row]) -> str:
    """The best method at each epsilon, and without privacy."""
    said = []
    for epsilon in sorted({r["target_epsilon"] for r in runs}, key=lambda e: e or float("inf")):
        best = max((r for r in runs if r["target_epsilon"] == epsilon), key=lambda r: r["mean"])
        where = f"epsilon {epsilon:g}" if epsilon else "not private"
        said.append(f"{where}: {best['method']} {summaries.spread(best)}")
    return "; ".join(said)


RUNS_AUDITED = "pipeline", "correlated", "adaptive", "sparse", "rows", "tuning"


def _attacks(results: Path) -> str:
    record = _load(results, "audit")
    sound = [a for a in record["audits"] if a["fault"] == "none"]
    broken = [a for a in record["audits"] if a["fault"] != "none"]
    claims = sorted({f"{a['claimed_epsilon']:.2f}" for a in sound}, key=float)
    held = sum(not a["exceeds_claim"] for a in sound)
    caught = sum(a["exceeds_claim"] for a in broken)
    strongest = max(max(a["lower_bounds"].values()) / a["claimed_epsilon"] for a in sound)
    runs = [run for part in RUNS_AUDITED for run in record[part]]
    whole = [a for a in runs if a["mistake"] == "none"]
    planted = [a for a in runs if a["mistake"] != "none"]
    return (
        f"{held} of {len(sound)} sound optimizers stay below their claim of {' or '.join(claims)} (the strongest "
        f"attack shows {100 * strongest:.0f} % of it), and {sum(not a['exceeds_claim'] for a in whole)} of "
        f"{len(whole)} kinds of sound runs; {caught} of {len(broken)} optimizers broken on purpose are caught, and "
        f"{sum(a['exceeds_claim'] for a in planted)} of {len(planted)} mistakes planted in a run"
    )


def audit(results: Path) -> str:
    """What the attacks showed, in one sentence, the strongest by kind of fault, and what was planted in whole runs."""
    record = _load(results, "audit")
    rows = []
    for fault in dict.fromkeys(a["fault"] for a in record["audits"]):
        own = [a for a in record["audits"] if a["fault"] == fault]
        bounds = [max(a["lower_bounds"].values()) for a in own]
        exceed = sum(a["exceeds_claim"] for a in own)
        name = "none: as it is" if fault == "none" else fault
        rows.append([name, str(len(own)), f"{min(bounds):.2f} to {max(bounds):.2f}", f"{exceed} of {len(own)}"])
    head = ["fault", "optimizers", "lower bound on epsilon", "exceed their claim"]
    optimizers = _table(head, rows, ["---", "---:", "---:", "---:"])
    lines = [
        [
            "none: as it is" if a["mistake"] == "none" else a["mistake"],
            a["run"],
            a["attack"],
            f"{a['delta']:g}",
            f"{a['claimed_epsilon']:.2f}",
            f"{a['lower_bound']:.2f}" + (", exceeds" if a["exceeds_claim"] else ""),
        ]
        for part in RUNS_AUDITED
        for a in record[part]
    ]
    head = ["mistake", "run", "attack", "delta", "claimed epsilon", "lower bound"]
    return f"{_attacks(results)}.\n\n{optimizers}\n\n" + _table(head, lines, [*["---"] * 3, *["---:"] * 3])


def _epsilon(row: dict[str, Any]) -> str:
    """By PLD; of a search, whose epsilon only Rényi divergences give, by these."""
    by = row["epsilon"]
    return f"{by['rdp']:.2f} (RDP)" if by["pld"] is None else f"{by['pld']:.2f}"


def _utility(rows: Sequence[Row], *, published: bool) -> str:
    """The rows of one table, the best first."""
    head = ["optimizer", "epsilon", rows[0]["metric"], *(["published"] if published else []), "state", "taken for free"]
    lines = []
    for row in rows:
        state = f"{row['state_bytes'] / row['parameters']:.1f} bytes / parameter"
        free = ", ".join(row["not_covered_by_epsilon"]) or "nothing"
        reached = [_published(row)] if published else []
        lines.append([row["label"], _epsilon(row), _score(row), *reached, state, free])
    return _table(head, lines, ["---", *["---:"] * (len(head) - 2), "---"])


def papers(results: Path) -> str:
    """The papers' tables, the best row first."""
    groups = _by(_load(results, "utility-papers")["rows"], "table")
    return "\n\n".join(f"**{table}**\n\n{_utility(rows, published=True)}" for (table,), rows in groups.items())


def frontier(results: Path) -> str:
    """What wins at an equal budget of privacy and of tuning, by data set and epsilon."""
    groups = _by(_load(results, "utility-frontier")["rows"], "table", "target_epsilon")
    return "\n\n".join(
        f"**{table}, epsilon {epsilon:g}**\n\n{_utility(rows, published=False)}"
        for (table, epsilon), rows in sorted(groups.items())
    )


def verdict(results: Path) -> str:
    """How far every contender stays behind the best one at the same budget, over all epsilons; the best first."""
    groups = _by(_load(results, "utility-frontier")["rows"], "table", "target_epsilon")
    behind: dict[str, dict[str, list[float]]] = {}  # of a contender, of a data set, at each epsilon
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
    return _table(head, lines, ["---", *["---:"] * len(tables)])


def _mean_and_most(behind: Sequence[float] | None) -> str:
    return "" if behind is None else f"{sum(behind) / len(behind):.3f}, at most {max(behind):.3f}"


def speed(results: Path) -> str:
    """Time of a clipped gradient over that of the ordinary one, by family; a sentence where nothing is recorded."""
    content = _load(results, "speed")
    if content is None:
        return "No timings are recorded yet: `python -m benchmarks speed` measures them on your machine."
    wanted = ["ghost", "ghost, diagonal", "ghost whole", "ordinary in parts", "vmap", "optax contrib", "jax_privacy"]
    columns = [c for c in wanted if any(c in run["ratio"] for run in content["runs"])]
    return _ratios(content, columns)


def _ratios(content: dict[str, Any], columns: Sequence[str]) -> str:
    """Ratios to the ordinary gradient, a line for each family, and where they were measured."""
    rows = [
        [run["family"], *(f"{run['ratio'][c]:.2f}" if c in run["ratio"] else "" for c in columns)]
        for run in content["runs"]
    ]
    device = content["environment"]
    head = ["family", *columns]
    return f"On {device['device']}, {device['cores']} cores.\n\n" + _table(
        head, rows, ["---", *["---:"] * len(columns)]
    )


def memory(results: Path) -> str:
    """Peak memory of a clipped gradient over that of the ordinary one; a sentence where nothing is recorded."""
    content = _load(results, "memory")
    if content is None:
        return "No memory is recorded yet: `python -m benchmarks memory` measures it on your machine."
    return _ratios(content, ["ghost", "ghost, diagonal", "ghost whole", "vmap"])


def epochs(results: Path) -> str:
    """What correlated noise changed at equal epsilon and computation: by contender, and for DP-SGD cell by cell."""
    content = _load(results, "utility-epochs")
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
    by_contender = _table(head, lines, ["---", *["---:"] * 3])
    first, epsilons = names[0], sorted({e for _, _, e in cells})
    lines = []
    for title in dict.fromkeys(t for _, t, _ in cells):
        own = [pairs.get((first, title, e)) for e in epsilons]
        told = [f"{summaries.spread(p[0])}, {summaries.spread(p[1])}" if p and p[1] else "" for p in own]
        lines.append([f"{title}, {next(p for p in own if p)[0]['metric']}", *told])
    cell_by_cell = _table([first, *(f"epsilon {e:g}" for e in epsilons)], lines, ["---", *["---:"] * len(epsilons)])
    return (
        "In how many settings (a data set, a number of epochs, an epsilon) correlated noise is better or worse than "
        f"independent noise by more than the spread of both over seeds:\n\n{by_contender}\n\n"
        f"With independent and with correlated noise:\n\n{cell_by_cell}"
    )


def _gain(independent: Row, correlated: Row) -> float:
    """What is gained, in units of the spread of the difference."""
    gain = correlated["mean"] - independent["mean"]
    spread = ((independent["std"] or 0) ** 2 + (correlated["std"] or 0) ** 2) ** 0.5
    return (gain if independent["higher_is_better"] else -gain) / max(spread, 1e-12)


def users(results: Path) -> str:
    """MovieLens with privacy for a rating and for a user."""
    content = _load(results, "users")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks users` measures it on your machine."
    rows = content["rows"]
    epsilons = sorted({r["target_epsilon"] for r in rows})
    found = {(r["unit"], r["target_epsilon"]): summaries.spread(r) for r in rows}
    lines = [[unit, *(found[unit, e] for e in epsilons)] for unit in dict.fromkeys(r["unit"] for r in rows)]
    seeds, constant = len(rows[0]["seeds"]), content["films_known"]
    return (
        _table(["privacy for", *(f"epsilon {e:g}" for e in epsilons)], lines, ["---", *["---:"] * len(epsilons)])
        + f"\n\nMean squared error on held-out ratings, {seeds} seeds. Without privacy the films' means have "
        f"{constant['means']:.3f}, and the middle of the scale {constant['middle']:.3f}."
    )


def tuning(results: Path) -> str:
    """Accuracy of paid and unpaid tuning, and what each has spent; a sentence where nothing is recorded."""
    content = _load(results, "tuning")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks tuning` measures it on your machine."
    return tuning_table(content)


def tuning_table(content: dict[str, Any]) -> str:
    """A line for each way of tuning, and for each epsilon that is stated what was spent and what was reached."""
    rows = content["rows"]
    epsilons = sorted({r["stated_epsilon"] for r in rows})
    cells = {(r["way"], r["stated_epsilon"]): r for r in rows}
    lines = []
    for way in dict.fromkeys(r["way"] for r in rows):
        own = [cells[way, e] for e in epsilons]
        lines.append([way, *(x for r in own for x in (f"{r['spent_epsilon']:.2f}", summaries.spread(r)))])
    head = ["", *(x for e in epsilons for x in (f"spent, of {e:g} stated", "accuracy"))]
    trials, seeds = content["num_trials"], min(len(r["scores"]) for r in rows)
    return (
        f"{len(content['settings'])} settings, {trials['mean']:g} trials expected (shape {trials['shape']:g}), delta "
        f"{content['delta']:g}, {seeds} seeds.\n\n{_table(head, lines, ['---', *['---:'] * (len(head) - 1)])}"
    )


SECTIONS = {
    "users": users,
    "tuning": tuning,
    "epochs": epochs,
    "headline": headline,
    "audit": audit,
    "papers": papers,
    "frontier": frontier,
    "verdict": verdict,
    "speed": speed,
    "memory": memory,
}


def updated(text: str, results: Path = RESULTS) -> str:
    """The text of a page with its figures as the results have them.

    Raises:
        ValueError: for a section that nobody knows.
    """

    def section(match: re.Match) -> str:
        if match[2] not in SECTIONS:
            raise ValueError(f"there is no section of figures {match[2]!r}; there are: {', '.join(SECTIONS)}.")
        return f"{match[1]}\n{SECTIONS[match[2]](results)}\n\n{match[3]}"

    return _SECTION.sub(section, text)


def pages(root: Path = ROOT) -> list[Path]:
    """README and the pages of the documentation."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def write(root: Path = ROOT, results: Path = RESULTS) -> list[Path]:
    """Brings all pages up to date; returns those that changed."""
    changed = []
    for page in pages(root):
        text = page.read_text()
        new = updated(text, results)
        if new != text:
            page.write_text(new)
            changed.append(page)
    return changed
