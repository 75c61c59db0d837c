"""Utility of private training: the papers' tables on real data, and what beats them at the same budget."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import arguments, records
from benchmarks.report import plots, summaries
from benchmarks.utility import paid_tuning, sweeps
from benchmarks.utility.settings import Setting
from benchmarks.utility.suites import epochs, frontier, others, papers, pretrained

# Suites in which every contender is tuned with the same number of runs.
CONTESTS: dict[str, Callable[[], Sequence[Any]]] = {
    "frontier": frontier.contests,
    "epochs": epochs.contests,
    "others": others.contests,
    "pretrained": pretrained.contests,
}
SUITES = "papers", *CONTESTS


def published(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Runs the papers' settings and returns the rows of their tables."""
    rows = [row for row in papers.rows() if wanted(options.only, f"{row.table}, {row.setting.label}")]
    if not rows:
        names = sorted({row.table for row in papers.rows()})
        raise SystemExit(f"nothing is called {options.only!r}; there are: {'; '.join(names)}.")
    settings = {row.setting.name(0): row.setting for row in rows}  # a row that two tables share is run once
    done = _sweep(list(settings.values()), range(options.seeds), options, console)
    out = []
    for row in rows:
        runs = [r for r in done if r["setting"] == row.setting.content()]
        label = {"label": row.setting.label, "table": row.table, "published": row.published}
        label |= {} if row.tried is None else {"tried": row.tried}
        out.append(summaries.summarize(runs, **label))
    return out


def tuned(contests: Sequence[Any], options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Tunes every contender on held-out training data with the same number of runs, then scores the winners."""
    rows = []
    for contest in contests:
        if not wanted(options.only, f"{contest.table}, {contest.contender}"):
            continue
        for epsilon in contest.epsilons:
            if options.epsilon and epsilon not in options.epsilon:
                continue
            row = _tuned(contest, epsilon, options, console)
            rows.append(row)
            console.print(
                f"{row['table']}, epsilon {row['target_epsilon']:g}, {row['contender']}: {summaries.spread(row)}"
            )
    if not rows:
        there = sorted({f"{c.table} at epsilon {', '.join(f'{e:g}' for e in c.epsilons)}" for c in contests})
        console.print(f"Nothing matches --only and --epsilon; there are: {'; '.join(there)}.")
    return rows


def _tuned(contest: Any, epsilon: float, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The row of one contender at one epsilon."""
    tried = contest.candidates(epsilon, validate=True)
    names = {"table": contest.table, "contender": contest.contender, "label": contest.contender}
    names |= {"target_epsilon": epsilon, "tried": len(tried) if len(tried) > 1 else None}
    reference = getattr(contest, "reference", None)
    if reference is not None:
        names["reference"] = {"name": reference.name, "score": reference.scores[epsilon]}
    seeds = range(options.seeds)
    if getattr(contest, "is_paid", False):
        runs = paid_tuning.sweep(contest, epsilon, seeds, out=options.out / "runs", where=options.data)
        return summaries.summarize(runs, tuning_is_paid=True, **names)
    best = 0
    if len(tried) > 1:  # one seed each: the tuning budget
        best = frontier.best(_sweep(tried, [0], options, console))
    final = contest.candidates(epsilon, validate=False)[best]
    return summaries.summarize(_sweep([final], seeds, options, console), **names)


def wanted(only: str | None, name: str) -> bool:
    return only is None or only.lower() in name.lower()


def _sweep(
    settings: Sequence[Setting], seeds: Sequence[int], options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    return sweeps.sweep(
        settings,
        seeds,
        out=options.out / "runs",
        where=options.data,
        jobs=options.jobs,
        together=options.together,
        console=console,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=(*SUITES, "all"), help="(default papers; frontier with --optimizer)")
    parser.add_argument("--optimizer", help="yours, beside the recorded rows: path/to/module.py:function")
    parser.add_argument(
        "--rates", nargs="+", default=[], help="where its learning rates start: 0.1, or imdb=15 digits=0.25"
    )
    parser.add_argument("--only", help="part of the name of a table or row")
    parser.add_argument("--epsilon", type=float, action="append", help="only this one, but for papers (repeatable)")
    arguments.count(parser, "--seeds", 5, "runs of every setting (default 5)")
    arguments.count(parser, "--jobs", 1, "processes at a time (default 1)")
    arguments.count(parser, "--together", 1, "seeds in one program, under vmap (default 1)")
    arguments.data(parser)
    arguments.out(parser, "folder for records, tables and plots")


def run(options: argparse.Namespace) -> None:
    if options.rates and not options.optimizer:
        raise arguments.UsageError("--rates are those of an --optimizer")
    if options.optimizer:
        from benchmarks.utility import own_optimizer  # here, since it builds on this module

        own_optimizer.main(options)
    else:
        main(options)


def main(options: argparse.Namespace) -> None:
    """Runs the chosen suites; writes ``utility-SUITE.json`` and a plot for each, and prints its tables."""
    console = Console()
    for name in SUITES if options.suite == "all" else [options.suite or "papers"]:
        rows = published(options, console) if name == "papers" else tuned(CONTESTS[name](), options, console)
        for title in dict.fromkeys(row["table"] for row in rows):
            console.print(summaries.table(title, [row for row in rows if row["table"] == title]))
        path: Path = options.out / f"utility-{name}.json"
        # With --only, the other rows of the file stay as they are.
        rows = summaries.merged((sweeps.stored(path) or {"rows": []})["rows"], rows)
        records.write_json(path, {"suite": name, "rows": rows})
        drawn = plots.DRAW[name](rows, options.out)
        console.print(f"Wrote {path}{''.join(f', {p}' for p in drawn)}.")
