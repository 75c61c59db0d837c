"""The utility tables of RESULTS.md: the rows of a suite as Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report import columns, markdown, orderings, summaries

TUNING_HEADING = "What tuning costs"  # heading of the section that the frontier's text links to
STATE, STEP = "state, bytes (a parameter)", "step, MB"
TUNING, NOT_COVERED = "with tuning", "not covered by epsilon"

Row = dict[str, Any]


def papers(rows: Sequence[Row]) -> str:
    """A table with a line for each row."""
    published = [row.get("published") for row in rows]
    return markdown.columns(
        {
            "": [row["label"] for row in rows],
            "eps PLD": [f"{row['epsilon']['pld']:.2f}" for row in rows],
            "eps RDP": [f"{row['epsilon']['rdp']:.2f}" for row in rows],
            TUNING: [columns.with_tuning(row) for row in rows],
            "sigma": [f"{row['noise_multiplier']:.3g}" for row in rows],
            rows[0]["metric"]: [summaries.spread(row) for row in rows],
            "published": ["" if p is None else f"{p:g}" for p in published],
            "seeds": [columns.seeds(row) for row in rows],
            "s / run": [columns.seconds(row) for row in rows],
            STATE: [columns.state(row) for row in rows],
            STEP: [columns.step_memory(row) for row in rows],
            NOT_COVERED: [columns.not_covered(row) for row in rows],
        }
    )


def _beside(groups: Sequence[Sequence[Row]]) -> dict[str, list[str]]:
    """The columns beside the scores, for lines that combine several rows (epsilons, kinds of noise)."""
    return {
        "seeds": [columns.seeds(*own) for own in groups],
        TUNING: [columns.with_tuning(*own) for own in groups],
        "s / run": [columns.seconds(*own) for own in groups],
        STATE: [columns.state(own[0]) for own in groups],
        STEP: [columns.step_memory(*own) for own in groups],
        NOT_COVERED: [columns.not_covered(own[0]) for own in groups],
    }


def _by_epsilon(rows: Sequence[Row]) -> dict[float, dict[str, Row]]:
    """Rows by epsilon and contender."""
    epsilons = sorted({r["target_epsilon"] for r in rows})
    return {e: {r["contender"]: r for r in rows if r["target_epsilon"] == e} for e in epsilons}


def _scores(own: dict[str, Row]) -> dict[str, str]:
    """The scores of the contenders at one epsilon, the best in bold."""
    best = _best(list(own.values()))["contender"]
    return {
        name: f"**{summaries.spread(row)}**" if name == best else summaries.spread(row) for name, row in own.items()
    }


def _direction(rows: Sequence[Row]) -> str:
    better = "higher" if rows[0]["higher_is_better"] else "lower"
    return f"By {rows[0]['metric']} ({better} is better); the best at each epsilon is bold."


def _contenders(rows: Sequence[Row]) -> tuple[dict[str, list[str]], dict[float, dict[str, Row]]]:
    """A line for each contender and a column for each epsilon; and the rows by epsilon."""
    names = list(dict.fromkeys(r["contender"] for r in rows))
    by_epsilon = _by_epsilon(rows)
    cells = {"": names}
    for epsilon, own in by_epsilon.items():
        said = _scores(own)
        cells[f"epsilon {epsilon:g}"] = [said.get(name, "") for name in names]
    groups = [[own[name] for own in by_epsilon.values() if name in own] for name in names]
    return cells | _beside(groups), by_epsilon


def frontier(rows: Sequence[Row]) -> str:
    """A line for each contender and a column for each epsilon, with the best in bold; before it, the noise."""
    cells, by_epsilon = _contenders(rows)
    noise = []
    for epsilon, own in by_epsilon.items():
        best = _best(list(own.values()))
        selection = f"{columns.by_selection(best):.2f}"
        noise.append(f"{epsilon:g} ({best['epsilon']['rdp']:.2f}; {best['noise_multiplier']:.3g}; {selection})")
    return (
        f"{_direction(rows)} Epsilon by PLD (by RDP; noise multiplier; with tuning by selection): {', '.join(noise)}. "
        f"The last is the epsilon of repeat-and-select among the {rows[0]['tried']} candidates, without their scores; "
        f'the column "{TUNING}" is the epsilon of all their runs and the final one together, at each epsilon in turn. '
        f"For the accuracy of paid tuning see [{TUNING_HEADING}](#{_anchor(TUNING_HEADING)})."
        f"\n\n{markdown.columns(cells)}"
    )


def others(rows: Sequence[Row]) -> str:
    """As for the frontier, below a line with what others published."""
    cells, by_epsilon = _contenders(rows)
    reference = {e: next(iter(own.values()))["reference"] for e, own in by_epsilon.items()}
    first = {f"epsilon {e:g}": f"{found['score']:g}" for e, found in reference.items()}
    first[""] = next(iter(reference.values()))["name"]
    cells = {head: [first.get(head, ""), *own] for head, own in cells.items()}
    noise = []
    for epsilon, own in by_epsilon.items():
        best = _best(list(own.values()))
        spent = best["epsilon"]
        noise.append(f"{epsilon:g} ({spent['pld']:.2f}; {spent['rdp']:.2f}; {best['noise_multiplier']:.3g})")
    reached = [f"{e:g}: {_reaching(own)}" for e, own in by_epsilon.items()]
    return (
        f"{_direction(rows)} {rows[0]['num_examples']:,} private examples, delta {rows[0]['delta']:g}. Target "
        f"epsilon (by PLD; by RDP; noise multiplier of the best): {', '.join(noise)}. The first line is not ours and "
        f"was not run here. How many contenders reach it: {'; '.join(reached)}.\n\n{markdown.columns(cells)}"
    )


def pretrained(rows: Sequence[Row]) -> str:
    """A line for each contender and a column for each epsilon; before it, the setting of a run."""
    cells, by_epsilon = _contenders(rows)
    noise = [f"{e:g} ({next(iter(own.values()))['noise_multiplier']:.3g})" for e, own in by_epsilon.items()]
    setting, tried = rows[0]["setting"], rows[0]["tried"]
    tested, length = setting["task_options"]["test"], setting["task_options"]["length"]
    sizes = " or ".join(f"{size:,}" for size in sorted({row["parameters"] for row in rows}))
    how = f"the best of {tried} learning rates" if tried else "one learning rate, not tuned"
    return (
        f"{_direction(rows)} {tested:,} test reviews, {length} tokens of each; {setting['steps']} steps of "
        f"{setting['expected_batch_size']:,} reviews; {sizes} parameters are trained; {how}. Epsilon "
        f"(noise multiplier of the first line): {', '.join(noise)}."
        f"\n\n{markdown.columns(cells)}"
    )


def _reaching(own: dict[str, Row]) -> str:
    """How many contenders reach what others published."""
    found = list(own.values())
    published = {**found[0], "mean": found[0]["reference"]["score"]}
    return f"{sum(not orderings.beats(published, row) for row in found)} of {len(found)}"


def _anchor(heading: str) -> str:
    return "".join(c for c in heading.lower() if c.isalnum() or c in " -").replace(" ", "-")


def epochs(rows: Sequence[Row]) -> str:
    """A line for each contender; for every epsilon a column for either kind of noise; the best of both is bold."""
    names = [n for n in dict.fromkeys(r["contender"] for r in rows) if not n.endswith(summaries.CORRELATED)]
    by_epsilon = _by_epsilon(rows)
    cells, said = {"": names}, []
    for epsilon, own in by_epsilon.items():
        scores = _scores(own)
        for kind, ending in (("independent", ""), ("correlated", summaries.CORRELATED)):
            cells[f"epsilon {epsilon:g}, {kind}"] = [scores.get(name + ending, "") for name in names]
        noise = next((r for n, r in own.items() if n.endswith(summaries.CORRELATED)), None)
        if noise is not None:
            said.append(f"{epsilon:g}: {noise['sampling']['kind'].removeprefix('cyclic Poisson in ')}")
    either = [[r for r in rows if r["contender"].removesuffix(summaries.CORRELATED) == name] for name in names]
    beside = _beside(either)
    independent = [[own[name] for own in by_epsilon.values() if name in own] for name in names]
    beside[TUNING] = [columns.with_tuning(*(a or b)) for a, b in zip(independent, either, strict=True)]
    return (
        f"{_direction(rows)} Each is the best of {rows[0]['tried']} learning rates. Correlated noise has as "
        f'many bands as the sampler has parts, by epsilon: {"; ".join(said)}. "{TUNING}" is for independent noise, at '
        "each epsilon in turn."
        f"\n\n{markdown.columns(cells | beside)}"
    )


def _best(rows: Sequence[Row]) -> Row:
    return (max if rows[0]["higher_is_better"] else min)(rows, key=lambda row: row["mean"])


HEADINGS = {
    "papers": "The papers",
    "frontier": "The frontier",
    "epochs": "Few epochs, and correlated noise",
    "others": "Beside figures that others published",
    "pretrained": "A pretrained Transformer",
}
TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "papers": lambda rows: f"{papers(rows)}\n\n{orderings.claims(rows)}",
    "frontier": frontier,
    "epochs": epochs,
    "others": others,
    "pretrained": pretrained,
}
