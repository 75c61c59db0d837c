"""A GPU as far as the engine knows one: its choices, and products of factors that are rounded as badly as allowed."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from dpopt.ghost import contacts, keeping, rows

_IGNORED = 0x1FFF  # the bits of float32 that TF32 does not have


def truncated(x: jax.Array) -> jax.Array:
    """The 11 leading bits of float32 numbers, as hardware that ignores the others reads them."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & ~jnp.uint32(_IGNORED), jnp.float32)


def enlarged(x: jax.Array) -> jax.Array:
    """The next number with 11 bits that is not smaller."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + jnp.uint32(_IGNORED)
    return jax.lax.bitcast_convert_type(bits & ~jnp.uint32(_IGNORED), jnp.float32)


_full = rows.einsum


def _einsum(spec: str, *operands: jax.Array, is_quick: bool = False) -> jax.Array:
    is_rounded = is_quick and all(x.dtype in (jnp.float32, jnp.bfloat16) for x in operands)
    return _full(spec, *map(truncated, operands)) if is_rounded else _full(spec, *operands)


def _quick_products(left: jax.Array, right: jax.Array) -> jax.Array:
    """A GPU may round a factor differently in every product: in sums up, say, and in norms down."""
    return _full("ta,tp->ap", enlarged(left), enlarged(right))


@contextlib.contextmanager
def emulated_gpu(keeps: bool = False) -> Iterator[None]:
    """``keeps``: whether gradients may be kept. Those of small programs all are, and are not added up from factors."""
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(rows, "einsum", _einsum),
        mock.patch.object(contacts, "quick_products", _quick_products),
        mock.patch.object(keeping, "_KEPT_RATIO", keeping._KEPT_RATIO if keeps else 0.0),
    ):
        yield
