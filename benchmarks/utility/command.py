"""Utility of private training: the papers' tables on real data, and what beats them at the same budget."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import records
from benchmarks.report import plots, summaries
from benchmarks.utility import paid_tuning, sweeps
from benchmarks.utility.suites import (
    epochs as epochs_suite,
)
from benchmarks.utility.suites import (
    frontier as frontier_suite,
)
from benchmarks.utility.suites import (
    others as others_suite,
)
from benchmarks.utility.suites import (
    papers as papers_suite,
)
from benchmarks.utility.suites import (
    pretrained as pretrained_suite,
)


def papers(options: Any, console: Console) -> list[dict[str, Any]]:
    """Runs the papers' settings and returns the rows of their tables."""
    rows = [row for row in papers_suite.rows() if wanted(options.only, f"{row.table}, {row.setting.label}")]
    if not rows:
        names = sorted({row.table for row in papers_suite.rows()})
        raise SystemExit(f"nothing is called {options.only!r}; there are: {'; '.join(names)}.")
    settings = {row.setting.name(0): row.setting for row in rows}  # a row of two tables is one run
    done = _sweep(list(settings.values()), range(options.seeds), options, console)
    out = []
    for row in rows:
        runs = [r for r in done if r["setting"] == row.setting.content()]
        label = {"label": row.setting.label, "table": row.table, "published": row.published}
        label |= {} if row.tried is None else {"tried": row.tried}
        out.append(summaries.summarize(runs, **label))
    return out


def frontier(options: Any, console: Console) -> list[dict[str, Any]]:
    """Every optimizer on the same features and budget."""
    return tuned(frontier_suite.contests(), options, console)


def epochs(options: Any, console: Console) -> list[dict[str, Any]]:
    """Independent and correlated noise at 1, 3 and 10 epochs."""
    return tuned(epochs_suite.contests(), options, console)


def others(options: Any, console: Console) -> list[dict[str, Any]]:
    """Our contenders beside what others published for methods that are not ours."""
    return tuned(others_suite.contests(), options, console)


def pretrained(options: Any, console: Console) -> list[dict[str, Any]]:
    """A pretrained Transformer on IMDB: a head, adapters or all parameters are trained."""
    return tuned(pretrained_suite.contests(), options, console)


def tuned(contests: Sequence[Any], options: Any, console: Console) -> list[dict[str, Any]]:
    """Tunes every contender on held-out training data with the same number of runs, then scores the winners."""
    out = []
    for contest in contests:
        if not wanted(options.only, f"{contest.table}, {contest.contender}"):
            continue
        for epsilon in contest.epsilons:
            if options.epsilon and epsilon not in options.epsilon:
                continue
            tried = contest.candidates(epsilon, validate=True)
            names = {"table": contest.table, "contender": contest.contender, "label": contest.contender}
            names |= {"target_epsilon": epsilon, "tried": len(tried) if len(tried) > 1 else None}
            reference = getattr(contest, "reference", None)
            if reference is not None:
                names["reference"] = {"name": reference.name, "score": reference.scores[epsilon]}
            if getattr(contest, "is_paid", False):
                seeds = range(options.seeds)
                runs = paid_tuning.sweep(contest, epsilon, seeds, out=options.out / "runs", where=options.data)
                out.append(summaries.summarize(runs, tuning_is_paid=True, **names))
                _say(out[-1], console)
                continue
            best = 0
            if len(tried) > 1:
                found = _sweep(tried, [0], options, console)  # one seed each: the budget of tuning
                best = frontier_suite.best(found)
            final = contest.candidates(epsilon, validate=False)[best]
            runs = _sweep([final], range(options.seeds), options, console)
            out.append(summaries.summarize(runs, **names))
            _say(out[-1], console)
    return out


def _say(row: dict[str, Any], console: Console) -> None:
    console.print(f"{row['table']}, epsilon {row['target_epsilon']:g}, {row['contender']}: {summaries.spread(row)}")


SUITES = {"papers": papers, "frontier": frontier, "epochs": epochs, "others": others, "pretrained": pretrained}


def wanted(only: str | None, name: str) -> bool:
    return only is None or only.lower() in name.lower()


def _sweep(settings: Sequence[Any], seeds: Sequence[int], options: Any, console: Console) -> list[dict[str, Any]]:
    return sweeps.sweep(
        settings,
        seeds,
        out=options.out / "runs",
        where=options.data,
        jobs=options.jobs,
        together=options.together,
        console=console,
    )


def main(options: Any) -> None:
    """Runs the suites asked for; writes ``utility-SUITE.json`` and a plot for each, and prints its tables."""
    console = Console()
    for name in SUITES if options.suite == "all" else [options.suite or "papers"]:
        rows = SUITES[name](options, console)
        for title in dict.fromkeys(row["table"] for row in rows):
            console.print(summaries.table(title, [row for row in rows if row["table"] == title]))
        path: Path = options.out / f"utility-{name}.json"
        # A run of part of the suite (--only) leaves the other rows of the file as they are.
        rows = summaries.merged((sweeps.stored(path) or {"rows": []})["rows"], rows)
        records.write_json(path, {"suite": name, "rows": rows})
        drawn = plots.DRAW[name](rows, options.out)
        console.print(f"Wrote {path}{''.join(f', {p}' for p in drawn)}.")
