"""The figures of docs/published_orderings.md: the verdict on every ordering that a paper published."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.report import markdown, orderings, summaries
from benchmarks.report.orderings import Pair
from benchmarks.utility import lstm as lstm_runs

Row = dict[str, Any]


def _pairs(results: Path) -> dict[str, list[Pair]]:
    """The pairs that the papers rank, by table."""
    content = records.load(results, "utility-papers") or {"rows": []}
    tables = dict.fromkeys(row["table"] for row in content["rows"])
    found = {table: orderings.pairs([r for r in content["rows"] if r["table"] == table]) for table in tables}
    return {table: own for table, own in found.items() if own}


def summary(results: Path) -> str:
    """How many of the published orderings held, by table and in total."""
    found = _pairs(results)
    if not found:
        return "Nothing is recorded yet: `python -m benchmarks utility` measures it on your machine."
    lines = [[table, str(len(own)), *(_count(own, v) for v in orderings.VERDICTS)] for table, own in found.items()]
    every = [pair for own in found.values() for pair in own]
    lines.append(["**all**", str(len(every)), *(_count(every, v) for v in orderings.VERDICTS)])
    return markdown.rows(["table", "pairs", *orderings.VERDICTS], lines, ["---", *["---:"] * 5])


def _count(own: Iterable[Pair], verdict: str) -> str:
    return str(sum(pair.verdict == verdict for pair in own))


def contradicted_tables(results: Path) -> list[str]:
    """The tables with a contradicted pair, each of which docs/published_orderings.md must explain."""
    return [t for t, own in _pairs(results).items() if any(p.verdict == orderings.CONTRADICTED for p in own)]


def _listed(results: Path, verdict: str) -> str:
    """The pairs with a verdict, by table, with published and measured scores."""
    lines = []
    for table, own in _pairs(results).items():
        for pair in own:
            if pair.verdict == verdict:
                lines.append([table, pair.first["label"], pair.second["label"], _published(pair), _measured(pair)])
    if not lines:
        return "None."
    head = ["table", "published as better", "than", "published", "measured"]
    return markdown.rows(head, lines, ["---"] * 3 + ["---:"] * 2)


def _published(pair: Pair) -> str:
    return f"{pair.first['published']:g} against {pair.second['published']:g}"


def _measured(pair: Pair) -> str:
    return f"{summaries.spread(pair.first)} against {summaries.spread(pair.second)}"


def contradicted(results: Path) -> str:
    """The pairs in the opposite order, by more than the spread over seeds."""
    return _listed(results, orderings.CONTRADICTED)


def undecided(results: Path) -> str:
    """The pairs that differ by no more than the spread over seeds."""
    return _listed(results, orderings.WITHIN)


def beside_others(results: Path) -> str:
    """The best contender beside each published figure of a method that is not ours."""
    content = records.load(results, "utility-others")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks utility --suite others` measures it on your machine."
    cells = {}
    for row in content["rows"]:
        cells.setdefault((row["table"], row["target_epsilon"]), []).append(row)
    lines = []
    for (table, epsilon), rows in sorted(cells.items()):
        best = max(rows, key=lambda row: row["mean"] if row["higher_is_better"] else -row["mean"])
        reference = best["reference"]
        apart = best["mean"] - reference["score"]
        told = [f"{epsilon:g}", reference["name"], f"{reference['score']:g}", best["label"], summaries.spread(best)]
        lines.append([table, *told, f"{apart:+.3f}"])
    head = ["table", "epsilon", "not run here", "published", "best of ours", "measured", "difference"]
    return markdown.rows(head, lines, ["---", "---:", "---", "---:", "---", "---:", "---:"])


def lstm(results: Path) -> str:
    """The attempts to reach the published accuracy of DP-SGD with the LSTM."""
    content = records.load(results, "lstm")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks lstm` measures it on your machine."
    return lstm_runs.markdown(content)
