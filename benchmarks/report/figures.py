"""The figures in README and docs, written from the committed JSON, never by hand.

Text between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` is replaced by `python -m benchmarks report`; a
test compares.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.pretrained import record
from benchmarks.report import markdown, published, summaries, tables, utility

ROOT, RESULTS = records.ROOT, records.RESULTS
_SECTION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

Row = dict[str, Any]


def headline(results: Path) -> str:
    """The headline figures, with the commands that measure them."""
    lines = []
    speed_runs = records.load(results, "speed")
    if speed_runs:
        own, whole = ([run["ratio"][way] for run in speed_runs["runs"]] for way in ("ghost", "ghost whole"))
        said = f"{min(own):.2f} to {max(own):.2f} times its time, over {len(own)} model families"
        said += f" ({min(whole):.2f} to {max(whole):.2f} where the batch is not split"
        # An ordinary gradient is faster in parts, too, where its activations do not fit the caches.
        least = [min(1.0, run["ratio"].get("ordinary in parts", 1.0)) for run in speed_runs["runs"]]
        against = [x / n for x, n in zip(own, least, strict=True)]
        said += (
            f"; {min(against):.2f} to {max(against):.2f} times that of the faster of an ordinary one and one in parts)"
        )
        lines.append(["clipped gradient against the ordinary one", said, "`python -m benchmarks speed`"])
    on_gpu = records.load(results, "accelerator")
    if on_gpu:
        devices = sorted({run["device"].removeprefix("gpu: ").split(" 80GB")[0] for run in on_gpu["runs"]})
        lines.append([f"the same on a GPU ({', '.join(devices)}), float32", _on_gpu(on_gpu["runs"]), f"`{ON_GPU}`"])
    memory_runs = records.load(results, "memory")
    if memory_runs:
        found = [run["ratio"]["ghost"] for run in memory_runs["runs"] if "ghost" in run["ratio"]]
        said = f"{min(found):.2f} to {max(found):.2f} times its peak, over {len(found)} model families"
        lines.append(["memory of a clipped gradient", said, "`python -m benchmarks memory`"])
    quickstart = records.load(results, "quickstart")
    if quickstart:
        lines.append(["digits, small CNN: test accuracy", _digits(quickstart["runs"]), "`make demo`"])
    if records.load(results, "audit"):
        lines.append(["attacks on the claimed epsilon", _attacks(results), "`python -m benchmarks audit`"])
    return markdown.rows(["measured", "result", "command"], lines)


ON_GPU = "python -m benchmarks accelerator"


def _on_gpu(runs: Sequence[Row]) -> str:
    """The flat clip of a pretrained Transformer, and the slowest one among models that take a millisecond at least."""
    own = {r["family"]: r for r in runs if r["dtype"] == "float32" and "failed" not in r}
    said = [f"{r['ratio']['flat clip']:.2f} times its time for {name}" for name, r in own.items() if "MiniLM" in name]
    long = {name: r for name, r in own.items() if r["seconds"]["ordinary"] >= 1e-3}
    slowest = max(long, key=lambda name: long[name]["ratio"]["flat clip"])
    said.append(f"{long[slowest]['ratio']['flat clip']:.2f} for {slowest}")
    return "; ".join(said)


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
    record = records.load(results, "audit")
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
    """The results of the attacks: a sentence, lower bounds by kind of fault, and the mistakes planted in whole runs."""
    record = records.load(results, "audit")
    rows = []
    for fault in dict.fromkeys(a["fault"] for a in record["audits"]):
        own = [a for a in record["audits"] if a["fault"] == fault]
        bounds = [max(a["lower_bounds"].values()) for a in own]
        exceed = sum(a["exceeds_claim"] for a in own)
        name = "none: as it is" if fault == "none" else fault
        rows.append([name, str(len(own)), f"{min(bounds):.2f} to {max(bounds):.2f}", f"{exceed} of {len(own)}"])
    head = ["fault", "optimizers", "lower bound on epsilon", "exceed their claim"]
    optimizers = markdown.rows(head, rows, ["---", "---:", "---:", "---:"])
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
    return f"{_attacks(results)}.\n\n{optimizers}\n\n" + markdown.rows(head, lines, [*["---"] * 3, *["---:"] * 3])


def speed(results: Path) -> str:
    """Time of a clipped gradient over the ordinary one's, by family; a sentence if nothing is recorded."""
    content = records.load(results, "speed")
    if content is None:
        return "No timings are recorded yet: `python -m benchmarks speed` measures them on your machine."
    wanted = ["ghost", "ghost, diagonal", "ghost whole", "ordinary in parts", "vmap", "optax contrib", "jax_privacy"]
    columns = [c for c in wanted if any(c in run["ratio"] for run in content["runs"])]
    return _ratios(content, columns)


def _ratios(content: dict[str, Any], columns: Sequence[str]) -> str:
    """The device, and ratios to the ordinary gradient, with a line for each family."""
    rows = [
        [run["family"], *(f"{run['ratio'][c]:.2f}" if c in run["ratio"] else "" for c in columns)]
        for run in content["runs"]
    ]
    device = content["environment"]
    head = ["family", *columns]
    return f"On {device['device']}, {device['cores']} cores.\n\n" + markdown.rows(
        head, rows, ["---", *["---:"] * len(columns)]
    )


def memory(results: Path) -> str:
    """Peak memory of a clipped gradient over the ordinary one's; a sentence if nothing is recorded."""
    content = records.load(results, "memory")
    if content is None:
        return "No memory is recorded yet: `python -m benchmarks memory` measures it on your machine."
    return _ratios(content, ["ghost", "ghost, diagonal", "ghost whole", "vmap"])


def users(results: Path) -> str:
    """MovieLens with privacy for a rating and for a user."""
    content = records.load(results, "users")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks users` measures it on your machine."
    rows = content["rows"]
    epsilons = sorted({r["target_epsilon"] for r in rows})
    found = {(r["unit"], r["target_epsilon"]): summaries.spread(r) for r in rows}
    lines = [[unit, *(found[unit, e] for e in epsilons)] for unit in dict.fromkeys(r["unit"] for r in rows)]
    seeds, constant = len(rows[0]["seeds"]), content["films_known"]
    return (
        markdown.rows(["privacy for", *(f"epsilon {e:g}" for e in epsilons)], lines, ["---", *["---:"] * len(epsilons)])
        + f"\n\nMean squared error on held-out ratings, {seeds} seeds. Without privacy, the films' means have "
        f"{constant['means']:.3f}, and the middle of the scale has {constant['middle']:.3f}."
    )


def tuning(results: Path) -> str:
    """Accuracy and spent epsilon of paid and unpaid tuning; a sentence if nothing is recorded."""
    content = records.load(results, "tuning")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks tuning` measures it on your machine."
    return tuning_table(content)


def tuning_table(content: dict[str, Any]) -> str:
    """A line for each way of tuning, with spent epsilon and accuracy for each stated epsilon."""
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
        f"{content['delta']:g}, {seeds} seeds.\n\n{markdown.rows(head, lines, ['---', *['---:'] * (len(head) - 1)])}"
    )


def pretrained(results: Path) -> str:
    """The scores of fine-tuning a pretrained Transformer: a table for each choice of what is trained."""
    content = records.load(results, "utility-pretrained")
    if content is None:
        return "Nothing is recorded yet: `python -m benchmarks utility --suite pretrained` measures it on your machine."
    rows = content["rows"]
    own = {title: [r for r in rows if r["table"] == title] for title in dict.fromkeys(r["table"] for r in rows)}
    return "\n\n".join(f"**{title}**\n\n{tables.pretrained(rows)}" for title, rows in own.items())


def fine_tuning(results: Path) -> str:
    """The runs of the example that fine-tunes a pretrained Transformer."""
    content = records.load(results, "fine-tuning")
    return "Nothing is recorded yet." if content is None else record.markdown(content)


SECTIONS = {
    "users": users,
    "tuning": tuning,
    "epochs": utility.epochs,
    "headline": headline,
    "audit": audit,
    "papers": utility.papers,
    "frontier": utility.frontier,
    "others": published.beside_others,
    "verdict": utility.verdict,
    "orderings": published.summary,
    "contradicted": published.contradicted,
    "lstm": published.lstm,
    "undecided": published.undecided,
    "pretrained": pretrained,
    "fine_tuning": fine_tuning,
    "speed": speed,
    "memory": memory,
}


def updated(text: str, results: Path = RESULTS) -> str:
    """The text of a page with its figures updated from the results.

    Raises:
        ValueError: if there is no section of that name.
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
