"""Type aliases shared by many signatures."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.typing import ArrayLike

PyTree: TypeAlias = Any  # dicts, tuples, lists and registered classes, with arrays as leaves
Batch: TypeAlias = PyTree  # leaves (B, ...)
Example: TypeAlias = PyTree  # one row of a batch: the same tree without the leading axis
LossFn: TypeAlias = Callable[..., Any]  # loss_fn(params, example) -> scalar, or (scalar, auxiliary output)
ScalarOrSchedule: TypeAlias = float | jax.Array | Callable[[Any], ArrayLike]  # a number, or step -> number
