"""Fresh entropy for every segment of a run, and a key for every run, so that no two results share noise.

A segment is what one call of `dpopt.run.loop.train` adds to a run. Its noise key and the seed of its batches derive
from the plan's own and from bits that the operating system draws for this segment alone. So two segments draw
independently, whatever happens to files in between (a restored backup, a copy, a truncated journal).
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dpopt.common.types import PyTree
from dpopt.correlated.noise import AddCorrelatedNoiseState
from dpopt.engines.batches import is_key
from dpopt.keys import secret_words
from dpopt.noise import AddGaussianNoiseState
from dpopt.run.journal import Journal
from dpopt.run.state import Segment

# Distinct from the numbers that noise folds in (0, 1, 2, ...) and from that of the sampler's seed (2^31 - 1).
_SEGMENT = 2**31 - 2
# The runs of this process by a salted hash of their keys, which does not reveal them.
_SALT = secrets.token_bytes(32)
_runs: dict[bytes, str] = {}


def draw() -> np.ndarray:
    """Random bits from the operating system, ``(10,)`` uint32; in all processes those of the first.

    *Privacy*: reads no data. The bits are as secret as the noise.

    >>> draw().shape, bool((draw() == draw()).all())
    ((10,), False)
    """
    return secret_words(10, shared=True)


def new_segment(seed: int, words: np.ndarray) -> Segment:
    """A segment with a public name, and a secret seed for its batches, from the sampler's seed so far and fresh bits.

    Of the ``words`` of `draw` two are for the name, four for the noise (`with_fresh_noise`), four for the seed.

    *Privacy*: subsampling amplifies only if each step draws its own sample. A step taken again on the sample of a
    released step would be one query with less noise, not two sampled ones.

    >>> new_segment(0, np.arange(10, dtype=np.uint32)).id
    '0000000000000001'
    """
    mixed = hashlib.sha256(f"dpopt batches {seed} ".encode() + words[6:10].tobytes()).digest()
    return Segment(f"{words[0]:08x}{words[1]:08x}", int.from_bytes(mixed[:16], "little"))


def noise_states(opt_state: PyTree) -> list[AddGaussianNoiseState | AddCorrelatedNoiseState]:
    """The parts of an optimizer's state that hold a noise key.

    *Privacy*: the result holds the keys.

    >>> from dpopt import add_gaussian_noise
    >>> len(noise_states((add_gaussian_noise(1.0, jax.random.key(0)).init(None),)))
    1
    """
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_is_noise) if _is_noise(x)]


def with_fresh_noise(opt_state: PyTree, words: np.ndarray, queries: int) -> PyTree:
    """The same optimizer state with new noise keys, derived from the present ones and from fresh bits.

    Args:
        opt_state: state of a private optimizer.
        words: from `draw`.
        queries: the least number of noise draws per step.

    Raises:
        ValueError: if the state holds fewer noise keys.

    *Privacy*: a step that is taken again with other rounding, or on another batch, must not reuse its noise: the
    difference of the two results would hold no noise at all.

    >>> from dpopt import add_gaussian_noise
    >>> state = add_gaussian_noise(1.0, jax.random.key(0)).init(None)
    >>> bool(with_fresh_noise(state, draw(), 1).key == state.key)
    False
    """
    found = noise_states(opt_state)
    if len(found) < queries:
        raise ValueError(
            f"the optimizer's state has {len(found)} noise keys for {queries} queries a step, so it cannot be given "
            "fresh noise. Draw noise with dpopt.add_gaussian_noise, or pass replay=True (and read what it assumes)."
        )

    def renew(x: Any) -> Any:
        if not _is_noise(x):
            return x
        key = jax.random.fold_in(x.key, _SEGMENT)
        for word in words[2:6]:
            key = jax.random.fold_in(key, jnp.uint32(word))
        return x.renewed(key)

    return jax.tree.map(renew, opt_state, is_leaf=_is_noise)


def _is_noise(x: Any) -> bool:
    return isinstance(x, AddGaussianNoiseState | AddCorrelatedNoiseState)


def claim(opt_state: PyTree, journal: Journal) -> None:
    """Records the noise keys that a run starts with in this process; the journal identifies the run.

    Raises:
        ValueError: if a run with another journal was started with one of the keys, or two queries have the same.

    *Privacy*: two runs under one key and ``replay=True`` would share their noise. In all other cases fresh entropy
    prevents that already; this check finds keys that were copied by mistake.

    >>> from dpopt import add_gaussian_noise
    >>> state = add_gaussian_noise(1.0, jax.random.key(12345)).init(None)
    >>> claim(state, Journal())
    >>> claim(state, Journal())
    Traceback (most recent call last):
    ...
    ValueError: key: this process has trained another run with the same key. Give each run a key of its own \
(dpopt.secure_key(), or jax.random.split of one key), or continue the first run: with its plan, or its checkpointer.
    """
    keys = [_bits(state.key) for state in noise_states(opt_state)]
    if len({*keys}) < len(keys):
        raise ValueError(
            "two queries of this optimizer have the same noise key, so both draw the same noise, and a combination of "
            "their results holds none. Give each a key of its own (jax.random.split)."
        )
    for key in keys:
        fingerprint = hashlib.blake2b(key, key=_SALT).digest()
        if _runs.setdefault(fingerprint, journal.run) != journal.run:
            raise ValueError(
                "key: this process has trained another run with the same key. Give each run a key of its own "
                "(dpopt.secure_key(), or jax.random.split of one key), or continue the first run: with its plan, or "
                "its checkpointer."
            )


def check_apart(opt_state: PyTree, example_key: jax.Array | None) -> None:
    """Refuses a key for examples that is a noise key.

    Raises:
        ValueError: if it is.

    *Privacy*: noise and the draws of examples would come from one stream.

    >>> from dpopt import add_gaussian_noise
    >>> check_apart(add_gaussian_noise(1.0, jax.random.key(0)).init(None), jax.random.key(1))
    """
    if example_key is not None and _bits(example_key) in {_bits(state.key) for state in noise_states(opt_state)}:
        raise ValueError("example_key is the key of the noise. Give each a key of its own (jax.random.split).")


def release(journal: Journal) -> None:
    """Forgets the keys of a run that never took a step, so that another run may start with them.

    *Privacy*: such a run has released nothing; one that was charged for a step keeps its keys.

    >>> from dpopt import add_gaussian_noise
    >>> state, first = add_gaussian_noise(1.0, jax.random.key(54321)).init(None), Journal()
    >>> claim(state, first)
    >>> release(first)
    >>> claim(state, Journal())
    """
    if not journal.ledger.steps:
        for fingerprint in [f for f, run in _runs.items() if run == journal.run]:
            del _runs[fingerprint]


def agree(facts: Mapping[str, Any]) -> None:
    """Compares hashes of facts that must be the same in all processes of a run: keys, or values that JSON can hold.

    Every process gives them in the same order. Does nothing in a single process.

    Raises:
        ValueError: in every process, with the names of what differs.

    *Privacy*: processes with different keys would each add different noise to their copy of the parameters, and with
    different seeds an example could be in a batch twice.

    >>> agree({"key": jax.random.key(0), "steps": 3})
    """
    if jax.process_count() == 1:
        return
    texts = [json.dumps(x).encode() if isinstance(x, str | int | dict | list) else _bits(x) for x in facts.values()]
    hashes = [hashlib.sha256(text) for text in texts]
    mine = np.stack([np.frombuffer(h.digest(), np.uint8) for h in hashes])
    everywhere = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, *mine.shape)
    differing = [name for name, rows in zip(facts, np.moveaxis(everywhere, 1, 0), strict=True) if np.ptp(rows, 0).any()]
    if differing:
        raise ValueError(
            f"the processes of this run differ in: {', '.join(differing)}. All must train the same plan on the same "
            "parameters and data. To share a random key, use dpopt.secure_key(shared=True)."
        )


def in_any_process(flag: bool) -> bool:
    """Whether something holds in any process of a run; they all have to ask.

    *Privacy*: reads no data.

    >>> in_any_process(False)
    False
    """
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array([int(flag)]))))  # gloo cannot gather booleans


def _bits(key: jax.Array | np.ndarray) -> bytes:
    raw = jax.random.key_data(key) if is_key(key) else key
    if isinstance(raw, jax.Array) and not (raw.is_fully_addressable or raw.is_fully_replicated):
        raw = multihost_utils.process_allgather(raw, tiled=True)
    return str(key.dtype).encode() + np.asarray(raw).tobytes()
