"""A user's own optimizer in the suites of ``utility``, beside the recorded rows of the shipped contenders.

It gets what they got: the same number of candidates, features, clip norm, steps, seeds and epsilon. The records are
only read; all output goes into a folder named after the optimizer.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import records
from benchmarks.report import plots, summaries, tables
from benchmarks.utility import command as utility
from benchmarks.utility import contenders, sweeps
from benchmarks.utility.contenders import Contender, ContenderError
from benchmarks.utility.suites import frontier

SUITES = utility.CONTESTS
REFERENCE = "DP-SGD, momentum"  # in every table, and without a preconditioner: the new contender gets its settings
RECORDED = records.RESULTS


def contests(suite: str, contender: Contender, label: str, rates: Sequence[str], only: str | None) -> list[Any]:
    """The contests of `REFERENCE` in a suite, with the contender's function and learning rates instead.

    Raises:
        ContenderError: if the first learning rate is missing.
    """
    found = []
    for contest in SUITES[suite]():
        if contest.label != REFERENCE or not utility.wanted(only, f"{contest.table}, {label}"):
            continue
        if getattr(contest, "is_correlated", False) and not contender.takes("noise"):
            continue
        tried = frontier.by_factor(contender.start(contest.table, rates), count=len(contest.rates))
        make = functools.partial(_fields, contest.make, contender)
        found.append(dataclasses.replace(contest, label=label, rates=tried, make=make))
    return found


def _fields(make: Callable[..., dict[str, Any]], contender: Contender, *args: float) -> dict[str, Any]:
    """The reference's fields of a `Setting`, with the contender's optimizer."""
    fields = make(*args)
    own = contender.options(fields["options"]["learning_rate"])
    return fields | {"method": contenders.METHOD, "options": own, "source": contender.source}


def recorded(suite: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recorded rows of the shipped contenders for the same tables and epsilons."""
    content = sweeps.stored(RECORDED / f"utility-{suite}.json") or {"rows": []}
    places = {(row["table"], row["target_epsilon"]) for row in rows}
    return [row for row in content["rows"] if (row["table"], row["target_epsilon"]) in places]


def _label(contender: Contender) -> str:
    """The contender's name, marked if a shipped contender has the same."""
    taken = {contest.label for suite in SUITES.values() for contest in suite()}
    return f"{contender.label} (yours)" if contender.label in taken else contender.label


def about_noise(rows: Sequence[dict[str, Any]], shipped: Sequence[dict[str, Any]]) -> list[str]:
    """Where it needs more or less noise than the reference for the same epsilon."""
    usual = {(r["table"], r["target_epsilon"], r["contender"]): r["noise_multiplier"] for r in shipped}
    said = []
    for row in rows:
        ending = summaries.CORRELATED if row["contender"].endswith(summaries.CORRELATED) else ""
        noise = usual.get((row["table"], row["target_epsilon"], REFERENCE + ending))
        if noise is not None and abs(row["noise_multiplier"] / noise - 1) > 0.01:
            said.append(
                f"{row['table']}, epsilon {row['target_epsilon']:g}: by its event it spends "
                f"{'more' if row['noise_multiplier'] > noise else 'less'} than DP-SGD at the same noise_multiplier, so "
                f"it was given {row['noise_multiplier']:.3g} and not {noise:.3g}."
            )
    return said


def _markdown(
    suite: str,
    label: str,
    rows: Sequence[dict[str, Any]],
    shipped: Sequence[dict[str, Any]],
    drawn: Sequence[Path],
) -> str:
    parts = [f"# {label} among the shipped contenders\n"]
    where = [(r["environment"]["device"], r["environment"]["versions"]["jax"]) for r in (rows[0], *shipped)]
    parts.append(
        "\nThe other rows are recorded ones. The cost of tuning is not counted, but for contenders that say so.\n"
    )
    if len(set(where)) > 1:
        parts.append(
            f"\nIts rows were computed on {where[0][0]} by JAX {where[0][1]}, some of the others elsewhere or by "
            "another version: compare scores, not seconds.\n"
        )
    parts += [f"\n- {line}" for line in about_noise(rows, shipped)]
    for title in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in (*rows, *shipped) if row["table"] == title]
        # Links to other sections work only in RESULTS.md.
        text = re.sub(r"\[([^]]+)\]\(#[^)]*\)", r"\1 in benchmarks/RESULTS.md", tables.TABLES[suite](own))
        parts.append(f"\n\n## {title}\n\n{text}\n")
    parts += [f"\n![{path.stem}]({path.name})\n" for path in drawn]
    return "".join(parts)


def main(options: Any) -> None:
    """Runs the contender in the chosen suites; prints its tables and writes rows, tables and plots to its folder."""
    console = Console()
    if options.suite == "papers":
        raise ContenderError(
            "the suite papers repeats what papers did: take --suite frontier, epochs, others, pretrained or all."
        )
    contender = contenders.load(options.optimizer)
    contender.check()
    label = _label(contender)
    suites = {"all": list(SUITES), None: ["frontier"]}.get(options.suite, [options.suite])
    entered = {suite: contests(suite, contender, label, options.rates, options.only) for suite in suites}
    if not any(entered.values()):
        raise ContenderError(f"no table is called {options.only!r}; there are: {'; '.join(_titles(suites))}.")
    out: Path = options.out / contender.label
    for suite, own in entered.items():
        rows = utility.tuned(own, options, console)
        if not rows:
            console.print(f"{suite}: nothing to run for {options.only!r} at epsilon {options.epsilon}.")
            continue
        path = out / f"utility-{suite}.json"
        older = [r for r in (sweeps.stored(path) or {"rows": []})["rows"] if _is_of(r, contender)]
        rows = summaries.merged(older, rows)
        shipped = recorded(suite, rows)
        beside = [*rows, *shipped]
        for title in dict.fromkeys(row["table"] for row in rows):
            console.print(summaries.table(title, [row for row in beside if row["table"] == title]))
        for line in about_noise(rows, shipped):
            console.print(line)
        records.write_json(path, {"suite": suite, "rows": rows})
        drawn = plots.DRAW[suite](beside, out)
        text = out / f"{suite}.md"
        text.write_text(_markdown(suite, label, rows, shipped, drawn))
        console.print(f"Wrote {', '.join(map(str, [path, text, *drawn]))}.", soft_wrap=True)


def _titles(suites: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(contest.table for suite in suites for contest in SUITES[suite]()))


def _is_of(row: dict[str, Any], contender: Contender) -> bool:
    return row["setting"]["options"].get("sha256") == contender.sha256
