"""Writes what the Python blocks of the documentation print below them: ``python -m tests.doc_outputs [page ...]``.

What differs between runs of a page by more than a twentieth is written as ``...``; test_docs.py compares the rest.
"""

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dpopt.run import entropy

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE)
RUNS = 3
# Too heavy for a test environment: blocks that need them run where they are installed.
ABSENT = [m for m in ("torch", "datasets") if importlib.util.find_spec(m) is None]
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def run(page: Path) -> Iterator[tuple[re.Match, str | None]]:
    """The blocks of a page, in order, which share their names; what each prints, None for one that cannot run here."""
    entropy._runs.clear()  # as in a process of its own
    names: dict = {}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        if any(f"import {m}" in block["code"] or f"from {m}" in block["code"] for m in ABSENT):
            yield block, None
            continue
        line = text[: block.start()].count("\n") + 1  # each at its own line, so that a traceback points into the page
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * line + block["code"], page.name, "exec"), names)
        yield block, "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def agrees(shown: str, printed: str) -> bool:
    """Line by line; ``...`` stands for anything, and numbers may differ by a twentieth."""
    pairs = list(zip(shown.splitlines(), printed.splitlines(), strict=False))
    return len(shown.splitlines()) == len(printed.splitlines()) and all(_alike(*pair) for pair in pairs)


def _alike(shown: str, printed: str) -> bool:
    if "..." in shown:
        return re.fullmatch(".*".join(re.escape(part) for part in shown.split("...")), printed) is not None
    numbers = [[float(n) for n in _NUMBER.findall(line)] for line in (shown, printed)]
    same_words = _NUMBER.sub("#", shown) == _NUMBER.sub("#", printed)
    return same_words and all(abs(a - b) <= 0.05 * max(a, b) for a, b in zip(*numbers, strict=True))


def _common(a: str, b: str) -> str:
    """What two outputs share; words that differ are ``...``."""
    pairs = zip(re.split(r"(\s+)", a), re.split(r"(\s+)", b), strict=False)
    return "".join(x if _alike(x, y) else "..." for x, y in pairs)


def write(page: Path) -> None:
    found = [[output for _, output in run(page)] for _ in range(RUNS)]
    outputs = iter(list(zip(*found, strict=True)))

    def with_output(block: re.Match) -> str:
        first, *others = next(outputs)
        if first is None:
            return block[0]
        for other in others:
            first = _common(first, other)
        code = f"```python\n{block['code']}```"
        return f"{code}\n\n```text\n{first}```" if first.strip() else code

    page.write_text(BLOCK.sub(with_output, page.read_text()))


if __name__ == "__main__":
    for page in sys.argv[1:]:
        write(Path(page))
