"""What a run shows while it trains: evaluations on public data, and a progress line on a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from dpopt.common import validate
from dpopt.common.types import PyTree
from dpopt.optimizers.averaging import averaged_params, averages
from dpopt.run.state import TrainState

if TYPE_CHECKING:
    from rich.console import Console

_SHARE = 0.02  # the most of the run's time that computing epsilon for the line may take


class Evaluation(NamedTuple):
    """A result of the run's ``eval_fn``.

    *Privacy*: as public as the data that ``eval_fn`` reads.

    >>> Evaluation(100, {"accuracy": 0.9}).value["accuracy"]
    0.9
    """

    step: int  # number of steps done
    value: PyTree  # numbers, on the host


@dataclasses.dataclass
class Monitor:
    """Shows the state of a run after each step, once the step is charged; arguments as for `dpopt.run.loop.train`.

    Raises:
        TypeError, ValueError: for a bad argument; ImportError: if a line is requested and ``rich`` is not installed.
    """

    on_step: Callable[[int, PyTree], None] | None = None
    eval_fn: Callable[[PyTree], PyTree] | None = None
    eval_every: int | None = None
    progress: bool | None = None
    history: list[Evaluation] = dataclasses.field(default_factory=list)
    _line: _Line | None = None

    def __post_init__(self):
        for name in ("on_step", "eval_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function; got {getattr(self, name)!r}.")
        if self.eval_every is not None:
            validate.positive_int(eval_every=self.eval_every)
            if self.eval_fn is None:
                raise ValueError(f"eval_every={self.eval_every} needs an eval_fn to call; got eval_fn=None.")
        self.console = _console(self.progress)

    @contextlib.contextmanager
    def during(self, state: TrainState, last: int, spent: Callable[[], float] | None) -> Generator[None]:
        """Surrounds the steps of a run from a state to step ``last``; ``spent`` returns epsilon, if a delta is set."""
        self._last = last
        self._evaluate(state)
        if state.update < last and self.console is not None:
            self._line = _Line(self.console, state.update, last, spent)
        try:
            with contextlib.nullcontext() if self._line is None else self._line.bar:
                yield
        finally:
            self._line = None

    def after(self, state: TrainState, is_new: bool) -> None:
        """Shows the state after a step; ``is_new`` is False if `on_step` has been called for this step before."""
        step = state.update
        if is_new and self.on_step is not None:
            self.on_step(step, state.params)
        if step == self._last or (self.eval_every is not None and step % self.eval_every == 0):
            self._evaluate(state)
        if self._line is not None:
            self._line.show(step, self.history[-1].value if self.history else None)

    def _evaluate(self, state: TrainState) -> None:
        if self.eval_fn is not None:
            params = averaged_params(state.opt_state, state.params) if averages(state.opt_state) else state.params
            self.history.append(Evaluation(state.update, _on_host(self.eval_fn(params))))


class _Line:
    """A progress line: steps done, epsilon spent, the last evaluation, and the time left."""

    def __init__(self, console: Console, start: int, last: int, spent: Callable[[], float] | None):
        from rich import progress

        columns = [
            progress.TextColumn("training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[epsilon]}{task.fields[value]}"),
            progress.TimeRemainingColumn(compact=True),
        ]
        self.bar = progress.Progress(*columns, console=console)
        self.task = self.bar.add_task("", total=last, completed=start, epsilon="", value="")
        self.spent, self.due = spent, 0.0

    def show(self, step: int, value: PyTree) -> None:
        fields: dict[str, Any] = {} if value is None else {"value": _as_text(value)}
        now = time.monotonic()
        if self.spent is not None and now >= self.due:
            fields["epsilon"] = f"epsilon {self.spent():.3g}"
            took = time.monotonic() - now
            self.due = now + took + max(1.0, took / _SHARE)
        self.bar.update(self.task, completed=step, **fields)


def _console(progress: bool | None) -> Console | None:
    """The console that the line is shown on, or None to show no line."""
    if progress is False or jax.process_index() > 0:
        return None
    try:
        from rich.console import Console
    except ImportError:
        if progress:
            raise ImportError("progress=True shows a line by rich, which is not installed: pip install rich.") from None
        return None
    console = Console(stderr=True)
    return console if progress or console.is_terminal or console.is_jupyter else None


def _on_host(value: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x).item() if np.ndim(x) == 0 else np.asarray(x), jax.device_get(value))


def _as_text(value: PyTree) -> str:
    named = value.items() if isinstance(value, dict) else [("evaluation", value)]
    return "".join(f", {name} {x:.4g}" for name, x in named if isinstance(x, (int, float)))
