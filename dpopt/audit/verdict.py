"""A bound beside the claim that it was to test, in words and as a plot."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from dpopt.audit.bound import Bound
from dpopt.audit.gaussian import GaussianEstimate
from dpopt.common.lazy import dp_accounting
from dpopt.run import statement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was claimed of a run, and what attacks on it have shown; made by `report`.

    ``str(report)`` is the verdict and a table in Markdown.

    Attributes:
        claim: the run's `dpopt.run.statement.Statement`, at the delta of the bound.
        bound: what the attack has shown.
        estimate: an estimate beside it, or None.

    >>> bound = Bound(epsilon=9.0, delta=1e-5, significance=0.05, method="one run", trials=900, guesses=900, right=900)
    >>> found = report(dp_accounting.GaussianDpEvent(2.0), bound)
    >>> found.exceeds_claim, found.verdict.split(":")[0]
    (True, 'VIOLATION')
    """

    claim: statement.Statement
    bound: Bound
    estimate: GaussianEstimate | None = None

    @functools.cached_property
    def allowed(self) -> float | None:
        """What the claim lets any test detect at the bound's false positive rate; None for one run."""
        rate = self.bound.false_positive_rate
        return None if rate is None else self.claim.true_positive_rates([rate])[0]

    @property
    def exceeds_claim(self) -> bool:
        """Whether the bound contradicts the claim: at its delta, or, for many runs, at any."""
        detected = self.bound.true_positive_rate
        is_over_curve = detected is not None and self.allowed is not None and detected > self.allowed
        return self.bound.epsilon > self.claim.epsilon or is_over_curve

    @property
    def verdict(self) -> str:
        """One sentence."""
        bound, claimed = self.bound, self.claim.epsilon
        sure = f"with {bound.confidence:.4g} confidence"
        at = f"at delta {bound.delta:.3g}"
        if not self.exceeds_claim and bound.ceiling is not None and bound.ceiling <= claimed:
            return (
                f"This attack could not have refuted the claim: {sure} {bound.trials} canaries show at most epsilon "
                f"{bound.ceiling:.3g} {at}, if all guesses are right, and {claimed:.3g} is claimed. They have shown "
                f"{bound.epsilon:.3g}. Audit a run that claims less, or many runs."
            )
        if not self.exceeds_claim:
            return (
                f"The bound does not exceed the claim: {sure} epsilon is at least {bound.epsilon:.3g} {at}, and "
                f"{claimed:.3g} is claimed. This attack has found no mistake, which proves nothing about others."
            )
        if bound.epsilon > claimed:
            return f"VIOLATION: {sure} epsilon is at least {bound.epsilon:.3g} {at}, and {claimed:.3g} is claimed."
        return (
            f"VIOLATION: {sure} the canary is detected with probability {bound.true_positive_rate:.3g} at least at "
            f"{bound.false_positive_rate:.3g} false alarms at most, and the claim allows {self.allowed:.3g}."
        )

    def __str__(self) -> str:
        bound, what = self.bound, "canaries" if self.bound.method == "one run" else "runs"
        rows = [
            ("claim", f"epsilon {self.claim.epsilon:.3g} at delta {bound.delta:.3g}, {self.claim.relation.value}"),
            ("lower bound", f"epsilon {bound.epsilon:.3g}, confidence {bound.confidence:.4g}"),
            ("counted", f"{bound.method}, {bound.trials} {what}: {bound.right} of {bound.guesses} guesses right"),
        ]
        if self.allowed is not None:
            rate, least = bound.false_positive_rate, bound.true_positive_rate
            rows.append(("detects", f"{least:.3g} at {rate:.3g} false alarms; the claim allows {self.allowed:.3g}"))
        if self.estimate is not None:
            low, high = self.estimate.interval
            text = f"epsilon {self.estimate.epsilon:.3g}, interval {low:.3g} to {high:.3g} by the bootstrap"
            rows.append(("estimate, no bound", f"{text}, if the run is a Gaussian mechanism"))
        table = "\n".join(f"| {name} | {value} |" for name, value in rows)
        return f"{self.verdict}\n\n| | |\n| --- | --- |\n{table}"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "verdict": self.verdict,
            "exceeds_claim": self.exceeds_claim,
            "claimed_epsilon": self.claim.epsilon,
            "bound": {name: value for name, value in vars(self.bound).items() if name != "roc"},
            "estimate": None if self.estimate is None else dataclasses.asdict(self.estimate),
        }

    def plot(self, axes: Any = None) -> Any:
        """The trade-off curve of the claim, what the attack reached, and what it is sure of.

        The claim holds if no test is above its curve. The dashed line is all that the bound refutes: if a test reached
        nothing above it, epsilon could be as low as the bound. ``axes`` are matplotlib's (``dpopt[benchmarks]``), which
        are returned, None for new ones.
        """
        axes = self.claim.plot(axes)
        bound = self.bound
        if bound.roc is not None:
            axes.plot(*bound.roc, drawstyle="steps-post", linewidth=0.8, color="C1", label="reached by the attack")
        rates = np.linspace(0, 1, 201)
        gain = np.exp(bound.epsilon)
        shown = np.minimum(gain * rates + bound.delta, 1 - (1 - bound.delta - rates) / gain)
        label = f"epsilon {bound.epsilon:.3g}, refuted with {bound.confidence:.4g} confidence"
        axes.plot(rates, np.clip(shown, 0, 1), linestyle="--", color="C2", label=label)
        if bound.true_positive_rate is not None:
            axes.plot(bound.false_positive_rate, bound.true_positive_rate, "o", color="C3", label="at least, at most")
        axes.legend(loc="lower right")
        return axes


def report(claim: Any, bound: Bound, estimate: GaussianEstimate | None = None) -> Report:
    """Holds a bound against the claim.

    Args:
        claim: what the run is said to have cost: a `dpopt.Plan`, `dpopt.Ledger`, a result of training, a
            `dpopt.run.statement.Statement`, or an event of ``dp_accounting``.
        bound: what `one_run_bound` or `many_runs_bound` returned; its delta is the one to be compared at, and positive.
        estimate: what `gaussian_estimate` returned, to stand beside it.

    Raises:
        ValueError, TypeError: for a claim of another kind, or one that no accountant takes.

    >>> bound = Bound(epsilon=0.5, delta=1e-5, significance=0.05, method="one run", trials=100, guesses=100, right=70)
    >>> print(report(dp_accounting.GaussianDpEvent(2.0), bound).verdict)
    The bound does not exceed the claim: with 0.95 confidence epsilon is at least 0.5 at delta 1e-05, and 1.99 is \
claimed. This attack has found no mistake, which proves nothing about others.
    """
    event = claim  # whose own ``event``, where it has one, is a part of it
    if not isinstance(event, dp_accounting.DpEvent):
        event = getattr(getattr(claim, "ledger", claim), "event", None)
    if not isinstance(event, dp_accounting.DpEvent):
        raise TypeError(
            f"claim must be a plan, a ledger, a result of training, a statement or an event; got {claim!r}."
        )
    if bound.delta == 0:
        raise ValueError("Gaussian noise claims no epsilon at delta 0: ask for the bound at the delta of the claim.")
    return Report(claim=statement.state(event, delta=bound.delta), bound=bound, estimate=estimate)
