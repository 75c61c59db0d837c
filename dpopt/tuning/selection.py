"""Repeat and select: a random number of trials, of which the best is released."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpopt import accounting, events
from dpopt.common import validate
from dpopt.common.lazy import dp_accounting
from dpopt.ledger import Ledger
from dpopt.run import entropy
from dpopt.run.allowance import spent_by
from dpopt.run.results import TrainResult
from dpopt.run.statement import Statement, state
from dpopt.tuning._files import Directory, Memory, Progress
from dpopt.tuning._trials import kept, most_expensive, trial_event
from dpopt.tuning.num_trials import NumTrials
from dpopt.tuning.scores import PrivateScore, PublicScore


@dataclasses.dataclass(frozen=True)
class Selection:
    """The best trial, and what it cost to find it. Nothing of the other trials is here, nor how many there were.

    Attributes:
        setting: the best trial's; None if no trial was run, which a Poisson number of them allows.
        value: what the trial returned; of a `dpopt.run.results.TrainResult`, its parameters. None if no trial was run.
        score: its score; None if no trial was run.
        ledger: the cost of the whole search; ``other_ledger.record(selection.ledger.event)`` adds it to another's.
        num_examples, unit: see `repeat_and_select`.
        earlier: what was spent before the search; not in `ledger`, but in `epsilon` and `statement`.

    *Privacy*: all of it together costs what `ledger` says.

    >>> Selection(setting=0.1, value=None, score=1.0, ledger=Ledger(), num_examples=100).epsilon(delta=1e-3)
    0.0
    """

    setting: Any
    value: Any
    score: float | None
    ledger: Ledger
    num_examples: int
    unit: str = "example"
    earlier: dp_accounting.DpEvent | None = None

    def epsilon(self, *, delta: float) -> float:
        """Epsilon of the whole search, and of what was spent earlier, by Renyi divergences."""
        validate.small_delta(delta, self.num_examples)
        return accounting.epsilon_of_event(self._event, delta=delta, accountant="rdp")

    def statement(self, *, delta: float) -> Statement:
        """What the search promises, for a paper or a file (`dpopt.run.statement`)."""
        validate.small_delta(delta, self.num_examples)
        return state(self._event, delta=delta, unit=self.unit, accountant="rdp")

    @property
    def _event(self) -> dp_accounting.DpEvent:
        return events.following(self.earlier, self.ledger.event)


def calibrate(
    make_event: Callable[[float], dp_accounting.DpEvent],
    *,
    num_trials: NumTrials,
    score: PublicScore | PrivateScore,
    epsilon: float,
    delta: float,
) -> float:
    """The least noise multiplier of a trial with which the whole search costs at most (epsilon, delta).

    Args:
        make_event: from a noise multiplier to what the training of one trial costs, such as
            ``lambda sigma: plan_with(sigma).event``.
        num_trials, score: see `repeat_and_select`.
        epsilon, delta: what the search may cost.

    Raises:
        ValueError, TypeError: as `dpopt.calibrate`.

    *Privacy*: arithmetic on public constants.

    >>> public, trials = PublicScore(len, data="none"), NumTrials(mean=10)
    >>> sigma = calibrate(dp_accounting.GaussianDpEvent, num_trials=trials, score=public, epsilon=1.0, delta=1e-5)
    >>> alone = accounting.calibrate_event(dp_accounting.GaussianDpEvent, epsilon=1.0, delta=1e-5)
    >>> 1.5 < sigma / alone < 3
    True
    """

    def whole(noise_multiplier: float) -> dp_accounting.DpEvent:
        return num_trials.event(trial_event(make_event(noise_multiplier), score))

    return accounting.calibrate_event(whole, epsilon=epsilon, delta=delta, accountant="rdp")


def repeat_and_select(
    train: Callable[[Any, jax.Array], Any],
    settings: Sequence[Any],
    *,
    event: dp_accounting.DpEvent | Callable[[Any], dp_accounting.DpEvent],
    score: PublicScore | PrivateScore,
    num_trials: NumTrials,
    key: jax.Array,
    num_examples: int,
    unit: str = "example",
    earlier: dp_accounting.DpEvent | TrainResult | Selection | None = None,
    directory: str | Path | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Selection:
    """Trains a random number of times, each time with a setting drawn from ``settings``, and returns the best trial.

    A search that was killed resumes by the same call in the same ``directory``: with the number of trials and the
    settings that were drawn first, whatever ``key`` is now, and without the trials that are done. A trial that was
    under way starts anew, on a new key if there is one. A search that is done returns what it found, and trains
    nothing. ``train`` and its data cannot be compared with those of the first call: use a directory for one data set
    alone, and say in ``identity`` what else makes a difference.

    Only the best trial's output may be released: pass ``progress=False`` to runs in ``train``, and log nothing there.

    An error in a trial ends the call. That is sound as long as it has nothing to do with the data (a full disk, a
    killed machine). To leave out a trial *because* of what the data made of it would change what is selected from in a
    way that nothing pays for: where training may fail, catch it in ``train`` and let the score be ``-math.inf``.

    Args:
        train: ``train(setting, key)``, with a secret key of the trial's own, returns what the score is computed from
            and what is released if it is the best: parameters, a fitted model. Of a `dpopt.run.results.TrainResult` the
            parameters are kept, and its ledger is compared with ``event``.
        settings: what to draw from, uniformly and with replacement: anything that JSON can hold.
        event: what one trial's training costs at most (such as ``plan.event``), without its score; or a function that
            says so for each setting, of which the most expensive is charged.
        score: a `PublicScore` or a `PrivateScore`; the largest wins, of equal ones the first.
        num_trials: the distribution of their number.
        key: secret; the number of trials, their settings and their keys follow from it and from fresh random bits.
        num_examples: how many there are in the training data; public.
        unit: what one of them is: ``"example"``, or ``"client"``.
        earlier: what was spent before on the same records, such as the run whose parameters all trials start from: an
            event, or the result of a run or a search. The result's epsilon covers it.
        directory: where to keep what it takes to go on, or None. It is as secret as the noise key, also afterwards: it
            says how many trials there were. Unpickling runs code: use no directory of others.
        identity: what else must be as it was when a search in ``directory`` began, as JSON can hold it: the model, its
            fixed hyperparameters, the name of the data set. It is stored beside the cost, which is public: no value
            and no digest of private data.

    Returns:
        A `Selection`.

    Raises:
        ValueError, TypeError: for a bad argument; settings of which none's event covers all others'; a trial that spent
            more than its event; a directory that holds another search (other settings, another distribution, event,
            score or identity). JournalError: if the directory is in use or damaged.

    *Privacy*: the selection costs `NumTrials.event` of a trial's training and score. The ledger is written first.

    >>> event = events.poisson_event(noise_multiplier=2.0, sampling_prob=0.1, steps=10)
    >>> found = repeat_and_select(
    ...     lambda rate, key: rate * (1 + 0.1 * jax.random.normal(key)),  # a private run
    ...     [0.01, 0.1, 1.0],
    ...     event=event,
    ...     score=PublicScore(lambda value: -abs(value - 0.1), data="none"),
    ...     num_trials=NumTrials(mean=50, shape=math.inf),
    ...     key=jax.random.key(3),
    ...     num_examples=1_000,
    ... )
    >>> found.setting, round(found.epsilon(delta=1e-4), 1), round(accounting.epsilon_of_event(event, delta=1e-4), 1)
    (0.1, 4.0, 0.6)
    """
    settings = list(settings)
    _check(train, settings, score, num_trials)
    _check_plain(settings=settings, identity=identity)
    validate.prng_key(key)
    validate.positive_int(num_examples=num_examples)
    num_examples, spent = int(num_examples), spent_by(earlier, unit)
    if spent is not None:
        events.check(spent)
    of_training = most_expensive(event, settings)
    whole = num_trials.event(trial_event(of_training, score))
    ledger = Ledger()
    ledger.record(whole)
    # Also from fresh bits: a copy of the directory, or another search with this key, must not share any noise.
    for word in entropy.draw()[:4]:
        key = jax.random.fold_in(key, jnp.uint32(word))
    draws, training, scoring = jax.random.split(key, 3)
    rng = np.random.default_rng(np.asarray(jax.random.bits(draws, (8,), jnp.uint32)))
    fresh = Progress(rng.integers(len(settings), size=num_trials.draw(rng)).tolist())

    def go_on(files: Directory | Memory) -> Progress:
        progress = files.restored(fresh)
        for trial in range(progress.done, len(progress.order)):
            try:
                trained = train(settings[progress.order[trial]], jax.random.fold_in(training, trial))
                value = kept(trained, of_training, num_examples, unit, spent)
                found = score(value, jax.random.fold_in(scoring, trial))
            except Exception as error:
                error.add_note(_AFTER_AN_ERROR)
                raise
            files.save(progress, progress.add(value, -math.inf if math.isnan(found) else found))
        return progress

    if directory is None:
        progress = go_on(Memory())
    else:
        if jax.process_count() > 1:
            raise ValueError("a search of several processes cannot be kept in a directory: pass directory=None.")
        of_search = {
            "settings": settings,
            "num_trials": {"mean": float(num_trials.mean), "shape": float(num_trials.shape)},
            "trial": events.to_json(of_training),
            "score": score.description,
            "num_examples": num_examples,
            "unit": unit,
            "identity": identity,
        } | ({} if spent is None else {"earlier": events.to_json(spent)})
        with Directory.opened(Path(directory), of_search, whole) as files:
            progress = go_on(files)
    if progress.best is None:
        return Selection(None, None, None, ledger, num_examples, unit, spent)
    best = settings[progress.order[progress.best]]
    return Selection(best, progress.value, progress.score, ledger, num_examples, unit, spent)


_AFTER_AN_ERROR = (
    "This ended a trial of a private search. If it has nothing to do with the data, the same call in the same "
    "directory resumes it. If the data caused it, restarting the trial would not be covered by the stated cost: "
    "catch the error in `train` and let the score be -inf."
)


def _check(train: Any, settings: list[Any], score: Any, num_trials: Any) -> None:
    if not callable(train):
        raise TypeError(f"train must be a function of a setting and a key; got {train!r}.")
    if not settings:
        raise ValueError("settings is empty: there is nothing to draw from.")
    if not isinstance(score, PublicScore | PrivateScore):
        raise TypeError(f"score must be a PublicScore or a PrivateScore, which say what they cost; got {score!r}.")
    if not isinstance(num_trials, NumTrials):
        raise TypeError(f"num_trials must be a NumTrials: a fixed number of trials costs more; got {num_trials!r}.")


def _check_plain(**named: Any) -> None:
    for name, value in named.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be plain values, such as JSON can hold; got {value!r}.") from error
