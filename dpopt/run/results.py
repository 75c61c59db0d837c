"""The outcome of `dpopt.run.loop.train`: its result, or the error it raises."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Literal

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.common.types import PyTree
from dpopt.ledger import Ledger
from dpopt.optimizers.averaging import averaged_params
from dpopt.run._monitor import Evaluation
from dpopt.run.journal import Journal
from dpopt.run.state import TrainState
from dpopt.run.statement import Statement, state

if TYPE_CHECKING:
    from dpopt.run.plan import Budget, Plan

_log = logging.getLogger("dpopt.run.loop")

_UNSEEN = (
    "Something changed that dpopt cannot detect: the data behind fetch_batch, a value that the loss uses, the noise "
    "key, or the results of a device that does not compute deterministically."
)


class BudgetExceeded(RuntimeError):
    """Not one more step fits into the budget. ``result`` has what was trained so far.

    *Privacy*: raised before anything is drawn.
    """

    result: TrainResult


class ReplayError(RuntimeError):
    """A step that was paid for gave a different result when it was repeated; the result was dropped.

    *Privacy*: the second result shares the noise of the first, so releasing both would reveal more than was accounted
    for. The error itself reveals that some bit differed.
    """


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of `train`.

    Attributes:
        state: parameters, optimizer state and position (`dpopt.run.state.TrainState`); pass it to continue.
        ledger: everything that was spent, including lost steps.
        stopped: ``"steps"`` if all requested steps are done, ``"budget"`` if the budget ended first.
        message: the reason for stopping, as a sentence.
        lost: steps that were paid for but are not in the parameters, because a run died and they were not repeated.
        unit: what one record is: ``"example"``, ``"client"`` or ``"user"``.
        history: the results of ``eval_fn``, in order; of this call only.
        delta: the budget's, or None.
        num_examples: size of the data set.
        correlation: name of the strategy that correlates noise over steps; None if it is independent.
        earlier: what the budget counts as spent before the run; not in `ledger`, but in `epsilon` and `statement`.

    *Privacy*: ``state.params`` are covered by `ledger`. ``state.opt_state`` holds the noise key: never publish it.

    >>> TrainResult(state=None, ledger=Ledger(), stopped="steps", message="", lost=0).epsilon(delta=1e-5)
    0.0
    """

    state: TrainState
    ledger: Ledger
    stopped: Literal["steps", "budget"]
    message: str
    lost: int
    unit: str = "example"
    history: tuple[Evaluation, ...] = ()
    delta: float | None = None
    num_examples: int | None = None
    correlation: str | None = None
    earlier: dp_accounting.DpEvent | None = None

    @property
    def params(self) -> PyTree:
        """The trained parameters."""
        return self.state.params

    @property
    def averaged_params(self) -> PyTree:
        """Their average over the steps, in the same dtypes, if the optimizer has a `dpopt.average_params` in it."""
        return averaged_params(self.state.opt_state, self.state.params)

    def epsilon(self, *, delta: float | None = None, accountant: accounting.Accountant | None = None) -> float:
        """Epsilon of everything that was spent.

        Warns (UserWarning) if a given delta is not below one over the number of examples.

        Args:
            delta: None for the budget's.
            accountant: as for `statement`.

        Raises:
            ValueError: if no delta is set anywhere.
        """
        event = events.following(self.earlier, self.ledger.event)
        delta = self._delta(delta)
        return accounting.epsilon_of_event(
            event, delta=delta, accountant=accountant or accounting.accountant_for(event)
        )

    def statement(self, *, delta: float | None = None, accountant: accounting.Accountant | None = None) -> Statement:
        """The guarantee of the run, including lost steps, for a paper or a file (`dpopt.run.statement`).

        Warns and raises as `epsilon` does.

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
    """The error for a repeated step whose digest is not the expected one, with what is seen to have changed since.

    *Privacy*: names digests of released values, and hyperparameters.

    >>> str(replay_error(3, "aa", "bb", ""))[:48]
    'step 3 came out differently when it was repeated'
    """
    seen = f"What changed: {changed}." if changed else _UNSEEN
    return ReplayError(
        f"step {step} came out differently when it was repeated (digest {found}, journal {expected}), so its result "
        f"was dropped: both together would reveal more than was paid for. {seen} Undo it, or omit replay=True to "
        "continue with fresh noise, charged again."
    )


def make_result(
    plan: Plan,
    journal: Journal,
    now: TrainState,
    target: int,
    paid: int,
    allowed: int,
    limit: Budget | None,
    history: tuple[Evaluation, ...] = (),
) -> TrainResult:
    """The result of a call of `dpopt.run.loop.train` that took a run to the state ``now``.

    Args:
        target: the requested number of steps.
        paid: steps in the history of the state at the call, including those to be repeated.
        allowed: further steps that the limit (the budget) covered.

    Raises:
        BudgetExceeded: if the limit covered no further step.

    *Privacy*: arithmetic on public constants.

    >>> import dpopt, optax
    >>> builder = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=2, key=dpopt.secure_key())
    >>> plan = builder.clip(1.0).noise(2.0).then(optax.sgd(0.1)).build()
    >>> make_result(plan, Journal(), TrainState((), (), update=2), 2, 2, 0, None).message
    'all 2 steps are done'
    """
    ledger = journal.ledger
    of_run: dict[str, Any] = dict(
        lost=ledger.steps - max(now.update, paid),
        unit=plan.optimizer.privacy.unit,
        history=history,
        delta=None if limit is None else limit.delta,
        num_examples=plan.sampler.num_examples,
        correlation=plan.optimizer.privacy.correlation,
        earlier=None if limit is None else limit.earlier,
    )
    if now.update >= target:
        return TrainResult(now, ledger, "steps", f"all {target} steps are done", **of_run)
    if limit is None:
        reason = f"the plan covers {plan.steps} steps and {ledger.steps} are spent (for another run, make another plan)"
    else:
        limits, spent = f"epsilon {limit.epsilon:g} at delta {limit.delta:g}", limit.spent(ledger)
        reason = f"one more step would exceed {limits}; {spent:.6g} is spent, on {ledger.steps} steps"
    message = (
        f"stopped by the budget after step {now.update} of {target}: {reason}. To continue, pass a larger budget "
        "explicitly: budget=dpopt.Budget(epsilon, delta)"
    )
    _log.warning("dpopt: %s", message)
    result = TrainResult(now, ledger, "budget", message, **of_run)
    if allowed == 0 and now.update == paid:
        error = BudgetExceeded(f"{message}.")
        error.result = result
        raise error
    return result
