"""The plots of the benchmarks: small, readable in black and white, drawn from the rows of the tables."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import summaries

matplotlib.rcParams["svg.hashsalt"] = "dpopt"  # equal rows give equal files

# No two alike: twelve colours that print as different greys, and twelve markers.
_SERIES = (
    ("black", "o"),
    ("C0", "s"),
    ("C3", "^"),
    ("C2", "D"),
    ("C1", "v"),
    ("C4", "P"),
    ("C5", "X"),
    ("C6", "h"),
    ("C8", "<"),
    ("C9", ">"),
    ("navy", "*"),
    ("gray", "p"),
)
FEW_POINTS = 10  # runs with more scores along the way are plotted as curves


def _tables(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {title: [r for r in rows if r["table"] == title] for title in dict.fromkeys(r["table"] for r in rows)}


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return path


def stem(suite: str, title: str) -> str:
    """The file name of a table's plot, without its suffix."""
    return f"{suite}-" + "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def papers(rows: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """One plot for each table: measured scores (with the spread over seeds) and published ones."""
    paths = []
    for title, own in _tables(rows).items():
        figure, axes = plt.subplots(figsize=(6, 0.35 * len(own) + 0.9))
        for i, row in enumerate(own):
            axes.errorbar(row["mean"], i, xerr=row["std"] or 0, fmt="o", color="C0", capsize=3)
            if row["published"] is not None:
                axes.plot(row["published"], i, "x", color="black")
        if any(row["published"] is not None for row in own):
            axes.plot([], [], "o", color="C0", label="measured")
            axes.plot([], [], "x", color="black", label="published")
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        axes.set_yticks(range(len(own)), [r["label"] for r in own])
        axes.invert_yaxis()
        axes.set_xlabel(own[0]["metric"])
        axes.set_title(title, fontsize=10)
        paths.append(_save(figure, out / f"{stem('papers', title)}.svg"))
        if all(len(row.get("curve", ())) > FEW_POINTS for row in own):
            paths.append(_curves(title, own, out))
    return paths


def _curves(title: str, rows: Sequence[dict[str, Any]], out: Path) -> Path:
    """The mean score over seeds against the number of steps."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for row, (color, marker) in zip(rows, itertools.cycle(_SERIES), strict=False):
        axes.plot(*zip(*row["curve"], strict=True), color=color, marker=marker, markevery=0.1, label=row["label"])
    axes.set_xlabel("steps")
    axes.set_ylabel(rows[0]["metric"])
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, out / f"{stem('papers', title)}-curve.svg")


def frontier(rows: Sequence[dict[str, Any]], out: Path, suite: str = "frontier") -> list[Path]:
    """One plot for each task: score against epsilon, a line for each contender, and crosses for published figures."""
    paths = []
    looks = dict(zip(dict.fromkeys(r["contender"] for r in rows), itertools.cycle(_SERIES), strict=False))
    for title, own in _tables(rows).items():
        figure, axes = plt.subplots(figsize=(8, 5))
        ends = []
        for name in dict.fromkeys(r["contender"] for r in own):
            color, marker = looks[name]
            points = sorted((r["target_epsilon"], r["mean"], r["std"] or 0) for r in own if r["contender"] == name)
            x, y, error = zip(*points, strict=True)
            axes.errorbar(x, y, yerr=error, color=color, marker=marker, capsize=2, markersize=5, linewidth=1.2)
            ends.append((x[-1], y[-1], name, color))
        published = {r["target_epsilon"]: r["reference"] for r in own if "reference" in r}
        if published:
            name = next(iter(published.values()))["name"]
            axes.plot(list(published), [p["score"] for p in published.values()], "x", color="black", label=name)
            axes.legend(fontsize=8)
        axes.set_xscale("log")
        ticks = sorted({r["target_epsilon"] for r in own})
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("epsilon")
        axes.set_ylabel(f"{own[0]['metric']} ({'higher' if own[0]['higher_is_better'] else 'lower'} is better)")
        axes.set_title(title, fontsize=10)
        _name_lines(axes, ends)
        paths.append(_save(figure, out / f"{stem(suite, title)}.svg"))
    return paths


def _name_lines(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Puts names to the right of the axes, each as close to the height of its line's end as the others permit.

    Args:
        ends: x, y, name and colour of each line.
    """
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    ends = sorted(ends, key=lambda end: end[1])
    gap = 0.055 * (high - low)
    heights: list[float] = []
    for _, y, *_ in ends:
        heights.append(max(y, heights[-1] + gap) if heights else y)
    over = heights[-1] - high
    for i in reversed(range(len(heights))):  # names beyond the top are moved down, and those that they crowd
        top = high if i == len(heights) - 1 else heights[i + 1] - gap
        heights[i] = min(heights[i], top) if over > 0 else heights[i]
    for (x, y, name, color), height in zip(ends, heights, strict=True):
        axes.annotate(
            name,
            (x, y),
            (1.04, height),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 0},
            color=color,
            fontsize=8,
            verticalalignment="center",
        )


def ratios(rows: Sequence[dict[str, Any]], xlabel: str, path: Path) -> Path:
    """Bars on a logarithmic axis, in groups by the rows' ``name``; a line marks 1. A missing ratio leaves a gap."""
    labels = list(dict.fromkeys(label for r in rows for label in r["ratios"]))
    figure, axes = plt.subplots(figsize=(7, (0.16 * len(labels) + 0.15) * len(rows) + 1))
    height = 0.8 / len(labels)
    hatches = ["", "//", "..", "xx", "\\\\", "--", "oo", "++"]
    for i, label in enumerate(labels):
        points = [(j + i * height, r["ratios"].get(label)) for j, r in enumerate(rows)]
        points = [(y, x) for y, x in points if x]
        y, x = zip(*points, strict=True) if points else ((), ())
        # From 1, so that the length of a bar is how many times more, or less, than 1 it is.
        axes.barh(y, [v - 1 for v in x], height, left=1, color=f"C{i}", hatch=hatches[i % len(hatches)], label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks([j + 0.4 - height / 2 for j in range(len(rows))], [r["name"] for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, path)


def epochs(rows: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """One plot for each task: the change by correlated noise against epochs, a line for each contender and epsilon."""
    paths = []
    for task in dict.fromkeys(r["table"].rsplit(", ", 1)[0] for r in rows):
        figure, axes = plt.subplots(figsize=(8, 5))
        own = {(r["contender"], _epochs(r), r["target_epsilon"]): r for r in rows if r["table"].startswith(f"{task}, ")}
        names = [name for name in dict.fromkeys(n for n, _, _ in own) if not name.endswith(summaries.CORRELATED)]
        ends = []
        for (name, epsilon), (color, marker) in zip(
            itertools.product(names, sorted({e for _, _, e in own})), itertools.cycle(_SERIES), strict=False
        ):
            pairs = [
                (n, own.get((name, n, epsilon)), own.get((name + summaries.CORRELATED, n, epsilon))) for n in (1, 3, 10)
            ]
            points = [(n, b["mean"] - a["mean"]) for n, a, b in pairs if a and b]
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.2)
                ends.append((x[-1], y[-1], f"{name}, epsilon {epsilon:g}", color))
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xticks((1, 3, 10), ("1", "3", "10"))
        axes.minorticks_off()
        axes.set_xlabel("epochs")
        metric, higher = next(iter(own.values()))["metric"], next(iter(own.values()))["higher_is_better"]
        axes.set_ylabel(f"{metric}, correlated less independent ({'higher' if higher else 'lower'} is better)")
        axes.set_title(task, fontsize=10)
        _name_lines(axes, ends)
        paths.append(_save(figure, out / f"{stem('epochs', task)}.svg"))
    return paths


def _epochs(row: dict[str, Any]) -> int:
    return int(row["table"].rsplit(", ", 1)[1].split()[0])


DRAW = {
    "papers": papers,
    "frontier": frontier,
    "epochs": epochs,
    "others": functools.partial(frontier, suite="others"),
    "pretrained": functools.partial(frontier, suite="pretrained"),
}
