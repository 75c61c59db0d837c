"""Norms and weighted sums as fast as a GPU multiplies by default: in TF32, which rounds each factor to 11 bits.

A GPU multiplies float32 numbers in TF32 unless it is asked for more, and more slowly if it is. Products of long factors
are most of what the clipping costs, so where the loss itself leaves the precision to the GPU (`Plan.quick`) they are in
TF32. Norms bound the sensitivity, so nothing may be lost between norm and sum:

* What is recorded at these contacts, l_t and r_t, is rounded to TF32 first (the loss multiplies it in TF32 anyway). The
  products of a norm are then exact, however the GPU rounds, and the norm is that of what is added up.
* The sum multiplies ``c r_t``, which `rows.tf32` rounds to nearest again: at most 2^-11 of it is lost. So the example
  adds up to ``u c sum_t |l_t| |r_t|`` more, with u for `ROUNDING`. If terms cancel that is no small part of its norm,
  so it is counted before c is computed:

    c (|sum_t l_t (x) r_t| + u sum_t |l_t| |r_t|) <= C.

For T terms in random directions that raises the norm by a share of ``u sqrt(T)``: for 64 by 1 in 250. An example whose
sum of norms overflows when squared adds nothing.

The processors that multiply TF32 also add up less precisely than float32 does: they round towards zero, and align terms
before they add them (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"). If that is four times the error
(`squares.QUICK_ROUNDINGS` for the products of a norm), 86 rows lose 1.3e-3 C more than `engines.rounding.ROUNDING`, for
which norms are raised by 2^-9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

ROUNDING = 1.01 * 2.0**-11  # a little for the rounding of the sum of norms itself
ADDING = 2.0**-9


def raised(norm: jax.Array, terms: jax.Array) -> jax.Array:
    """An upper bound on the norm of what an example adds to the weighted sum, over its coefficient.

    Args:
        norm: of its gradient.
        terms: the sum of the norms of the gradient's terms."""
    return (1 + ADDING) * norm + ROUNDING * terms.astype(norm.dtype)


def all_raised(norms: Sequence[jax.Array], terms: Mapping[int, jax.Array]) -> list[jax.Array]:
    """`raised` for the parameters whose ``terms`` are given, those of `Plan.quick`; the other norms unchanged."""
    return [raised(n, terms[i]) if i in terms else n for i, n in enumerate(norms)]
