"""Runs a program and compares it with plain per-example gradients and float64 arithmetic."""

from __future__ import annotations

import contextlib
import importlib.metadata
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import dpopt
from dpopt import ghost
from dpopt.engines import rounding, sums
from dpopt.ghost import large_sums, planner
from dpopt.ghost.methods import AT_CONTACT, Method, Shared, shared_methods
from dpopt.ghost.methods.base import Cost
from dpopt.ghost.values import Contact

from .program import BATCH, Program, draw

# What float32 may add to one example's influence, as documented (SECURITY.md).
SLACK = 2.0**-12
# A gradient of ordinary numbers that is smaller than this is what rounding left of zero: any other is as good.
_NOTHING = 1e-5
# Of coefficients below this the products with a cotangent may be too small for float32 and lose their digits.
_SMALL = 1e-30
# The two sums that are compared are rounded, each to its own size.
ROUNDING = 2.0**-20
# Small programs are compiled for the check's sake, not for speed.
_FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_FULL_COMPILE = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if importlib.metadata.version("jaxlib").split(".")[:2] < ["0", "12"]:  # which know older emitters, that compile faster
    _FAST_COMPILE["xla_cpu_use_fusion_emitters"], _FULL_COMPILE["xla_cpu_use_fusion_emitters"] = False, True


@dataclass
class Outcome:
    """What became of one program."""

    seed: int
    features: list[str]
    kind: str  # ran, fell_back (to the plain engine), refused, or invalid (plain JAX cannot run it either)
    worst: float = 0.0  # the largest influence, in sensitivities
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(seed: int, fast: bool = True, compare: bool = True) -> Outcome:
    """Checks the program of a seed.

    Args:
        seed: of the program.
        fast: whether to skip most optimisations.
        compare: whether to compare contributions with plain gradients as well, which takes a fifth longer.
    """
    started, program = time.process_time(), draw(seed)
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        with _conditions(program):  # also while an eager program runs again
            outcome = _checked(program, fast, compare)
    if outcome.kind == "ran" and any("Falling back" in str(w.message) for w in caught):
        outcome.kind = "fell_back"
    outcome.seconds = time.process_time() - started
    return outcome


# One program in so many is compiled with all optimisations; takes two passes, if the ghost engine computes it; adds up
# as a batch does that is many times as large, and lies on several devices. In half of them norm methods are drawn.
OPTIMIZED, TWO_PASSES, LARGE, METHODS = 10, 4, 3, 14


@contextlib.contextmanager
def _two_passes() -> Iterator[None]:
    """What memory is for: programs of this size never need it. One, where parameters are clipped by themselves."""
    real = ghost.choose

    def chosen(plan, *args, **options):
        way = real(plan, *args, **options)
        if way.plan is None:
            return way
        single = ghost.single_parameters(way.plan, options["limits"], options["layer_axes"])
        return ghost.Way(way.plan.streaming(single), way.parts)

    ghost.choose = chosen
    try:
        yield
    finally:
        ghost.choose = real


@contextlib.contextmanager
def _as_if_large(rows: int, devices: int, in_floats: bool) -> Iterator[None]:
    """With blocks of a row or two a few examples are several blocks, groups of blocks, and shares of devices.

    Floats add up the groups (their sums of so few rows are as good), or pairs of floats do. And a parameter of a few
    numbers is as large as one that is added up on its own."""
    real = rounding.ROWS, sums._PART, jax.device_count, rounding.floats_suffice
    bytes_of_large = large_sums._LARGE_BYTES, large_sums._PART_BYTES
    rounding.ROWS, sums._PART, jax.device_count = rows, 3, lambda: devices
    large_sums._LARGE_BYTES, large_sums._PART_BYTES = 8, 8
    if in_floats:
        rounding.floats_suffice = lambda rows, *counts: True
    try:
        yield
    finally:
        rounding.ROWS, sums._PART, jax.device_count, rounding.floats_suffice = real
        large_sums._LARGE_BYTES, large_sums._PART_BYTES = bytes_of_large


@contextlib.contextmanager
def _drawn_methods(seed: int) -> Iterator[None]:
    """Norms by any method that is exact, instead of the cheapest one for parameters of a few numbers."""

    def drawn(cost: Cost, method: Method, contacts: Sequence[Contact], scaled: bool) -> Cost:
        # Contacts are told apart by their indices, so that every plan of a program is the same.
        of = [method.name, [c.index for c in contacts], scaled]
        return cost._replace(operations=cost.operations * 10.0 ** random.Random(f"{seed} {of}").uniform(-4, 4))

    def at_contact(real: Callable[..., Cost]) -> Callable[..., Cost]:
        return lambda method, contact, scaled: drawn(real(method, contact, scaled), method, [contact], scaled)

    def shared(contacts: Sequence[Contact], scaled: bool) -> dict[Shared, Cost]:
        return {m: drawn(cost, m, contacts, scaled) for m, cost in shared_methods(contacts, scaled).items()}

    with contextlib.ExitStack() as stack:
        for own in {type(m) for m in AT_CONTACT}:
            stack.enter_context(mock.patch.object(own, "cost", at_contact(own.cost)))
        stack.enter_context(mock.patch.object(planner, "shared_methods", shared))
        yield


@contextlib.contextmanager
def _conditions(program: Program) -> Iterator[None]:
    seed = program.seed
    with contextlib.ExitStack() as stack:
        if program.has_float64:
            stack.enter_context(jax.enable_x64(True))
        if seed % TWO_PASSES == 3:
            stack.enter_context(_two_passes())
        if seed % METHODS >= METHODS // 2:
            stack.enter_context(_drawn_methods(seed))
        if seed % LARGE == 1:
            drawn = seed // LARGE
            stack.enter_context(_as_if_large(1 + drawn % 2, [1, 2, BATCH][drawn % 3], drawn % 4 < 2))
        yield


def several(seeds: range, compared: int = 1) -> list[Outcome]:
    """The outcomes of some seeds, one after the other; one in ``compared`` is also compared with plain gradients."""
    outcomes = [run(seed, fast=seed % OPTIMIZED > 0, compare=seed % compared == 0) for seed in seeds]
    jax.clear_caches()
    return outcomes


def _checked(program: Program, fast: bool, compare: bool) -> Outcome:
    outcome = Outcome(program.seed, program.features, "ran")
    options = _FAST_COMPILE if fast else _FULL_COMPILE

    def clipped(params, batch, mask, scale, offset):
        promise = dpopt.per_example_grads(
            program.loss, engine=program.engine, microbatch_size=program.microbatch_size
        )(params, batch, mask=mask)  # fmt: skip
        promise = promise if scale is None else promise.scale(scale)
        promise = promise if offset is None else promise.shift(offset)
        return promise.clipped_sum(program.clip).sum

    def plain(params, batch):
        if "experts" in program.features:  # `vmap` has no rule for `ragged_dot`
            return lax.map(lambda row: jax.grad(program.loss)(params, row), batch)
        return jax.vmap(jax.grad(program.loss), (None, 0))(params, batch)

    if not program.is_jitted:  # only the clipped sum is to run eagerly
        plain = jax.jit(plain)

    def both(params, batch, mask, scale, offset):
        return clipped(params, batch, mask, scale, offset), plain(params, batch) if compare else None

    everyone = np.ones(BATCH, bool)
    inputs = program.params, program.batches[0], everyone, program.scale, program.offset
    try:
        function = jax.jit(both).lower(*inputs).compile(compiler_options=options) if program.is_jitted else both
        function(*inputs)
    except Exception as error:
        try:
            plain(*jax.tree.map(jnp.asarray, inputs[:2]))
        except Exception:
            outcome.kind = "invalid"
            return outcome
        outcome.kind = "refused"
        outcome.failures.append(f"raises {type(error).__name__}: {str(error)[:200]}")
        return outcome
    for batch, tame in zip(program.batches, program.tame, strict=True):
        _compare(program, outcome, function, batch, tame)
    return outcome


def _compare(program: Program, outcome: Outcome, function: Any, batch: Any, tame: np.ndarray) -> None:
    """One batch against itself with a row left out, for every row; for one, where each call compiles anew."""
    sensitivity = float(program.clip.sensitivity)

    def total(mask):
        found, grads = function(program.params, batch, mask, program.scale, program.offset)
        return _flat(found), grads

    whole, grads = total(np.ones(BATCH, bool))
    if not np.isfinite(whole).all():
        outcome.failures.append(f"the sum is not finite: {whole}")
        return
    expected = None if grads is None else _contributions(program, grads)
    exact = None if grads is None else _are_exact(grads)
    for row in range(BATCH) if program.is_jitted else [program.seed // 2 % BATCH]:
        without, _ = total(np.arange(BATCH) != row)
        moved = np.linalg.norm(whole - without)
        size = max(np.linalg.norm(whole), np.linalg.norm(without))
        excess = moved - ROUNDING * size
        outcome.worst = max(outcome.worst, excess / sensitivity)
        if not excess <= sensitivity * (1 + SLACK):
            outcome.failures.append(f"row {row} moves the sum by {moved / sensitivity:.6g} of its sensitivity")
        if expected is not None and program.is_precise and tame.all() and exact[row]:
            error = np.linalg.norm(whole - without - expected[row])
            # Where large terms cancel within an example, two programs of the same arithmetic differ by their rounding.
            floor = 1e-4 * sensitivity if "cancelling" in program.features else 0
            is_off = error > 1e-2 * np.linalg.norm(expected[row]) + 1e-5 * np.sqrt(np.nansum(expected**2)) + floor
            if is_off and not _is_rounded_away(program, function, batch, grads)[row]:
                outcome.failures.append(f"row {row} contributes something else: off by {error / sensitivity:.3g} C")


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(tree)])


def _are_exact(grads: Any) -> np.ndarray:
    """``[B]``: of which rows no parameter's gradient is what rounding left of zero."""
    sizes = [np.linalg.norm(np.asarray(g, np.float64).reshape(BATCH, -1), axis=1) for g in grads.values()]
    return np.all([(s == 0) | (s > _NOTHING) for s in sizes], axis=0)


def _is_rounded_away(program: Program, function: Any, batch: Any, grads: Any) -> np.ndarray:
    """``[B]``: of which rows plain gradients are others at parameters that differ by a rounding each.

    Found at seed 87957: a gradient of 1.3e-5 in float64, left of terms of 10, is one of 5e-6 in float32."""
    rng = np.random.default_rng(0)

    def nearby(x: np.ndarray) -> np.ndarray:
        return (x * (1 + jnp.finfo(x.dtype).eps * rng.choice([-1, 1], x.shape))).astype(x.dtype)

    params = jax.tree.map(lambda x: nearby(np.asarray(x)), program.params)
    _, others = function(params, batch, np.ones(BATCH, bool), program.scale, program.offset)
    found, other = (
        np.concatenate([np.asarray(g, np.float64).reshape(BATCH, -1) for g in tree.values()], axis=1)
        for tree in (grads, others)
    )
    return np.linalg.norm(found - other, axis=1) > 1e-3 * np.linalg.norm(found, axis=1)


def _contributions(program: Program, grads: Any) -> np.ndarray:
    """``c_i (S g_i + o)`` in float64, ``[B, d]``; NaN where float32 cannot tell it precisely."""
    mapped = {k: np.asarray(g, np.float64).reshape(BATCH, *program.params[k].shape) for k, g in grads.items()}
    if program.scale is not None:
        mapped = {k: g * np.float64(program.scale[k]) for k, g in mapped.items()}
    if program.offset is not None:
        mapped = {k: g + np.float64(program.offset[k]) for k, g in mapped.items()}
    mapped = {k: g.reshape(BATCH, -1) for k, g in mapped.items()}
    clip, norms = program.clip, {k: np.linalg.norm(g, axis=1) for k, g in mapped.items()}
    together = np.sqrt(sum(n**2 for n in norms.values()))
    if isinstance(clip, dpopt.GroupClip):
        c = {k: np.where(np.isfinite(n), _shrink(clip.l2_clip_norms[k], n), 0) for k, n in norms.items()}
        mapped = {k: np.where(np.isfinite(norms[k])[:, None], g, 0) for k, g in mapped.items()}
        together = np.zeros(BATCH)
    elif isinstance(clip, dpopt.clipping.NormalizedClip):
        c = dict.fromkeys(norms, clip.l2_clip_norm / (together + clip.gamma))
    else:
        c = dict.fromkeys(norms, _shrink(clip.l2_clip_norm, together))
    rows = np.concatenate([c[k][:, None] * mapped[k] for k in sorted(mapped)], axis=1)
    lossy = np.any([(c[k] > 0) & (c[k] < _SMALL) for k in mapped], axis=0)
    rows = np.where(np.isfinite(together)[:, None], rows, 0)
    return np.where(lossy[:, None], np.nan, rows)


def _shrink(bound: float, norms: np.ndarray) -> np.ndarray:
    shrink = np.minimum(1, bound / np.maximum(norms, 1e-300))
    return np.where(shrink < np.finfo(np.float32).tiny, 0, shrink)  # what float32 cannot hold contributes nothing
