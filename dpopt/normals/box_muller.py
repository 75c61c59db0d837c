"""Standard normals from random words by the Box-Muller transform (1958), with enough bits for tails and low digits.

A normal is a radius times the cosine of an angle. The radius uses 62 bits, so tail probabilities have a relative error
of 1e-6 up to 7 standard deviations and of 1e-4 at 8, are too small by a sixth at 9, and end at 9.35. (With a uniform of
23 bits they end at 5.42, in an atom of 2^-23.)

In float32 a fourth word is added as a uniform of width 2^-7, whose variance is subtracted from that of the rest. Within
that width, neighbouring floats are equally likely whatever the other words are, so low digits do not reveal them. A sum
of several draws has the same effect (Holohan and Braghin, "Secure random sampling in differential privacy", 2021), but
costs several draws. (The uniform is so narrow that it changes the kurtosis by 3e-11.)
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

DITHER = 2.0**-8  # half the width of the uniform
# cos(pi/2 sqrt(x)) interpolated at the Chebyshev points of [0, 1], highest power first; the error is at most 2e-8.
# (lax.cos is not vectorised on CPUs, and takes longer than all the rest.)
COSINE = (-2.3824152e-05, 9.1772292e-04, -2.0862687e-02, 2.5366932e-01, -1.2337005, 1.0)


def _float(word: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A uint32 below 2^31 as a float, by way of int32, which CPUs convert faster."""
    return jax.lax.bitcast_convert_type(word, jnp.int32).astype(dtype)


def normal_from_words(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, dtype: DTypeLike) -> jax.Array:
    """N(0, 1) values in float32 or float64, each from four uint32 words."""
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
    radius = jnp.sqrt(jnp.maximum(jnp.log(uniform) * (-2 * variance), 0))  # log(1) may be above 0 by a rounding error
    return jnp.where((a & 1) != 0, -radius, radius) * cosine + dither
