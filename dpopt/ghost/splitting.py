"""How many equal parts a batch is split into, to be processed one after the other in the same memory.

On CPUs, touching memory for the first time costs more than most computations in it. With A bytes of activations, k
parts touch A / k, but they read the parameters, add up their sums (P bytes in all) and start their operations k times,
and have one sum more. A / k + (k + 1) P is smallest at k = sqrt(A / P), on each device for its share of a batch, of
which every part has an equal share in turn; a whole batch has A.
"""

from __future__ import annotations

import math
import os

import jax

from dpopt.ghost.forward import forward_work
from dpopt.ghost.program import Scope

# What is used together should fit a CPU's cache: a part of a batch, or a buffer of formed gradients that are not kept.
CACHED_BYTES = 1 << 22
# A batch whose forward pass computes less is not split: what it keeps, a half or so, fits the caches, and the allocator
# reuses the memory.
_WHOLE_BYTES = 48_000_000
# Bytes moved in the time that the operations of one equation take to start, and to become as fast as on a whole batch.
# (Measured on networks that compute 36 to 140 MB: with fewer, they took up to 1.45 times as long in more parts.)
_START_BYTES = 22_000
_OF_STEP = 1 / 8  # of it for the step of a loop, whose operations are small in any case


def parts(body: Scope, weight_bytes: int, batch_size: int) -> int:
    """The number of parts that should be fastest.

    Each has an example for every processor, so that none is idle. On other backends than CPUs, which have many, the
    batch stays whole."""
    if jax.default_backend() != "cpu" or batch_size % jax.device_count():
        return 1
    own = batch_size // jax.device_count()
    activations = own * forward_work(body)[0]
    if activations < _WHOLE_BYTES:
        return 1
    again = weight_bytes + start_bytes(body)
    most = own * jax.device_count() / _processors()
    number = largest_divisor(own, min(math.sqrt(activations / again), activations / CACHED_BYTES, most))
    return number if activations / number + (number + 1) * again < activations else 1


def start_bytes(body: Scope) -> float:
    """Bytes moved in the time that a CPU takes to start the operations of the forward pass."""
    return _START_BYTES * forward_work(body, _OF_STEP)[1]


def largest_divisor(size: int, most: float) -> int:
    """The largest divisor of ``size`` up to ``most``, at least one."""
    return max(n for n in range(1, size + 1) if size % n == 0 and n <= max(1, most))


def _processors() -> int:
    """How many processors this process may use; 1 for several processes, which have to plan alike on any machine."""
    if jax.process_count() > 1:
        return 1
    available = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(available(0)) if available else os.cpu_count() or 1
