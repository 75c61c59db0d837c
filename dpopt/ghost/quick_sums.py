"""Weighted sums as fast as a GPU multiplies by default: in TF32, which rounds each factor to 11 bits.

A GPU multiplies float32 numbers in TF32 unless it is asked for more, and more slowly if it is. Norms bound
the sensitivity, so they are computed in full float32 precision. But a weighted sum of long factors is most of what the
clipping costs, so where the loss itself leaves the precision to the GPU (`Plan.quick`) the sum uses TF32.

What one example adds is then not ``c sum_t l_t (x) r_t``, whose norm is at most C, since the entries of the factors are
rounded. Of ``c r_t`` at most 2^-11 is lost, which `rows.tf32` rounds to nearest, and of ``l_t`` at most 2^-10, which
the GPU rounds as it likes (nothing if it is bfloat16). So the example adds up to ``u c sum_t |l_t| |r_t|`` more, with u
for `ROUNDING`. If terms cancel that is no small part of its norm. So it is counted before c is computed:

    c (|sum_t l_t (x) r_t| + u sum_t |l_t| |r_t|) <= C.

For T terms in random directions that raises the norm by a share of ``u sqrt(T)``: for 64 by a hundredth, in bfloat16 by
a third of that. An example whose sum of norms overflows when squared adds nothing.

The processors that multiply TF32 also add up less precisely than `engines.sums.ROUNDING` assumes: they round towards
zero, and align terms before they add them (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"). If that is
four times the error, 86 rows lose 1.3e-3 C more, for which norms are raised by 2^-9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from dpopt.ghost.plan import Plan
from dpopt.ghost.values import Contact

# (1 + 2^-10) (1 + 2^-11) - 1, and a little for the rounding of the sum of norms itself.
ROUNDING = 1.01 * 1.5 * 2.0**-10
# The same where TF32 holds the factor that is not weighted: 2^-11, and a little.
ROUNDING_OF_ONE = 1.01 * 2.0**-11
ADDING = 2.0**-9


def raised(contact: Contact, norm: jax.Array, terms: jax.Array) -> jax.Array:
    """An upper bound on the norm of what an example adds to the weighted sum, over its coefficient.

    Args:
        norm: of its gradient.
        terms: the sum of the norms of the gradient's terms."""
    is_exact = contact.tap_dtype == contact.input_dtype == jnp.bfloat16
    return (1 + ADDING) * norm + (ROUNDING_OF_ONE if is_exact else ROUNDING) * terms.astype(norm.dtype)


def all_raised(plan: Plan, norms: Sequence[jax.Array], terms: Mapping[int, jax.Array]) -> list[jax.Array]:
    """`raised` for the parameters of `Plan.quick`, whose ``terms`` are given; the other norms unchanged."""
    return [raised(plan.leaves[i].contacts[0], n, terms[i]) if i in terms else n for i, n in enumerate(norms)]
