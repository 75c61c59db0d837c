"""Privacy statements: the guarantee of a run as text, numbers and a curve, for a paper or for documentation."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.composition import step_events
from dpopt.composition.relation import Relation
from dpopt.trade_off import true_positive_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PUBLIC = (
    "the number of examples, and how many are expected in a batch",
    "every setting of the training: the clip, the noise multiplier, the optimizer, the number of steps",
    "the model's architecture, its initial parameters, and whatever they were trained on before",
    "side information and public gradients, where an optimizer is given any",
    "bounds, vocabularies and other constants by which the data were prepared",
)
TRIALS = "choosing settings by trials on the same data: each trial is a run with a cost of its own"
SELECTED = "trials beside those of the search, anything of its trials but the best one, and how many there were"
NOT_COVERED = (
    TRIALS,
    "losses, norms, accuracies and other figures computed from the training data",
    "which examples were drawn, the noise key, and the optimizer's state, which holds the key: keep them secret",
    "people with several records, unless the unit above is what holds all of theirs",
)
_BOUNDS = {
    "pld": "the smallest of three bounds (privacy loss distributions, Renyi divergences, ever sampled)",
    "rdp": "Renyi divergences",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement:
    """The privacy guarantee of a run, to be printed, saved or plotted; made by `dpopt.run.statement.state`.

    ``str(statement)`` is a paragraph and a table in Markdown.

    Attributes:
        event: the cost of the run, an event of ``dp_accounting``.
        delta: the delta of `epsilon`.
        unit: what one record is.
        accountant: see `dpopt.epsilon`.
        correlation: name of the strategy that correlates noise over steps; None if it is independent.

    *Privacy*: public constants; safe to publish.

    >>> event = events.poisson_event(noise_multiplier=1.0, sampling_prob=0.01, steps=1_000)
    >>> print(str(state(event, delta=1e-5)).splitlines()[0])
    The training is (epsilon = 1.84, delta = 1e-05)-differentially private for adding or removing one example.
    """

    event: dp_accounting.DpEvent
    delta: float
    unit: str = "example"
    accountant: accounting.Accountant = "pld"
    correlation: str | None = None

    @functools.cached_property
    def epsilon(self) -> float:
        """An upper bound, at `delta`."""
        return accounting.epsilon_of_event(self.event, delta=self.delta, accountant=self.accountant)

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours."""
        events.check(self.event)
        return events.relation_of(events.flattened(self.event))

    def epsilons(self, deltas: Sequence[float] = ()) -> dict[float, float]:
        """Epsilon at several deltas (by default `delta` and three smaller ones); all of them hold at once."""
        if len(deltas) == 0:  # powers of ten as one writes them: 1e-5 * 0.1 is 1.0000000000000002e-06
            deltas = [self.delta, *(float(f"{self.delta / 10**n:.15g}") for n in range(1, 4))]
        return {d: accounting.epsilon_of_event(self.event, delta=d, accountant=self.accountant) for d in deltas}

    def true_positive_rates(self, false_positive_rates: Sequence[float]) -> list[float]:
        """Upper bounds for any attacker (`dpopt.trade_off.true_positive_rates`)."""
        return true_positive_rates(self.event, false_positive_rates, accountant=self.accountant).tolist()

    def plot(self, axes: Axes | None = None) -> Axes:
        """Plots the trade-off curve: true against false positives of the best test for the presence of one record.

        Draws on ``axes`` of matplotlib (``dpopt[benchmarks]``) or, for None, on new ones, and returns them.
        """
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots()[1]
        rates = [n / 200 for n in range(201)]
        axes.plot(rates, self.true_positive_rates(rates), label=f"epsilon {self.epsilon:.3g} at delta {self.delta:.3g}")
        axes.plot([0, 1], [0, 1], linestyle=":", color="grey", label="a guess")
        axes.set(xlabel="false positive rate", ylabel="true positive rate, at most", xlim=(0, 1), ylim=(0, 1.01))
        axes.legend(loc="lower right")
        return axes

    def to_json(self) -> dict[str, Any]:
        """The statement as plain values."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": self.relation.name.lower(),
            "unit": self.unit,
            "accountant": self.accountant,
            "epsilons": {_up(delta): found for delta, found in self.epsilons().items()},
            "event": events.to_json(self.event),
            "software": _software(),
        }

    def _mechanism(self, neighbours: str) -> str:
        steps = _mechanism(self.event, self.unit, neighbours)
        if self.correlation is None:
            return steps
        return (
            f"noise that is correlated over steps, {self.correlation}, on parts of the data in turn; to those in the "
            f"most steps it costs what these would: {steps}"
        )

    def __str__(self) -> str:
        replaces = self.relation is Relation.REPLACE_ONE
        neighbours = f"{'replacing' if replaces else 'adding or removing'} one {self.unit}"
        otherwise = "another in its place" if replaces else "none"
        selection = dp_accounting.dp_event.RepeatAndSelectDpEvent
        selects = any(isinstance(e, selection) for e in events.everything_in(self.event))
        released = "everything released" if selects else "the parameters after every step"
        not_covered = [SELECTED if selects and what == TRIALS else what for what in NOT_COVERED]
        attack = (0.001, 0.01, 0.1)
        found = zip(attack, self.true_positive_rates(attack), strict=True)
        rows = [
            ("epsilon, at delta", ", ".join(f"{_up(e)} at {_up(d)}" for d, e in self.epsilons().items())),
            ("unit, relation", neighbours),
            ("mechanism", self._mechanism(neighbours)),
            ("accountant", f"dp_accounting {metadata.version('dp-accounting')}, {_BOUNDS[self.accountant]}"),
            (
                "best attack",
                ", ".join(f"detects {_up(100 * tpr)}% at {100 * fpr:g}% false alarms" for fpr, tpr in found),
            ),
            ("assumed public", "; ".join(PUBLIC)),
            ("not covered", "; ".join(not_covered)),
            ("software", ", ".join(f"{name} {version}" for name, version in _software().items())),
        ]
        table = "\n".join(f"| {name} | {value} |" for name, value in rows)
        epsilon, delta = _up(self.epsilon, zeros=True), _up(self.delta)
        return (
            f"The training is (epsilon = {epsilon}, delta = {delta})-differentially private for {neighbours}.\n"
            f"Whatever is concluded from {released}, by someone who may know all other records, is at most e^{epsilon} "
            f"times as probable with one {self.unit} as with {otherwise}, or the other way round, but for a "
            f"probability of {delta}.\n\n| | |\n| --- | --- |\n"
            f"{table}"
        )


def _up(number: float, *, zeros: bool = False) -> str:
    """A number with three digits, rounded up: a statement may not claim less than was found."""
    if not 0 < number < math.inf:
        return f"{number:.3g}"
    with decimal.localcontext(prec=3, rounding=decimal.ROUND_CEILING):
        rounded = float(+decimal.Decimal(repr(float(number))))
    return f"{rounded:#.3g}".rstrip(".") if zeros else f"{rounded:.3g}"


def state(
    event: dp_accounting.DpEvent,
    *,
    delta: float,
    unit: str = "example",
    accountant: accounting.Accountant | None = None,
    correlation: str | None = None,
) -> Statement:
    """The `Statement` of an event. Plans and results of training make their own: ``result.statement()``.

    Args:
        event: the ``event`` of a ledger or a plan, or the result of `dpopt.privacy_event`.
        delta: below one over the number of records.
        unit: what one record is, such as ``"example"`` or ``"client"``.
        accountant: see `dpopt.epsilon`; None for ``"pld"``, or for samples of fixed size and selections ``"rdp"``.
        correlation: name of the strategy that correlates noise over steps (`dpopt.correlated`), or None.

    Raises:
        ValueError, TypeError: for a bad argument, or an event that the accountant does not support.

    *Privacy*: a description of public constants.

    >>> state(dp_accounting.GaussianDpEvent(2.0), delta=1e-6).relation.name
    'ADD_OR_REMOVE_ONE'
    """
    validate.delta(delta)
    events.check(event)
    if accountant is None:
        accountant = accounting.accountant_for(event)
    statement = Statement(event=event, delta=float(delta), unit=unit, accountant=accountant, correlation=correlation)
    statement.epsilon  # noqa: B018  what cannot be accounted for fails here
    return statement


def _mechanism(event: dp_accounting.DpEvent, unit: str, neighbours: str, for_replacing: bool | None = None) -> str:
    parts = []
    for step, count in events.flattened(event, for_replacing=for_replacing).items():
        if isinstance(step, dp_accounting.NonPrivateDpEvent):
            parts.append("steps without noise")
            continue
        if isinstance(step, dp_accounting.dp_event.RepeatAndSelectDpEvent):
            # Flattening has written what a selection selects from for its neighbours, too.
            parts.append(_selection(step, count, _mechanism(step.event, unit, neighbours, for_replacing=False)))
            continue
        match step:
            case dp_accounting.PoissonSampledDpEvent(sampling_probability=q):
                data = f"Poisson samples, each {unit} with probability {q:.4g}"
            case dp_accounting.TruncatedSubsampledGaussianDpEvent(
                dataset_size=n, sampling_probability=q, truncated_batch_size=b
            ):
                data = f"Poisson samples, each {unit} of {n} (or one less or more) with probability {q:.4g}"
                data = f"{data}, of which a random {b} are kept where there are more"
            case dp_accounting.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=b):
                data = f"samples of {b} out of {n}"
            case _:
                data = "all data"
        _, sigma = step_events.sampled_gaussian(step)
        parts.append(f"{count} x Gaussian noise of {sigma:.4g} times what {neighbours} can change, on {data}")
    if len(parts) > 4:
        parts = [*parts[:2], f"... {len(parts) - 3} more kinds of steps ...", parts[-1]]
    return "; ".join(parts) or "nothing was released"


def _selection(event: dp_accounting.dp_event.RepeatAndSelectDpEvent, count: int, run: str) -> str:
    names = {0: "logarithmic", 1: "geometric", math.inf: "Poisson"}
    name = names.get(event.shape, f"truncated negative binomial of shape {event.shape:g}")
    often = "" if count == 1 else f"{count} x "
    return f"{often}the best of a random number of runs ({name}, mean {event.mean:g}), of which each has {run}"


def _software() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("dpopt", "jax", "optax", "dp-accounting")}
