"""The training loop: every step is charged to the privacy ledger before it is released, within the budget."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from dpopt import events, verification
from dpopt.common import validate
from dpopt.common.types import LossFn, PyTree
from dpopt.constants import constants_of, given
from dpopt.gradients import Engine
from dpopt.run import _program, _resume, entropy, identity
from dpopt.run._learns import warn_if_constant
from dpopt.run._monitor import Monitor
from dpopt.run._types import check_options
from dpopt.run.allowance import steps_within
from dpopt.run.data import BatchReader, Data, check_parts, rows_of
from dpopt.run.journal import Entry
from dpopt.run.loading import ahead
from dpopt.run.results import BudgetExceeded as BudgetExceeded  # what `train` raises can also be imported from here
from dpopt.run.results import ReplayError as ReplayError
from dpopt.run.results import TrainResult, make_result, replay_error
from dpopt.run.sharding import beside
from dpopt.run.state import TrainState
from dpopt.run.training import TrainStep, make_train_step

if TYPE_CHECKING:
    from dpopt.run.checkpoint import Checkpointer
    from dpopt.run.plan import Budget, Plan

_Check: TypeAlias = Callable[[PyTree, PyTree], Any]  # of parameters and a batch; raises VerificationError


def train(
    plan: Plan,
    loss_fn: LossFn,
    params: PyTree,
    fetch_batch: Data,
    *,
    steps: int | None = None,
    budget: Budget | None = None,
    checkpointer: Checkpointer | None = None,
    on_step: Callable[[int, PyTree], None] | None = None,
    eval_fn: Callable[[PyTree], PyTree] | None = None,
    eval_every: int | None = None,
    progress: bool | None = None,
    extra: Callable[[int, PyTree], dict[str, Any]] | None = None,
    place_batch: Callable[[Any], Any] | None = None,
    prefetch: int = 0,
    microbatch_size: int | None = None,
    engine: Engine = "auto",
    replay: bool = False,
    verify: bool = True,
    example_key: jax.Array | None = None,
) -> TrainResult:
    """Trains within a budget, and resumes a run that was stopped.

    Each step draws its batch from the plan's sampler, is computed, and is charged to the journal (on disk, with a
    checkpointer). Only then is its result passed to ``on_step``, saved or returned.

    Each call is a segment of the run: its noise and its batches derive from the plan's key and seed and from fresh bits
    of the operating system, so that no two calls ever share a draw, whatever happened to the files in between. To
    resume a run that died, make the same call, with the same key or another: it continues from the newest checkpoint.
    The steps since then stay paid for, and are taken again, on new batches with new noise, and charged again.

    With ``replay=True`` noise and batches derive from the plan's key and seed alone: the same call gives the same
    parameters, and a run that died recomputes the steps since its checkpoint at no cost; each must match the journal
    bit for bit. This is private only if (a) the key is used for this one run, (b) nobody restores an older copy of the
    directory, continues from two copies of it, or truncates the journal, and (c) steps that the journal lost were not
    released in any other way. Where bits cannot be the same (other devices or versions), fresh bits are drawn after
    all.

    Args:
        plan: a `dpopt.run.plan.Plan`.
        loss_fn: ``loss_fn(params, example) -> scalar``; or what `dpopt.federated.client_deltas` (for clients) or
            `dpopt.users.per_user_grads` (for users) returns.
        params: the initial parameters (not changed), or a `TrainState`: a new one (sharded, for example), which a
            checkpoint replaces if there is one, or the ``state`` of an earlier result.
        fetch_batch: the data: a pytree of arrays ``(num_examples, ...)``; a source of examples, with a length and
            integer indices, such as those of Grain, torch and Hugging Face; or a function from indices ``(B,)`` to the
            batch, leaves ``(B, ...)``, which must return the same data each time.
        steps: train until the parameters have had this many steps; None for the plan's.
        budget: a `dpopt.run.plan.Budget` that replaces the plan's, to continue after it is used up. It covers the whole
            ledger, including what is already spent.
        checkpointer: a `dpopt.run.checkpoint.Checkpointer`, or None to keep the journal in memory.
        on_step: called with the number of steps done and the new parameters after every step, once that is charged. A
            call that was interrupted when a run was killed is repeated. The next step deletes the arrays: keep copies.
        eval_fn: from parameters (their average, if the optimizer keeps one: `dpopt.average_params`) to numbers, such
            as ``{"accuracy": ...}`` on test data; they become the result's ``history``. The data it reads must be
            public, or held out from people whose privacy is not at stake: its results are not covered by epsilon.
        eval_every: steps between two evaluations. There is always one before the first step, if any (so that an error
            in ``eval_fn`` costs nothing), and one after the last.
        progress: whether to show steps, epsilon spent, the last evaluation and the time left, by ``rich``. None: only
            if ``rich`` is installed and standard error is a terminal.
        extra: from the number of steps done and the parameters to keyword arguments of the optimizer's update, such as
            ``public_grads``.
        place_batch: puts (batch, mask) on devices, such as `dpopt.run.sharding.shard_batch`; None for JAX's default.
        prefetch: how many batches a thread may read ahead while steps are computed.
        microbatch_size, engine: see `dpopt.make_train_step`.
        verify: whether to compare the engine with plain gradients on the first batch, once per process
            (`dpopt.verify`).
        example_key: for a loss that draws random numbers (dropout), a separate key for `dpopt.example_keys`; the loss
            then gets ``(example, key)``, with a key derived from the step and the example. Losses that `dpopt.flax`
            makes from models with dropout get their keys without it, from the seed of this call.
        replay: True derives all noise and batches from key and seed, and repeats steps; see above for its assumptions.

    Returns:
        A `TrainResult`. If the budget ends before ``steps``, ``stopped`` is ``"budget"``.

    Raises:
        BudgetExceeded: if not one step can be taken; ReplayError: if a repeated step gives a different result;
        VerificationError: if the engine's sum differs from that of plain gradients;
        JournalError, CheckpointError: if a stored file is damaged or belongs to another run; ValueError, TypeError:
            for a bad argument, such as a state whose steps are not in the plan's journal, or a key that another run of
            this process was started with; or if the processes of a run differ in key, seed, plan, parameters or data.

    *Privacy*: the parameters after every step, all of them together, cost what the ledger states.

    >>> import jax.numpy as jnp, numpy as np, optax, dpopt
    >>> plan = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=4, key=jax.random.key(0)).clip(1.0).noise(
    ...     2.0).then(optax.sgd(0.1)).build()
    >>> data = np.ones((100, 2), np.float32)
    >>> result = train(plan, lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), data)
    >>> result.ledger.steps, result.epsilon(delta=1e-5) == plan.epsilon(delta=1e-5)
    (4, True)
    """
    rows = rows_of(fetch_batch, plan.sampler.num_examples)
    check_parts(rows, plan.sampler)
    monitor = Monitor(on_step, eval_fn, eval_every, progress)
    validate.non_negative_int(prefetch=prefetch)
    validate.flag(replay=replay, verify=verify)
    check_options(budget, checkpointer, {"extra": extra, "place_batch": place_batch})
    target = plan.steps if steps is None else steps
    validate.positive_int(steps=target)
    target = int(target)  # NumPy's unsigned integers have no negative differences
    options: dict[str, Any] = {"microbatch_size": microbatch_size, "engine": engine}
    make_step = functools.partial(make_train_step, optimizer=plan.optimizer, **options)
    make_step(loss_fn)  # a bad argument fails here
    with contextlib.suppress(ValueError):  # of JAX, for some modules, which the first step names
        validate.floating_params(params.params if isinstance(params, TrainState) else params)
    state = params if isinstance(params, TrainState) else TrainState(params, plan.optimizer.new_state(params))
    entropy.check_apart(state.opt_state, example_key)
    run = _Run(
        plan=plan,
        step=_compiled(make_step, loss_fn),
        batches=BatchReader(rows, example_key, getattr(loss_fn, "takes_key", False), place_batch),
        prefetch=prefetch,
        monitor=monitor,
        extra=extra,
        checkpointer=checkpointer,
        identity=identity.run_identity(plan, state.params),
        program=_program.describe(plan.optimizer, loss=loss_fn, fetch_batch=rows, extra=extra, **options),
        limit=plan.budget if budget is None else budget.replacing(plan.budget),
        replay=replay,
        constants=beside(constants_of(loss_fn), state.params),
    )
    description = {"identity": run.identity, "program": run.program}
    saving = None if checkpointer is None else [checkpointer.every, checkpointer.keep]
    options_of_run = [target, replay, repr(run.limit), saving, eval_fn is not None, eval_every]
    _resume.agree_on_plan(plan, state, rows, example_key, run.constants, description, options_of_run)
    with _resume.opened(plan.journal, checkpointer, run.identity):
        try:
            if state.update == 0 and state.segment is None:
                entropy.claim(state.opt_state, plan.journal)
                restored = None if checkpointer is None else checkpointer.restore(state, plan.journal, run.identity)
                state = state if restored is None else restored.state
            check = _engine_check(loss_fn, plan.optimizer, state.params, **options) if verify else None
            return run.to(target, state, check)
        finally:
            entropy.release(plan.journal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """One call of `train`: its arguments, checked."""

    plan: Plan
    step: Callable[..., tuple[PyTree, optax.OptState, jax.Array]]
    constants: PyTree
    batches: BatchReader
    prefetch: int
    monitor: Monitor
    extra: Callable[[int, PyTree], dict[str, Any]] | None
    checkpointer: Checkpointer | None
    identity: dict[str, Any]
    program: dict[str, str]
    limit: Budget | None
    replay: bool

    def to(self, target: int, state: TrainState, check: _Check | None) -> TrainResult:
        """Resumes from a state, and takes steps until it has had ``target`` of them or the limit is reached."""
        plan, journal = self.plan, self.plan.journal
        _resume.check_state(state, journal)
        _resume.warn_of_another_program(journal, self.program)
        place = _resume.find(plan, state, self.replay)
        paid, origin = place.paid, place.origin(journal)
        allowed = steps_within(
            plan, self.limit, ledger=journal.ledger, start=paid, origin=origin, most=max(0, target - paid)
        )
        state = self._take_steps(place, min(target, paid + allowed), origin, check)
        if self.checkpointer is not None:
            self.checkpointer.wait()
        return make_result(plan, journal, state, target, paid, allowed, self.limit, tuple(self.monitor.history))

    def _take_steps(self, place: _resume.Place, last: int, origin: int, check: _Check | None) -> TrainState:
        """For each step: compute, charge, release, checkpoint."""
        journal, scheme, privacy = self.plan.journal, self.plan.sampler.scheme, self.plan.optimizer.privacy
        state = place.state
        if place.reason is not None and state.update < last:
            state = _resume.begin(self.plan, place, self.replay, self.program)
            self._save(state)
        # The step reuses the buffers it is given, and the caller's must stay valid.
        params, opt_state = jax.tree.map(jnp.copy, (state.params, state.opt_state))
        state = state._replace(params=params, opt_state=opt_state)
        sampler, segment = self.plan.sampler, ""
        if state.segment is not None:
            sampler, segment = sampler.reseeded(state.segment.seed), state.segment.id
        pending = deque(place.pending)
        first = journal.ledger.steps - len(pending)  # number of the next step to be charged, or repeated
        numbers = range(first, first + max(0, last - state.update))
        if check is not None and numbers:
            check(state.params, self.batches.placed(sampler, first, self.batches.read(sampler, first))[0])

        is_due = False
        read = ahead(functools.partial(self.batches.read, sampler), numbers, self.prefetch)
        with self.monitor.during(state, last, self._spent()):
            for number, rows in zip(numbers, read, strict=True):
                event = events.step_event(privacy, scheme, state.update, origin)
                state, found = self._compute(state, self.batches.placed(sampler, number, rows))
                if pending:
                    self._check_repeated(pending.popleft(), state.update, found)
                    # Before a step is charged, `on_step` has returned for all earlier ones: only the journal's last
                    # step may have been interrupted.
                    is_new = not pending
                else:
                    journal.append(Entry(event, found, state.update, segment))
                    _resume.agree_on_step(found)  # which also waits until the first process has written it
                    is_new = True
                self.monitor.after(state, is_new)
                is_due = is_due or (self.checkpointer is not None and state.update % self.checkpointer.every == 0)
                if is_due and not pending:
                    self._save(state)
                    is_due = False
        if numbers and not pending:  # else this state may be older than the journal's last step
            self._save(state)
        return state

    def _compute(self, state: TrainState, rows: tuple[PyTree, Any]) -> tuple[TrainState, str]:
        """The state after one more step, and its digest. Neither may be released before the step is charged."""
        more = {} if self.extra is None else self.extra(state.update, state.params)
        params, opt_state, digest = self.step(state.params, state.opt_state, *rows, more, self.constants)
        return TrainState(params, opt_state, state.update + 1, state.segment), identity.hex_digest(digest)

    def _check_repeated(self, expected: Entry, step: int, found: str) -> None:
        if expected.digest != found:
            start = [entry for entry in self.plan.journal.entries if not entry.is_step][-1]
            changed = identity.differences(start.program or {}, self.program)
            raise replay_error(step, expected.digest, found, changed)

    def _spent(self) -> Callable[[], float] | None:
        limit, journal = self.limit, self.plan.journal
        return None if limit is None else lambda: limit.spent(journal.ledger)

    def _save(self, state: TrainState) -> None:
        if self.checkpointer is not None:
            self.checkpointer.save(state, self.plan.journal, self.identity)


def _engine_check(loss_fn: LossFn, optimizer: Any, params: PyTree, **options: Any) -> _Check | None:
    """Compares the engine with plain gradients; None for losses that run under one engine only."""
    scale = verification.fixed_scale(optimizer, params)
    if getattr(loss_fn, "makes_promise", False):
        own = getattr(loss_fn, "verify", None)
        return None if own is None else functools.partial(own, scale=scale)

    def check(*params_and_batch: PyTree) -> None:
        warn_if_constant(loss_fn, *params_and_batch)
        verification.verify_once(loss_fn, *params_and_batch, **options, scale=scale)

    return check


def _compiled(make_step: Callable[[LossFn], TrainStep], loss_fn: LossFn) -> Callable[..., Any]:
    def step_and_digest(
        params: PyTree, opt_state: PyTree, batch: PyTree, mask: jax.Array, extra: dict[str, Any], constants: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        step = make_step(given(loss_fn, constants))
        params, opt_state, _ = step(params, opt_state, batch, mask, **extra)  # the metrics are not private: dropped
        return params, opt_state, identity.digest((params, opt_state))

    return jax.jit(step_and_digest, donate_argnums=(0, 1))
