"""Mixtures of experts: rows that are sorted by group, each group with a matrix of its own (``jax.lax.ragged_dot``)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpopt.ghost.canonical import traced


def dense_experts(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[jax.Array]] | None:
    """A product of each group of rows with a matrix of its own, as the jaxpr of one matrix product, and its constants.

    Every row stands in the columns of its group, with zeros in those of the others: as XLA computes it on most devices.
    ``vmap`` has no rule for ``ragged_dot`` where examples share the matrices. None for its other forms."""
    params = eqn.params
    numbers = params["ragged_dot_dimension_numbers"]
    ((of_rows, of_matrices), batched), rows = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    groups = numbers.rhs_group_dimensions
    is_plain = len(groups) == len(rows) == 1 and rows[0] not in of_rows and not batched[0]
    if not is_plain or len(eqn.invars) != 3 or params.get("out_sharding") is not None:
        return None

    def product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        ends, places = jnp.cumsum(sizes)[None], jnp.arange(x.shape[rows[0]])[:, None]
        is_in = (ends - sizes[None] <= places) & (places < ends)  # [rows, groups]
        shape = [1] * x.ndim + [len(sizes)]
        shape[rows[0]] = x.shape[rows[0]]
        apart = jnp.where(is_in.reshape(shape), x[..., None], jnp.zeros((), x.dtype))
        contracted = (*of_rows, x.ndim), (*of_matrices, groups[0])
        kinds = {name: params[name] for name in ("precision", "preferred_element_type")}
        return lax.dot_general(apart, matrices, (contracted, ((), ())), **kinds)

    return traced(product, eqn)
