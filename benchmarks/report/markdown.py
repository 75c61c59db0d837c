"""Tables in Markdown."""

from collections.abc import Sequence


def rows(head: Sequence[str], lines: Sequence[Sequence[str]], align: Sequence[str] | None = None) -> str:
    """A table from its lines."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, align or ["---"] * len(head), *lines])


def columns(cells: dict[str, Sequence[str]]) -> str:
    """A table from its columns by head, without empty ones. Words are aligned to the left, numbers to the right."""
    shown = {head: own for head, own in cells.items() if any(own)}
    rules = ["---:" if all(c.lstrip("*")[:1] in "0123456789" for c in own) else "---" for own in shown.values()]
    return rows(list(shown), list(zip(*shown.values(), strict=True)), rules)
