"""Standard normals from random words: Box and Muller's transform (1958), with bits enough for tails and low digits.

A normal is a radius times the cosine of an angle. The radius comes from 62 bits, so tail probabilities are right to
1e-6 of themselves up to 7 standard deviations and to 1e-4 at 8, are short by a sixth at 9, and end at 9.35. (A uniform
of 23 bits ends at 5.42 in an atom of 2^-23.)

In float32 a fourth word is added as a uniform of width 2^-7, whose variance is taken out of the rest: within that width
every float is as likely as its neighbours whatever the other words are, so no digit of a draw tells how it was made.
Adding up several draws does the same (Holohan and Braghin, "Secure random sampling in differential privacy", 2021), at
the price of several. (The uniform is so narrow that it changes the kurtosis by 3e-11.)
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

DITHER = 2.0**-8  # half the width of the uniform
# cos(pi/2 sqrt(x)) interpolated at the Chebyshev points of [0, 1], highest power first: off by 2e-8 at most. (lax.cos
# is no vector instruction on a CPU, and takes longer than all the rest.)
COSINE = (-2.3824152e-05, 9.1772292e-04, -2.0862687e-02, 2.5366932e-01, -1.2337005, 1.0)


def _float(word: jax.Array, dtype: Any) -> jax.Array:
    """A uint32 below 2^31 as a float. Signed, which CPUs convert faster."""
    return jax.lax.bitcast_convert_type(word, jnp.int32).astype(dtype)


def normal_from_words(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, dtype: Any) -> jax.Array:
    """N(0, 1) values in float32 or float64, one for each four uint32 words."""
    tail = (_float(b >> 1, dtype) + 0.5) * 2.0**-62
    uniform = _float(a >> 1, dtype) * 2.0**-31 + tail  # in (0, 1]
    if dtype == jnp.float64:
        variance, dither = 1.0, 0.0
        quarter = (_float(c >> 1, dtype) + _float(d >> 1, dtype) * 2.0**-31) * 2.0**-31
        cosine = jnp.cos(quarter * (math.pi / 2))
    else:
        variance, dither = 1 - DITHER**2 / 3, _float(d, dtype) * (DITHER * 2.0**-31)
        quarter = _float(c >> 1, dtype) * 2.0**-31  # of a turn, in [0, 1]
        cosine = jnp.polyval(jnp.array(COSINE, dtype), jnp.square(quarter))
    radius = jnp.sqrt(jnp.maximum(jnp.log(uniform) * (-2 * variance), 0))  # log(1) may be a rounding error above 0
    return jnp.where((a & 1) != 0, -radius, radius) * cosine + dither
