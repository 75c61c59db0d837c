"""How many steps a budget buys."""

from __future__ import annotations

from typing import Any

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.ledger import Ledger


def steps_within(
    plan: Any,
    budget: Any,
    *,
    ledger: Ledger | None = None,
    start: int = 0,
    origin: int | None = None,
    most: int = 2**20,
) -> int:
    """How many more steps of a plan a budget buys, on top of what a ledger holds.

    Args:
        plan: a `dpopt.run.plan.Plan`.
        budget: a `dpopt.run.plan.Budget`; None buys the plan's own number of steps.
        ledger: what is spent already; None for nothing.
        start: number of the first step, for plans whose cost depends on the step.
        origin: the step that the run's segment began with, for batches from parts of the data and correlated noise; by
            default ``start``.
        most: do not count further than this.

    Raises:
        ValueError, TypeError: for a number out of range.

    *Privacy*: arithmetic on public constants.

    >>> import jax, optax, dpopt
    >>> plan = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=20, key=jax.random.key(0)).clip(1.0).noise(
    ...     1.0).then(optax.sgd(0.1)).build()
    >>> n = steps_within(plan, dpopt.Budget(3.0, 1e-5))
    >>> plan.epsilon(n, delta=1e-5) <= 3.0 < plan.epsilon(n + 1, delta=1e-5)
    True
    """
    validate.non_negative_int(start=start, most=most)
    ledger = Ledger() if ledger is None else ledger
    if budget is None:
        return max(0, min(most, plan.steps - ledger.steps))

    budget = budget.replacing(plan.budget)
    if budget != plan.budget:  # the plan's own was looked at when it was set
        validate.small_delta(budget.delta, plan.sampler.num_examples)
    spent = events.following(budget.earlier, ledger.event)
    more = events.composer(plan.optimizer.privacy, plan.sampler.scheme, start, start if origin is None else origin)
    return accounting.steps_affordable(
        lambda steps: dp_accounting.ComposedDpEvent([spent, more(steps)]),
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.accountant,
        most=most,
    )
