"""How a call of `dpopt.run.loop.train` ends: its result, or what it raises."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.ledger import Ledger
from dpopt.optimizers.averaging import averaged_params
from dpopt.run.identity import TrainState
from dpopt.run.journal import Journal
from dpopt.run.statement import Statement, state

_log = logging.getLogger("dpopt.run.loop")

_UNSEEN = (
    "Something changed that dpopt cannot see: the data behind fetch_batch, a value that the loss uses, the noise key, "
    "or a device that does not compute deterministically."
)


class BudgetExceeded(RuntimeError):
    """Not one more step fits into the budget. What was trained so far is in ``result``.

    *Privacy*: raised before anything is drawn.

    >>> issubclass(BudgetExceeded, RuntimeError)
    True
    """

    result: TrainResult


class ReplayError(RuntimeError):
    """A step that was paid for came out differently when it was computed again; the result was dropped.

    *Privacy*: the second result shares the noise of the first, so releasing both would reveal more than was accounted
    for. That an error was raised says that some bit differed.

    >>> issubclass(ReplayError, RuntimeError)
    True
    """


class Evaluation(NamedTuple):
    """What a run's ``eval_fn`` said of the parameters.

    *Privacy*: as public as the data that ``eval_fn`` read.

    >>> Evaluation(100, {"accuracy": 0.9}).value["accuracy"]
    0.9
    """

    step: int  # steps that the parameters had had
    value: Any  # numbers, on the host


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What `train` returns.

    Attributes:
        state: parameters, optimizer state and position (`dpopt.run.identity.TrainState`); pass it to continue.
        ledger: everything that was spent, also on steps that were lost.
        stopped: ``"steps"`` if all steps that were asked for are done, ``"budget"`` if the budget ends here.
        message: the same in words.
        lost: steps that were paid for but are not in the parameters, because a run died and could not be repeated.
        unit: what one record is: ``"example"``, or ``"client"``.
        history: what ``eval_fn`` returned, in order; of this call only.
        delta: the budget's, or None.
        num_examples: how many examples there are to sample from.
        correlation: how noise is correlated over steps, in a word; None: not at all.
        earlier: what the budget counts as spent before the run; not in `ledger`, but in `epsilon` and `statement`.

    *Privacy*: ``state.params`` are covered by `ledger`. ``state.opt_state`` holds the noise key: never publish it.

    >>> TrainResult(state=None, ledger=Ledger(), stopped="steps", message="", lost=0).epsilon(delta=1e-5)
    0.0
    """

    state: TrainState
    ledger: Ledger
    stopped: str
    message: str
    lost: int
    unit: str = "example"
    history: tuple[Evaluation, ...] = ()
    delta: float | None = None
    num_examples: int | None = None
    correlation: str | None = None
    earlier: dp_accounting.DpEvent | None = None

    @property
    def params(self) -> Any:
        """The trained parameters."""
        return self.state.params

    @property
    def averaged_params(self) -> Any:
        """Their average over the steps, in the same dtypes; of an optimizer with `dpopt.average_params` in it."""
        return averaged_params(self.state.opt_state, self.state.params)

    def epsilon(self, *, delta: float | None = None, accountant: accounting.Accountant = "pld") -> float:
        """Epsilon of everything that was spent.

        Warns (UserWarning) where a delta that is given is not below one over the number of examples.

        Args:
            delta: None for the budget's.
            accountant: see `dpopt.epsilon`.

        Raises:
            ValueError: if no delta is set anywhere.
        """
        event = events.following(self.earlier, self.ledger.event)
        return accounting.epsilon_of_event(event, delta=self._delta(delta), accountant=accountant)

    def statement(self, *, delta: float | None = None, accountant: accounting.Accountant | None = None) -> Statement:
        """What the run promises, for a paper or a file (`dpopt.run.statement`); also of steps that were lost.

        Warns, and raises, as `epsilon` does.

        Args:
            delta: below one over the number of records; None for the budget's.
            accountant: see `dpopt.epsilon`; None for ``"pld"``, or for samples of fixed size ``"rdp"``.
        """
        return state(
            events.following(self.earlier, self.ledger.event),
            delta=self._delta(delta),
            unit=self.unit,
            accountant=accountant,
            correlation=self.correlation,
        )

    def _delta(self, given: float | None) -> float:
        return validate.chosen_delta(given, self.delta, self.num_examples)


def replay_error(step: int, expected: str, found: str, changed: str) -> ReplayError:
    """What to raise when a repeated step has another digest than its line in the journal.

    Args:
        step: number of the step.
        expected, found: the digests.
        changed: the differences to the program that took the step first, where any can be seen.

    *Privacy*: names digests of released values, and hyperparameters.

    >>> str(replay_error(3, "aa", "bb", ""))[:48]
    'step 3 came out differently when it was repeated'
    """
    seen = f"What changed: {changed}." if changed else _UNSEEN
    return ReplayError(
        f"step {step} came out differently when it was repeated (digest {found}, journal {expected}), so its result "
        f"was dropped: both together would show more than was paid for. {seen} Undo it, or leave replay=True out to go "
        "on with fresh noise, charged anew."
    )


def make_result(
    plan: Any,
    journal: Journal,
    now: TrainState,
    target: int,
    paid: int,
    allowed: int,
    limit: Any,
    history: tuple[Evaluation, ...] = (),
) -> TrainResult:
    """The result of a call of `dpopt.run.loop.train`.

    Args:
        plan, journal, now: what was trained, and where it stands.
        target: steps that the parameters should have had.
        paid: steps in the history of the state at the call, with those to be repeated.
        allowed: steps that the limit bought on top.
        limit: the budget, or None.
        history: the evaluations.

    Raises:
        BudgetExceeded: if the limit bought no step.

    *Privacy*: arithmetic on public constants.

    >>> import dpopt, optax
    >>> builder = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=2, key=dpopt.secure_key())
    >>> plan = builder.clip(1.0).noise(2.0).then(optax.sgd(0.1)).build()
    >>> make_result(plan, Journal(), TrainState((), (), update=2), 2, 2, 0, None).message
    'all 2 steps are done'
    """
    ledger = journal.ledger
    lost = ledger.steps - max(now.update, paid)
    of_plan: dict[str, Any] = dict(
        unit=plan.optimizer.privacy.unit,
        history=history,
        delta=None if plan.budget is None else plan.budget.delta,
        num_examples=plan.sampler.num_examples,
        correlation=plan.optimizer.privacy.correlation,
        earlier=None if limit is None else limit.earlier,
    )
    if now.update >= target:
        message = f"all {target} steps are done"
        return TrainResult(now, ledger, "steps", message, lost, **of_plan)
    if limit is None:
        reason = f"the plan covers {plan.steps} steps and {ledger.steps} are spent"
    else:
        spent = limit.spent(ledger)
        reason = (
            f"one more step would exceed epsilon {limit.epsilon:g} at delta {limit.delta:g}; {spent:.6g} is spent, on "
            f"{ledger.steps} steps"
        )
    message = (
        f"stopped by the budget after step {now.update} of {target}: {reason}. To continue, pass a larger budget "
        "explicitly: budget=dpopt.Budget(epsilon, delta)"
    )
    _log.warning("dpopt: %s", message)
    result = TrainResult(now, ledger, "budget", message, lost, **of_plan)
    if allowed == 0 and now.update == paid:
        error = BudgetExceeded(f"{message}.")
        error.result = result
        raise error
    return result
