"""The training loop with a privacy ledger: every step is charged before it is released, and the budget is a limit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpopt import events, verification
from dpopt.common import validate
from dpopt.constants import constants_of, given
from dpopt.gradients import Engine
from dpopt.keys import example_keys, seeded_key
from dpopt.run import _program, _resume, entropy, identity
from dpopt.run._watch import Watch
from dpopt.run.allowance import steps_within
from dpopt.run.data import read, rows_of
from dpopt.run.identity import TrainState
from dpopt.run.journal import Entry
from dpopt.run.loading import ahead
from dpopt.run.results import BudgetExceeded as BudgetExceeded  # what `train` raises is importable from here, too
from dpopt.run.results import ReplayError as ReplayError
from dpopt.run.results import TrainResult, make_result, replay_error
from dpopt.run.sharding import beside
from dpopt.run.training import make_train_step


def train(
    plan: Any,
    loss_fn: Callable[..., Any],
    params: Any,
    fetch_batch: Callable[[np.ndarray], Any] | Any,
    *,
    steps: int | None = None,
    budget: Any = None,
    checkpointer: Any = None,
    on_step: Callable[[int, Any], None] | None = None,
    eval_fn: Callable[[Any], Any] | None = None,
    eval_every: int | None = None,
    progress: bool | None = None,
    extra: Callable[[int, Any], dict[str, Any]] | None = None,
    place_batch: Callable[[Any], Any] | None = None,
    prefetch: int = 0,
    microbatch_size: int | None = None,
    engine: Engine = "auto",
    replay: bool = False,
    verify: bool = True,
    example_key: jax.Array | None = None,
) -> TrainResult:
    """Trains, resumes and stops within a budget.

    Each step draws its batch from the plan's sampler, is computed, is entered in the journal (on disk, with a
    checkpointer), and only then is given to ``on_step``, saved or returned.

    Each call is a segment of the run: its noise and its batches are made of the plan's key and seed and of fresh bits
    of the operating system, so that no two calls ever share a draw, whatever happened to the files in between. A run
    that died is resumed by the same call, with the same key or another: it continues from its newest checkpoint, and
    the steps since then stay paid for and are taken anew, on new batches with new noise, charged again.

    With ``replay=True`` the noise and the batches follow from the plan's key and seed alone: the same call gives the
    same parameters, and a run that died computes the steps since its checkpoint again, for free; each must come out bit
    for bit as the journal says. This is private only if (a) the key is used for this one run, (b) nobody puts back an
    older copy of the directory, continues from two copies of it, or cuts the journal, and (c) what the journal lost
    was released in no other way. Where bits cannot be the same (other devices or versions), fresh bits are drawn after
    all.

    Args:
        plan: a `dpopt.run.plan.Plan`.
        loss_fn: ``loss_fn(params, example) -> scalar``; or what `dpopt.federated.client_deltas` (for clients) or
            `dpopt.users.per_user_grads` (for users) returns.
        params: the initial parameters (not changed), or a `TrainState`: a new one (say, sharded), in whose place a
            checkpoint is restored where there is one, or the ``state`` of an earlier result.
        fetch_batch: the data: a pytree of arrays ``(num_examples, ...)``; a source of examples, with a length and
            integer indices, such as those of Grain, torch and Hugging Face; or a function from indices ``(B,)`` to the
            batch, leaves ``(B, ...)``, which must return the same data each time.
        steps: train until the parameters have had this many steps; None for the plan's.
        budget: a `dpopt.run.plan.Budget` that replaces the plan's, to continue after it is used up. It covers the whole
            ledger, not only what is to come.
        checkpointer: a `dpopt.run.checkpoint.Checkpointer`, or None to keep the books in memory.
        on_step: called with the number of steps done and the new parameters after every step, once that is charged. A
            call that was under way when a run was killed is made again, so each number is seen at least once.
        eval_fn: from parameters (their average, where the optimizer keeps one: `dpopt.average_params`) to numbers, such
            as ``{"accuracy": ...}`` on test data. They are in the result's ``history``. What it reads must be public,
            or held out from people whose privacy is not at stake: what it returns is not covered by epsilon.
        eval_every: evaluate whenever so many steps are done, and not only before the first step (an error then costs
            nothing) and after the last.
        progress: whether to show steps, epsilon spent, the last evaluation and the time left, by ``rich``; None does
            where it is installed and standard error is a terminal.
        extra: from the step's number and the parameters to keyword arguments of the optimizer's update, such as
            ``public_grads``.
        place_batch: puts (batch, mask) on devices, such as `dpopt.run.sharding.shard_batch`; None for JAX's default.
        prefetch: how many batches a thread may read ahead while steps are computed.
        microbatch_size, engine: see `dpopt.make_train_step`.
        verify: whether to compare the engine with plain gradients on the first batch, once a process (`dpopt.verify`).
        example_key: for a loss that draws random numbers (dropout), a key of their own for `dpopt.example_keys`; the
            loss then gets ``(example, key)``, with a key that follows from the step and the example. Losses that
            `dpopt.flax` makes of models with dropout get theirs without it, from the seed of this call.
        replay: True derives all noise and batches from key and seed, and repeats steps; see above for what it assumes.

    Returns:
        A `TrainResult`. If the budget ends before ``steps``, ``stopped`` is ``"budget"``.

    Raises:
        BudgetExceeded: if not one step can be taken; ReplayError: if a repeated step comes out differently;
        VerificationError: if the engine's sum is not what plain gradients give;
        JournalError, CheckpointError: if what is stored is damaged or belongs to another run; ValueError, TypeError:
            for a bad argument, such as a state whose steps are not in the plan's journal, or a key that another run of
            this process was started with; or if the processes of a run differ in key, seed, plan or parameters.

    *Privacy*: the parameters after every step, all of them together, cost what the ledger says.

    >>> import jax.numpy as jnp, numpy as np, optax, dpopt
    >>> plan = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=4, key=jax.random.key(0)).clip(1.0).noise(
    ...     2.0).then(optax.sgd(0.1)).build()
    >>> data = np.ones((100, 2), np.float32)
    >>> result = train(plan, lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), data)
    >>> result.ledger.steps, result.epsilon(delta=1e-5) == plan.epsilon(delta=1e-5)
    (4, True)
    """
    fetch_batch = rows_of(fetch_batch, plan.sampler.num_examples)
    watch = Watch(on_step, eval_fn, eval_every, progress)
    validate.non_negative_int(prefetch=prefetch)
    target = plan.steps if steps is None else steps
    validate.positive_int(steps=target)
    make_step = functools.partial(
        make_train_step, optimizer=plan.optimizer, microbatch_size=microbatch_size, engine=engine
    )
    make_step(loss_fn)  # whatever is wrong shows here
    compiled = _compiled(make_step, loss_fn)
    state = params if isinstance(params, TrainState) else TrainState(params, plan.optimizer.init(params))
    run = identity.run_identity(plan, state.params)
    program = _program.describe(
        plan.optimizer,
        loss=loss_fn,
        fetch_batch=fetch_batch,
        extra=extra,
        microbatch_size=microbatch_size,
        engine=engine,
    )
    limit = plan.budget if budget is None else budget.replacing(plan.budget)
    constants = beside(constants_of(loss_fn), state.params)
    _resume.agree_on_plan(plan, state, constants, run, program, [target, replay, repr(limit)])
    journal = plan.journal
    try:
        if checkpointer is not None:
            _resume.attach(journal, checkpointer, run)
        if state.update == 0 and state.segment is None:
            entropy.claim(state.opt_state, journal)
            restored = None if checkpointer is None else checkpointer.restore(state, journal, run)
            state = state if restored is None else restored.state
        check = None
        if verify:
            scale = verification.fixed_scale(plan.optimizer, state.params)
            if getattr(loss_fn, "makes_promise", False):
                own = getattr(loss_fn, "verify", None)  # of clients' runs there is one engine
                check = None if own is None else functools.partial(own, scale=scale)
            else:
                options = {"engine": engine, "microbatch_size": microbatch_size, "scale": scale}
                check = functools.partial(verification.verify_once, loss_fn, **options)
        return _Run(
            plan,
            compiled,
            constants,
            check,
            example_key,
            getattr(loss_fn, "takes_key", False),
            fetch_batch,
            prefetch,
            watch,
            extra,
            place_batch,
            checkpointer,
            run,
            program,
        ).to(target, state, limit, replay)
    finally:
        if checkpointer is not None:  # what was opened here; others may continue the run now
            checkpointer.settle()
            journal.close()


@dataclasses.dataclass(frozen=True)
class _Run:
    """One call of `train`, its arguments checked and its files open."""

    plan: Any
    step: Callable[..., Any]
    constants: Any
    check: Callable[[Any, Any], None] | None
    example_key: jax.Array | None
    takes_key: bool
    fetch_batch: Callable[..., Any]
    prefetch: int
    watch: Watch
    extra: Callable[..., Any] | None
    place_batch: Callable[..., Any] | None
    checkpointer: Any
    identity: dict[str, Any]
    program: dict[str, str]

    def to(self, target: int, state: TrainState, limit: Any, replay: bool) -> TrainResult:
        """Takes steps until the state has had ``target`` of them, or the limit is reached."""
        plan, journal = self.plan, self.plan.journal
        _resume.check_state(state, journal)
        place = _resume.find(plan, journal, state, replay)
        state, pending = place.state, place.pending
        paid = state.update + len(pending)
        origin = paid if place.reason is not None else _resume.segment_start(journal)
        allowed = steps_within(
            plan, limit, ledger=journal.ledger, start=paid, origin=origin, most=max(0, target - paid)
        )
        last = min(target, paid + allowed)
        if place.reason is not None and state.update < last:
            state = _resume.begin(plan, journal, place, replay, self.program)
            self._save(state)
        # The step reuses the buffers it is given, and the caller's must live on.
        state = state._replace(params=_copied(state.params), opt_state=_copied(state.opt_state))
        sampler, segment = plan.sampler, ""
        if state.segment is not None:
            sampler, segment = sampler.reseeded(state.segment.seed), state.segment.id
        spent = journal.ledger.steps - len(pending)  # number of the next step to be charged, or repeated
        scheme, privacy = plan.sampler.scheme, plan.optimizer.privacy
        if self.check is not None and state.update < last:
            self.check(state.params, self._placed(sampler, spent, self._read(sampler, spent))[0])

        spent_so_far = None if limit is None else lambda: limit.spent(journal.ledger)
        is_due = False
        numbers = range(spent, spent + max(0, last - state.update))
        read = ahead(lambda number: self._read(sampler, number), numbers, self.prefetch)
        with self.watch.during(state, last, spent_so_far):
            for number, rows in zip(numbers, read, strict=True):
                event = events.step_event(privacy, scheme, state.update, origin)
                state, found = self._next(state, self._placed(sampler, number, rows))
                if pending:
                    self._check(pending.pop(0), state.update, found)
                    # A call for any step before the last one in the journal had returned when the next was charged.
                    is_new = not pending
                else:
                    journal.append(Entry(event, found, state.update, segment))
                    _resume.meet(f"dpopt journal {len(journal)}")
                    is_new = True
                self.watch.after(state, is_new)
                is_due = is_due or (self.checkpointer is not None and state.update % self.checkpointer.every == 0)
                if is_due and not pending:
                    self._save(state)
                    is_due = False
        if not pending and segment:
            self._save(state)
        if self.checkpointer is not None:
            self.checkpointer.wait()
        return make_result(plan, journal, state, target, paid, allowed, limit, tuple(self.watch.history))

    def _next(self, state: TrainState, rows: Any) -> tuple[TrainState, str]:
        """The state after one more step, and its digest. Nothing of it may be released yet."""
        more = {} if self.extra is None else self.extra(state.update, state.params)
        params, opt_state, digest = self.step(state.params, state.opt_state, *rows, more, self.constants)
        return TrainState(params, opt_state, state.update + 1, state.segment), identity.hex_digest(digest)

    def _check(self, expected: Entry, step: int, found: str) -> None:
        if expected.digest != found:
            start = [entry for entry in self.plan.journal.entries if not entry.is_step][-1]
            changed = identity.differences(start.program or {}, self.program)
            raise replay_error(step, expected.digest, found, changed)

    def _read(self, sampler: Any, number: int) -> Any:
        """Indices, data and mask of the step that is charged under this number."""
        batch = sampler.batch(number)
        return batch.indices, read(self.fetch_batch, number, batch.indices), batch.mask

    def _placed(self, sampler: Any, number: int, read: Any) -> Any:
        """The batch and the mask, with keys where the loss takes them, on their devices."""
        indices, data, mask = read
        key = self.example_key
        if key is None and self.takes_key:
            key = seeded_key(sampler.seed)  # of this segment of the run, so that a replay draws the same
        if key is not None:
            data = data, example_keys(key, number, indices)
        rows = data, mask
        return rows if self.place_batch is None else self.place_batch(rows)

    def _save(self, state: TrainState) -> None:
        if self.checkpointer is not None:
            self.checkpointer.save(state, self.plan.journal, self.identity)


def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _compiled(make_step: Callable[..., Any], loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step_and_digest(params, opt_state, batch, mask, extra, constants):
        step = make_step(given(loss_fn, constants))
        params, opt_state, _ = step(params, opt_state, batch, mask, **extra)  # the metrics are not private: dropped
        return params, opt_state, identity.digest((params, opt_state))

    return jax.jit(step_and_digest, donate_argnums=(0, 1))
