"""Whether these runs show the orderings that papers published, pair by pair."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.report import summaries

Row = dict[str, Any]
HELD, WITHIN, CONTRADICTED, ONE_SEED = "held", "within the spread", "contradicted", "not decided by one seed"
VERDICTS = HELD, WITHIN, CONTRADICTED, ONE_SEED
_IN_WORDS = {
    HELD: "shown",
    WITHIN: "within the spread over seeds: neither shown nor contradicted",
    CONTRADICTED: "**contradicted**",
    ONE_SEED: "not decided by one seed",
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two rows of a table, of which the paper ranks ``first`` higher, and the verdict of these runs."""

    first: Row
    second: Row
    verdict: str

    def __str__(self) -> str:
        means = f"{summaries.spread(self.first)} against {summaries.spread(self.second)}"
        return f"{self.first['label']} better than {self.second['label']}: {_IN_WORDS[self.verdict]} ({means})."


def beats(a: Row, b: Row) -> bool:
    """Whether the first mean is better."""
    return a["mean"] > b["mean"] if a["higher_is_better"] else a["mean"] < b["mean"]


def _verdict(first: Row, second: Row) -> str:
    if first["std"] is None or second["std"] is None:
        return ONE_SEED
    if abs(first["mean"] - second["mean"]) < (first["std"] ** 2 + second["std"] ** 2) ** 0.5:
        return WITHIN
    return HELD if beats(first, second) else CONTRADICTED


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """All pairs of rows of a table that the paper ranks."""
    with_claim = [r for r in rows if r.get("published") is not None]
    found = []
    for i, a in enumerate(with_claim):
        for b in with_claim[i + 1 :]:
            if a["published"] == b["published"]:
                continue
            better = a["published"] > b["published"]
            first, second = (a, b) if better == a["higher_is_better"] else (b, a)
            found.append(Pair(first, second, _verdict(first, second)))
    return found


def against_published(rows: Sequence[Row]) -> str:
    """A sentence: how many rows reach the published figure, with how many seeds, and which fall short."""
    claimed = [r for r in rows if r.get("published") is not None]
    if not claimed:
        return ""
    short = [r for r in claimed if beats({**r, "mean": r["published"]}, r)]
    counts = sorted({len(r["seeds"]) for r in claimed})
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = "one seed each" if counts == [1] else f"the mean of {span} seeds"
    reached = f"{len(claimed) - len(short)} of {len(claimed)} rows reach the published figure, by {seeds}"
    if not short:
        return f"{reached}."
    names = "; ".join(f"{r['label']} ({summaries.spread(r)}, published {r['published']:g})" for r in short)
    return f"{reached}; short of it: {names}."


def claims(rows: Sequence[Row]) -> str:
    """The text below a paper's table: rows against published figures, and the ordering pair by pair."""
    said = [against_published(rows), ""]
    found = pairs(rows)
    if found:
        said += ["The paper's ordering, pair by pair:", "", *(f"- {pair}" for pair in found)]
    return "\n".join(said)
