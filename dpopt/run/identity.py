"""Identities that are compared when a run is resumed: of the run, of the machine, and of the state."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpopt import events
from dpopt.common.types import PyTree
from dpopt.correlated.noise import AddCorrelatedNoiseState
from dpopt.correlated.strategy import Strategy
from dpopt.engines.batches import is_key
from dpopt.noise import AddGaussianNoiseState
from dpopt.run.state import Segment as Segment  # version 0.1 had both here
from dpopt.run.state import TrainState as TrainState

if TYPE_CHECKING:
    from dpopt.run.plan import Plan


def run_identity(plan: Plan, params: PyTree) -> dict[str, Any]:
    """What must not change between two parts of one run: the mechanism, the sampling, the data set's size, the model.

    The number of steps and the budget may change, except for what the budget counts as spent earlier. The stages after
    the noise are part of the chain and are named, but their numbers (a learning rate) may change.

    Of ``params`` only names, shapes and dtypes are read.

    *Privacy*: public constants. Nothing here derives from the key or the seed.

    >>> import optax, dpopt
    >>> plan = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=2, key=jax.random.key(0)).clip(1.0).noise(
    ...     2.0).then(optax.sgd(0.1)).build()
    >>> round(run_identity(plan, jnp.zeros(2))["event"]["event"]["noise_multiplier"], 2)
    2.0
    """
    privacy, sampler = plan.optimizer.privacy, plan.sampler
    scheme = sampler.scheme
    # A schedule is identified by its cost at many steps, near and far.
    steps = [0] if not privacy.varies else [*range(32), *(2**n for n in range(6, 20))]
    costs = [events.to_json(events.step_event(privacy, scheme, t)) for t in steps]
    core, *post = plan.optimizer.stages
    opt_state = jax.eval_shape(plan.optimizer.init, params)
    more = {"correlation": privacy.correlation, "coins": getattr(sampler, "coins", None)}  # coins: of an audit
    earlier = None if plan.budget is None else plan.budget.earlier
    more["earlier"] = None if earlier is None else events.to_json(earlier)
    return {
        "event": costs[0],
        "events": hashlib.sha256(json.dumps(costs).encode()).hexdigest()[:16],
        "chain": [_described(s) for s in (*(core.stages or (core,)), *post)],
        "sampling": repr(scheme),
        "num_examples": sampler.num_examples,
        "unit": privacy.unit,
        "params": _shapes(params),
        "state": _shapes(opt_state),
    } | {name: value for name, value in more.items() if value is not None}


def _shapes(tree: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or ".": f"{jnp.result_type(x)}{list(jnp.shape(x))}" for path, x in leaves}


def _described(transformation: Any) -> str:
    stage = getattr(transformation, "stage", None)
    if stage is None:
        return getattr(transformation.update, "__qualname__", type(transformation).__name__).split(".")[0]
    values = {f.name: getattr(stage, f.name) for f in dataclasses.fields(stage)}
    fields = {name: _value(value) for name, value in values.items() if value is not None}
    return f"{stage.name}({', '.join(f'{k}={v}' for k, v in fields.items())})"


def _value(value: Any) -> str:
    if callable(value) and not dataclasses.is_dataclass(value):
        return "schedule"
    if isinstance(value, Strategy):
        return value.label()
    if dataclasses.is_dataclass(value):
        fields = ", ".join(f"{f.name}={_value(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({fields})"
    leaves = jax.tree.leaves(value)
    if any(np.ndim(x) for x in leaves):
        content = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()[:16]
        return f"arrays of {sum(np.size(x) for x in leaves)} numbers, sha256 {content}"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        value = value.item()
    return repr(value)


def environment(state: PyTree) -> dict[str, Any]:
    """What may change the last bits of a step: versions, devices, compiler flags, and the sharding of the state.

    It alone decides whether a step may be repeated with the same noise, and it does not depend on data.

    *Privacy*: reads no data.

    >>> environment(jnp.zeros(2))["devices"]
    1
    """
    leaves = jax.tree.leaves(state)
    devices = max((len(x.sharding.device_set) for x in leaves if isinstance(x, jax.Array)), default=1)
    shardings = sorted({str(getattr(getattr(x, "sharding", None), "spec", "single")) for x in leaves})
    device = jax.devices()[0]
    config = cast(Any, jax.config)  # JAX's types do not include its flags
    return {
        **{name: metadata.version(name) for name in ("dpopt", "jax", "jaxlib", "optax", "numpy")},
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
        "cpu": _cpu(),
        "device": f"{device.platform} {device.device_kind}",
        "devices": devices,
        "processes": jax.process_count(),
        "shardings": shardings,
        "flags": os.environ.get("XLA_FLAGS", ""),
        "x64": bool(config.jax_enable_x64),
        "matmul_precision": str(config.jax_default_matmul_precision),
        "prng": [str(config.jax_default_prng_impl), bool(config.jax_threefry_partitionable)],
    }


def _cpu() -> str:
    """A hash of what may affect the compiler's choice of instructions, if the system provides it."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.strip() for line in file if line.startswith(("model name", "flags"))]
    except OSError:
        return platform.processor()
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()[:16]


def digest(state: PyTree) -> jax.Array:
    """A checksum of a state's bits, ``(2,)`` uint32, independent of how the state is laid out over devices.

    Sums of integers modulo 2^32 do not depend on their order. The checksum detects accidental differences (one changed
    bit always changes it), but is not a cryptographic hash. It is linear and would reveal keys, so keys are left out.

    *Privacy*: post-processing of the state; the noise key is not read.

    >>> a, b = digest(jnp.array([1.0, 2.0])), digest(jnp.array([2.0, 1.0]))
    >>> bool(jnp.any(a != b))
    True
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(_without_keys(state))):
        words = _words(jnp.asarray(leaf))
        # Odd weights, different at each place: a change at one place cannot vanish, and swapped values are detected.
        place = jax.lax.iota(jnp.uint32, words.size).reshape(words.shape)
        for i, multiplier in enumerate((0x9E3779B1, 0x85EBCA77)):
            mixed = (place + jnp.uint32(number * 0x27D4EB2F & 0xFFFFFFFF)) * jnp.uint32(multiplier)
            mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
            weight = (mixed ^ (mixed >> 12)) | jnp.uint32(1)
            total = total.at[i].add(jnp.sum(words * weight, dtype=jnp.uint32))
    return total


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32, in its own shape (with an additional axis for 64-bit types)."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = x.dtype.itemsize * 8
    if bits == 64:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer) and bits < 8:
        return x.astype(jnp.int32).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]).astype(jnp.uint32)


def _is_noise(x: Any) -> bool:
    return isinstance(x, AddGaussianNoiseState | AddCorrelatedNoiseState)


def _without_keys(state: PyTree) -> list[Any]:
    state = jax.tree.map(lambda x: x.without_segment() if _is_noise(x) else x, state, is_leaf=_is_noise)
    return [x for x in jax.tree.leaves(state) if not is_key(x)]


def hex_digest(value: ArrayLike) -> str:
    """A digest as text.

    *Privacy*: post-processing.

    >>> hex_digest(np.array([1, 255], np.uint32))
    '00000001000000ff'
    """
    return "".join(f"{int(word):08x}" for word in np.asarray(value))


_jitted_digest = jax.jit(digest)


def state_digest(state: TrainState) -> str:
    """The digest of a run's state as text, equal to that computed by its training step.

    *Privacy*: see `digest`.

    >>> len(state_digest(TrainState(jnp.zeros(2), ())))
    16
    """
    return hex_digest(_jitted_digest((state.params, state.opt_state)))


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The entries in which two descriptions differ, as text.

    *Privacy*: reads descriptions only.

    >>> differences({"devices": 8}, {"devices": 4})
    'devices: 8, now 4'
    """
    return "; ".join(f"{n}: {a.get(n)}, now {b.get(n)}" for n in sorted({*a, *b}) if a.get(n) != b.get(n))
