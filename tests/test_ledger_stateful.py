"""No sequence of calls makes a ledger report less than what was spent, recomputed from the released steps."""

import math

import dp_accounting as dp
import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scipy import optimize, stats

import dpopt
from dpopt import events
from dpopt.run.journal import Entry, Journal

DELTA = 1e-5


def gaussian_epsilon(sigmas):
    """Epsilon of Gaussian queries on all data, from the formula of Balle and Wang (2018), without any library."""
    mu = math.sqrt(sum(s**-2.0 for s in sigmas))
    if mu == 0:
        return 0.0

    def gap(eps):
        first, second = stats.norm.logcdf(mu / 2 - eps / mu), eps + stats.norm.logcdf(-mu / 2 - eps / mu)
        return math.exp(first) - math.exp(second) - DELTA

    return 0.0 if gap(0.0) < 0 else optimize.brentq(gap, 0.0, 5_000.0)


class LedgerMachine(RuleBasedStateMachine):
    """A `Ledger` under all of its calls, with mutation of the objects that it returns."""

    def __init__(self):
        super().__init__()
        self.ledger = dpopt.Ledger()
        self.spent = []  # the sigmas, as an independent list

    sigma = st.sampled_from([0.8, 1.0, 2.0, 5.0, 50.0])

    @rule(sigma=sigma, count=st.integers(1, 5))
    def record(self, sigma, count):
        self.ledger.record(dp.GaussianDpEvent(sigma), count)
        self.spent += [sigma] * count

    @rule(sigmas=st.lists(sigma, min_size=1, max_size=3), nested=st.booleans())
    def record_composed(self, sigmas, nested):
        event = dp.ComposedDpEvent([dp.GaussianDpEvent(s) for s in sigmas])
        self.ledger.record(dp.SelfComposedDpEvent(event, 2) if nested else event)
        self.spent += sigmas * (2 if nested else 1)
        event.events.clear()  # the caller still has the list

    @rule(
        bad=st.sampled_from(
            [
                dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), -3),
                dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), 0),
                dp.ComposedDpEvent([dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), -1)]),
                dp.GaussianDpEvent(-1.0),
                dp.GaussianDpEvent(math.nan),
                dp.PoissonSampledDpEvent(-0.5, dp.GaussianDpEvent(1.0)),
                dp.PoissonSampledDpEvent(1.5, dp.GaussianDpEvent(1.0)),
                dp.UnsupportedDpEvent(),
                "event",
            ]
        )
    )
    def record_nonsense(self, bad):
        with pytest.raises((ValueError, TypeError)):
            self.ledger.record(bad)

    @rule(count=st.sampled_from([0, -1, 1.5, True]))
    def record_a_wrong_count(self, count):
        with pytest.raises((ValueError, TypeError)):
            self.ledger.record(dp.GaussianDpEvent(1.0), count)

    @rule()
    def save_and_load(self):
        self.ledger = dpopt.Ledger.from_json(self.ledger.to_json())

    @rule()
    def ask(self):
        assert self.ledger.epsilon(delta=DELTA, accountant="rdp") == self.ledger.epsilon(delta=DELTA, accountant="rdp")

    @rule()
    def tamper_with_what_it_hands_out(self):
        self.ledger.event.events.clear()
        copy = self.ledger.copy()
        copy.record(dp.GaussianDpEvent(0.1))
        for part in self.ledger.event.events:
            inner = getattr(part.event, "events", None)
            if inner is not None:
                inner.clear()

    @invariant()
    def counts_no_less_than_was_spent(self):
        least = gaussian_epsilon(self.spent)
        assert self.ledger.epsilon(delta=DELTA, accountant="rdp") >= least * (1 - 1e-9) - 1e-9
        exact = self.ledger.event
        assert self.ledger.steps == 0 or isinstance(exact, dp.ComposedDpEvent)


settings = hypothesis.settings(max_examples=25, stateful_step_count=12, deadline=None)
TestLedger = pytest.mark.filterwarnings("ignore")(LedgerMachine.TestCase)
TestLedger.settings = settings


def test_an_entry_without_an_event_costs_nothing_and_one_with_it_always_does():
    journal = Journal()
    journal.append(Entry(None, "a", 0, "s", {}))
    assert journal.ledger.steps == 0
    journal.append(Entry(events.poisson_event(noise_multiplier=1.0, sampling_prob=1.0, steps=1), "b", 1, "s"))
    assert journal.ledger.epsilon(delta=DELTA) >= gaussian_epsilon([1.0]) * (1 - 1e-9)
