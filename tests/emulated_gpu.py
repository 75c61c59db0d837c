"""A GPU as far as the engine knows one: its choices, and products of factors that are rounded as badly as allowed."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from dpopt.ghost import contacts, planner


def truncated(x: jax.Array) -> jax.Array:
    """The 11 leading bits of float32 numbers, as hardware that ignores the others reads them."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


def _products(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum("ta,tp->ap", truncated(left), truncated(right))


@contextlib.contextmanager
def emulated_gpu() -> Iterator[None]:
    """Kept gradients would not be added up from factors, and those of small programs would all be kept."""
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(contacts, "quick_products", _products),
        mock.patch.object(planner, "_KEPT_RATIO", 0.0),
    ):
        yield
