"""Ctrl-C at any line of the code that keeps a run's state: the run goes on, and whatever was released is charged."""

import multiprocessing
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from runs import run, tiny_plan

pytest.importorskip("orbax.checkpoint")

import dpopt.run
from dpopt.run.checkpoint import Checkpointer

_FOLDER = str(Path(dpopt.run.__path__[0]))
_FILES = ("journal.py", "journal_file.py", "checkpoint.py", "loop.py", "_resume.py", "_orbax.py")


class _Interrupt:
    """Raises KeyboardInterrupt at the n-th line that is run in these files; counts all of them for None."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        return self.line if str(path.parent) == _FOLDER and path.name in _FILES else None

    def line(self, frame, event, _):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.line


def _plan():
    return tiny_plan(steps=30)


def _call(plan, directory, steps, released):
    with Checkpointer(directory, every=2, asynchronous=False) as checkpointer:
        return run(plan, steps=steps, checkpointer=checkpointer, on_step=lambda t, w: released.append(np.asarray(w)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_an_interrupt_at_any_line_leaves_a_run_that_goes_on(tmp_path, seed):
    rng, released = np.random.default_rng(seed), []
    with _Interrupt() as whole:
        _call(_plan(), tmp_path / "counted", 4, [])
    plan, directory = _plan(), tmp_path / "run"
    for _ in range(4):
        at = int(rng.integers(1, whole.lines))
        try:
            with _Interrupt(at):
                _call(plan, directory, 4, released)
        except KeyboardInterrupt:
            pass
        if rng.integers(2):  # a new process
            plan.journal.close()
            plan = _plan()
        steps = 4 + int(rng.integers(2))
        result = _call(plan, directory, steps, released)
        assert result.state.update >= steps
        distinct = {w.tobytes() for w in released}
        assert result.ledger.steps >= len(distinct)
        assert result.ledger.steps == sum(entry.is_step for entry in plan.journal.entries)
        plan.journal.close()
        plan = _plan()


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_journal(tmp_path):
    """Such as one that loads data: it has inherited the file, and the file's lock."""
    workers = []

    def evaluate(_):
        if not workers:
            workers.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)))
            workers[0].start()
        return 0.0

    plan = tiny_plan(steps=4)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            run(plan, steps=2, checkpointer=checkpointer, eval_fn=evaluate)
        assert workers[0].is_alive()
        with Checkpointer(tmp_path) as checkpointer:
            assert run(tiny_plan(steps=4), checkpointer=checkpointer).state.update == 4
    finally:
        workers[0].kill()


def test_a_call_that_failed_before_its_first_step_binds_nothing(tmp_path):
    def broken(indices):
        raise OSError("no data")

    plan = tiny_plan(steps=3)
    with pytest.raises(OSError, match="no data"):
        run(plan, data=broken)
    with Checkpointer(tmp_path) as checkpointer:
        assert run(plan, checkpointer=checkpointer).ledger.steps == 3


def test_a_finished_run_is_evaluated_once_more(tmp_path):
    """So that a script ending in ``result.history[-1]`` can be run again."""
    for expected in ([0, 3], [3]):
        with Checkpointer(tmp_path) as checkpointer:
            result = run(tiny_plan(steps=3), checkpointer=checkpointer, eval_fn=jnp.sum)
        assert [e.step for e in result.history] == expected
