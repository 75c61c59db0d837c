"""No sequence of calls makes a ledger say less than what was spent, recomputed from the steps that were let out."""

import math
import tempfile
from pathlib import Path
from typing import ClassVar

import dp_accounting as dp
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scipy import optimize, stats
from test_loop import _remember_programs  # noqa: F401

import dpopt
from dpopt import entropy, events, identity
from dpopt.journal import Entry, Journal
from dpopt.loop import BudgetExceeded, ReplayError, train

DELTA = 1e-5


def gaussian_epsilon(sigmas):
    """Epsilon of Gaussian queries on all the data, from the formula of Balle and Wang (2018), not from any library."""
    mu = math.sqrt(sum(s**-2.0 for s in sigmas))
    if mu == 0:
        return 0.0

    def gap(eps):
        first, second = stats.norm.logcdf(mu / 2 - eps / mu), eps + stats.norm.logcdf(-mu / 2 - eps / mu)
        return math.exp(first) - math.exp(second) - DELTA

    return 0.0 if gap(0.0) < 0 else optimize.brentq(gap, 0.0, 5_000.0)


class LedgerMachine(RuleBasedStateMachine):
    """A `Ledger` under every call it has, and calls of others on what it hands out."""

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
        event.events.clear()  # whoever made the event still holds its list

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


class RunMachine(RuleBasedStateMachine):
    """Runs that are begun, stopped, rewound, killed, moved and repeated: what is let out is what the journal says.

    All examples lie far out along the first coordinate, so the clipped sum has no part in the others: there, what a
    step adds is noise alone, and can be compared.
    """

    STEPS, SIZE = 6, 5

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.jsonl"
        self.let_out = []  # of each result: the noise in it, and its bytes
        self.params = {}  # digest -> parameters
        self.states = []
        self.environment = 0
        self.real = identity.environment
        identity.environment = lambda state: {**self.real(state), "test": self.environment}
        self.begin()

    def begin(self):
        """A new process: a new plan, and the journal as it is on disk."""
        entropy._runs.clear()
        self.plan = (
            dpopt.Builder(num_examples=8, expected_batch_size=8, steps=self.STEPS, key=jax.random.key(0), pad_to=8)
            .clip(1.0)
            .budget(epsilon=8.0, delta=DELTA, accountant="rdp")
            .then(optax.sgd(0.1))
            .build()
        )
        self.plan.journal.attach(self.path, {})

    def teardown(self):
        identity.environment = self.real
        self.plan.journal.close()
        self.folder.cleanup()

    def go(self, start, factor, **options):
        data = np.zeros((8, self.SIZE), np.float32)
        data[:, 0] = 1e6 * factor

        def on_step(t, params):
            before, now = self.plan.journal.entries[-2:]
            params = self.params[now.digest] = np.array(params)
            noise = params[1:] - self.params[before.digest][1:]
            for other, result in self.let_out:
                same = np.allclose(noise, other, rtol=0, atol=1e-6)
                assert not same or result == params.tobytes(), "two results with the same noise"
            if params.tobytes() not in [result for _, result in self.let_out]:  # a repetition tells nothing new
                self.let_out.append((noise, params.tobytes()))
            if options.get("dies") == t:
                raise KeyboardInterrupt

        params = start if isinstance(start, jax.Array) else start.params
        state = identity.TrainState(params, self.plan.optimizer.init(params)) if start is params else start
        self.params[identity.state_digest(state)] = np.array(params)
        try:
            steps, replay, budget = options["steps"], options["replay"], options["budget"]
            budget = None if budget is None else dpopt.Budget(budget, DELTA, "rdp")
            result = train(
                self.plan, lambda w, x: jnp.sum((w - x) ** 2), start, lambda i: data[i],
                on_step=on_step, steps=steps, replay=replay, budget=budget,
            )  # fmt: skip
        except (BudgetExceeded, ReplayError, KeyboardInterrupt):
            return
        self.states.append(result.state)
        assert result.lost >= 0

    choice: ClassVar = dict(
        steps=st.sampled_from([2, 3, 5, 6, 9]),
        replay=st.booleans(),
        budget=st.sampled_from([None, 4.0, 40.0, 40.0]),
        dies=st.sampled_from([None, None, 1, 3, 5]),
        factor=st.sampled_from([1.0, -1.0]),
    )

    @initialize(**choice)
    def train_first(self, factor, **options):
        self.go(jnp.zeros(self.SIZE), factor, **options)

    @rule(**choice)
    def train_from_scratch(self, factor, **options):
        self.go(jnp.zeros(self.SIZE), factor, **options)

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 20), **choice)
    def train_on(self, which, factor, **options):
        self.go(self.states[which % len(self.states)], factor, **options)

    @rule(torn=st.booleans())
    def kill(self, torn):
        self.plan.journal.close()
        if torn:
            with open(self.path, "ab") as file:
                file.write(b'0123456789abcdef {"digest": "half a li')
        self.begin()

    @rule(number=st.integers(0, 2))
    def move(self, number):
        self.environment = number

    @invariant()
    def counts_no_less_than_was_let_out(self):
        sigma = self.plan.noise_multiplier
        ledger = self.plan.journal.ledger
        assert ledger.steps >= len(self.let_out)
        if self.let_out:
            spent = gaussian_epsilon([sigma] * len(self.let_out))
            assert ledger.epsilon(delta=DELTA, accountant="rdp") >= spent * (1 - 1e-9)


settings = hypothesis.settings(max_examples=25, stateful_step_count=12, deadline=None)
TestLedger = pytest.mark.filterwarnings("ignore")(LedgerMachine.TestCase)
TestLedger.settings = settings
TestRun = RunMachine.TestCase
TestRun.settings = hypothesis.settings(settings, max_examples=15, stateful_step_count=10)


def test_an_entry_without_an_event_costs_nothing_and_one_with_it_always_does():
    journal = Journal()
    journal.append(Entry(None, "a", 0, "s", {}))
    assert journal.ledger.steps == 0
    journal.append(Entry(events.poisson_event(noise_multiplier=1.0, sampling_prob=1.0, steps=1), "b", 1, "s"))
    assert journal.ledger.epsilon(delta=DELTA) >= gaussian_epsilon([1.0]) * (1 - 1e-9)
