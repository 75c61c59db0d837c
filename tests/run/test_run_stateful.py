"""For any history of runs and their directories, no two results share noise or a sample, and each one is charged."""

import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import dpopt
from dpopt.run import entropy, identity, loop
from dpopt.run.journal import Journal, JournalError
from dpopt.run.results import BudgetExceeded, ReplayError

pytest.importorskip("orbax.checkpoint")

from dpopt.run.checkpoint import Checkpointer, CheckpointError

SIZE, EXAMPLES = 5, 32
REFUSED = (BudgetExceeded, ReplayError, CheckpointError, JournalError)
SHARED_KEY = 0  # used by several runs; a run that may repeat steps has its own key
compiled = []  # the training step, the same in all plans


def loss_fn(w, x):
    return jnp.sum((w - x) ** 2)


def make_plan(key):
    builder = dpopt.Builder(
        num_examples=EXAMPLES, expected_batch_size=16, steps=10_000, key=jax.random.key(key), seed=key, pad_to=EXAMPLES
    )
    return builder.clip(1.0).noise(1.0).then(optax.sgd(1.0)).build()


class Killed(BaseException):
    pass


class Kill:
    """Ends a run like a kill, when it reaches a place for the n-th time."""

    PLACES = ("before the journal", "after the journal", "in on_step", "before a checkpoint", "in a checkpoint")

    def __init__(self, place, left):
        self.place, self.left = place, left

    def reach(self, place):
        self.left -= place == self.place
        if place == self.place and self.left == 0:
            raise Killed

    @contextlib.contextmanager
    def armed(self):
        append, save = Journal.append, Checkpointer.save

        def dying_append(journal, entry):
            self.reach("before the journal")
            append(journal, entry)
            self.reach("after the journal")

        def dying_save(checkpointer, *args):
            self.reach("before a checkpoint")
            save(checkpointer, *args)
            try:
                self.reach("in a checkpoint")
            except Killed:
                newest = checkpointer.directory / "checkpoints" / str(checkpointer.positions()[-1])
                for file in [f for f in newest.rglob("*") if f.is_file()]:
                    file.write_bytes(file.read_bytes()[:10])
                raise

        Journal.append, Checkpointer.save = dying_append, dying_save
        try:
            yield
        finally:
            Journal.append, Checkpointer.save = append, save


@dataclasses.dataclass
class Run:
    """A run and what the test has recorded of it."""

    path: Path | None  # None for a run in memory
    key: int
    plan: object = None  # for a run in memory, which lasts as long as its plan
    is_controlled: bool = True  # nobody has restored older files, continued from a copy, or truncated the journal
    positions: set = dataclasses.field(default_factory=set)  # of its journal, at each result that was released
    states: list = dataclasses.field(default_factory=list)


class RunMachine(RuleBasedStateMachine):
    """Histories of runs.

    All examples lie far out along the first coordinate, so a clipped sum is zero in the others: there a step adds noise
    alone, which can be compared. The sign of the data stands for a change of the loss or the data.
    """

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.released = []  # (noise, sample, bytes of the result) of every result released by any run
        self.environment = 0
        self.runs = [Run(self.new_path(), 1), Run(None, 2, make_plan(2))]
        self.backups = []  # (run, path, positions)
        self.real = identity.environment, loop._compiled
        identity.environment = lambda state: {**self.real[0](state), "test": self.environment}
        loop._compiled = lambda *of: compiled[0] if compiled else compiled.append(self.real[1](*of)) or compiled[0]

    def teardown(self):
        identity.environment, loop._compiled = self.real
        self.folder.cleanup()

    def new_path(self):
        return Path(tempfile.mkdtemp(dir=self.folder.name)) / "run"

    def on_disk(self):
        return [run for run in self.runs if run.path is not None and run.path.exists()]

    def go(self, run, steps, replay, sign, kill, which, is_shared):
        """Trains as in a new process, which may be killed."""
        getattr(entropy, "_runs", {}).clear()
        data = np.zeros((EXAMPLES, SIZE), np.float32)
        data[:, 0] = 1e6 * sign
        replay = run.is_controlled and (replay or run.key % 2 == 0)  # every second run always repeats what it can
        # A key shared with another run, unless steps are repeated.
        plan = run.plan or make_plan(SHARED_KEY if is_shared and not replay else run.key)
        at, kill = {}, None if kill is None else Kill(*kill)

        def remember(t, params):
            at["before"] = np.array(params)
            return {}

        def fetch(indices):
            at["indices"] = indices
            return data[indices]

        def place_batch(rows):
            at["sample"] = np.sort(at["indices"][rows[1]]).tobytes()
            return rows

        def on_step(t, params):
            noise, result = (np.array(params) - at["before"])[1:], np.array(params).tobytes()
            for other_noise, other_sample, other in self.released:
                is_same = np.allclose(noise, other_noise, rtol=0, atol=1e-5)
                assert not is_same or other == result, "two results share noise"
                assert other_sample != at["sample"] or other == result, "two results share a sample"
            assert np.linalg.norm(noise) > 1e-3, "a result without noise"
            self.released.append((noise, at["sample"], result))
            run.positions.add(len(plan.journal))
            if kill:
                kill.reach("in on_step")

        options = dict(on_step=on_step, extra=remember, place_batch=place_batch, steps=steps)
        if replay:
            options["replay"] = True
        start = run.states[which % len(run.states)] if run.states and run.path is None else jnp.zeros(SIZE)
        with contextlib.suppress(*REFUSED, Killed), kill.armed() if kill else contextlib.nullcontext():
            if run.path is None:
                result = loop.train(plan, loss_fn, start, fetch, **options)
            else:
                with Checkpointer(run.path, every=2, keep=3, asynchronous=False) as checkpointer:
                    result = loop.train(plan, loss_fn, start, fetch, checkpointer=checkpointer, **options)
            run.states.append(result.state)
            assert result.lost >= 0 and result.ledger.steps >= max(result.state.update, len(run.positions))
        assert self.journalled_steps(run) >= len(run.positions), "a result that is not charged"

    def journalled_steps(self, run):
        if run.plan is not None:
            return run.plan.journal.ledger.steps
        path = run.path / "ledger.jsonl"
        return sum('"event": {' in line for line in path.read_text().splitlines()[1:]) if path.exists() else 0

    choice: ClassVar = dict(
        steps=st.integers(1, 9),
        replay=st.booleans(),
        sign=st.sampled_from([1.0, -1.0]),
        kill=st.none() | st.none() | st.tuples(st.sampled_from(Kill.PLACES), st.integers(1, 5)),
        which=st.integers(0, 20),
        is_shared=st.booleans(),
    )

    @initialize(steps=choice["steps"], replay=choice["replay"], is_shared=choice["is_shared"])
    def train_first(self, **options):
        self.go(self.runs[0], sign=1.0, kill=None, which=0, **options)

    @rule(number=st.integers(0, 20), **choice)
    def train(self, number, **options):
        self.go(self.runs[number % len(self.runs)], **options)

    @rule(number=st.integers(0, 20), **choice)
    def train_on_disk(self, number, **options):
        runs = [run for run in self.runs if run.path is not None]
        self.go(runs[number % len(runs)], **options)

    @rule(is_in_memory=st.booleans(), **choice)
    def train_a_new_run(self, is_in_memory, **options):
        key = 1 + len(self.runs)
        run = Run(None, key, make_plan(key)) if is_in_memory else Run(self.new_path(), key)
        self.runs.append(run)
        self.go(run, **options)

    @precondition(on_disk)
    @rule(number=st.integers(0, 20))
    def back_up(self, number):
        run = self.on_disk()[number % len(self.on_disk())]
        self.backups.append((run, shutil.copytree(run.path, self.new_path()), set(run.positions)))

    @precondition(lambda self: self.backups)
    @rule(number=st.integers(0, 20), **choice)
    def put_back(self, number, **options):
        run, path, positions = self.backups[number % len(self.backups)]
        shutil.rmtree(run.path)
        shutil.copytree(path, run.path)
        run.positions, run.is_controlled = set(positions), False
        self.go(run, **options)

    @precondition(on_disk)
    @rule(number=st.integers(0, 20), **choice)
    def copy(self, number, **options):
        run = self.on_disk()[number % len(self.on_disk())]
        path = shutil.copytree(run.path, self.new_path())
        self.runs.append(Run(path, run.key, None, False, set(run.positions)))
        self.go(run, **options)
        self.go(self.runs[-1], **{**options, "sign": -options["sign"], "kill": None})

    @precondition(on_disk)
    @rule(number=st.integers(0, 20), lines=st.integers(1, 4), is_torn=st.booleans(), **choice)
    def cut(self, number, lines, is_torn, **options):
        run = self.on_disk()[number % len(self.on_disk())]
        path = run.path / "ledger.jsonl"
        rows = path.read_text().splitlines(keepends=True) if path.exists() else []
        if len(rows) <= lines:
            return
        path.write_text("".join(rows[:-lines]) + (rows[-lines][:30] if is_torn else ""))
        # Steps cut from the journal are no longer counted, as stated in SECURITY.md.
        run.positions = {p for p in run.positions if p < len(rows) - lines}
        run.is_controlled = False
        self.go(run, **options)

    @rule(number=st.integers(0, 1))
    def move(self, number):
        self.environment = number

    @precondition(lambda self: any(run.states and run.states[-1].update for run in self.runs))
    @rule(number=st.integers(0, 20), replay=st.booleans())
    def give_a_state_to_another_plan(self, number, replay):
        states = [state for run in self.runs for state in run.states if state.update]
        plan = make_plan(SHARED_KEY)
        getattr(entropy, "_runs", {}).clear()
        with pytest.raises(ValueError, match="not in this plan's journal"):
            loop.train(plan, loss_fn, states[number % len(states)], lambda i: i, steps=20, replay=replay)


TestRuns = RunMachine.TestCase
# Not shrunk: a failure prints its history, and shrinking one takes minutes.
TestRuns.settings = hypothesis.settings(
    max_examples=12, stateful_step_count=14, deadline=None, phases=[hypothesis.Phase.generate]
)
