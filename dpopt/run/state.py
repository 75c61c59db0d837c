"""The state of a run: everything that it needs to continue."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from dpopt.common.types import PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Segment:
    """The stretch of a run that a state belongs to: steps under one noise key and one seed of the sampler.

    *Privacy*: the seed reveals which examples each batch held, and is as private as the data; the name is public.

    >>> Segment("00c0ffee", seed=7)
    Segment(id='00c0ffee')
    """

    id: str  # its name in the journal
    seed: int = dataclasses.field(repr=False)


class TrainState(NamedTuple):
    """Everything that a run needs to continue.

    *Privacy*: `params` are covered by the ledger. `opt_state` holds the noise key: whoever has it can subtract the
    noise, so it is as private as the data. Publish the parameters alone.

    >>> TrainState(params=np.zeros(2), opt_state=()).update
    0
    """

    params: PyTree
    opt_state: PyTree
    update: int = 0  # steps in the history of this state
    segment: Segment | None = None  # None before the first step

    def __repr__(self) -> str:
        arrays = jax.tree.leaves(self.params)
        shown = f"<{sum(map(np.size, arrays))} numbers in {len(arrays)} arrays>"
        return f"TrainState(params={shown}, opt_state=<holds the noise key>, update={self.update}, {self.segment})"
