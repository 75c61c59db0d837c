"""JAX's primitives and the properties of theirs that the engine relies on.

Primitives are compared by identity, not by name: somebody else's primitive may have the same name.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend import core
from jax.extend.core import primitives


def primitive(name: str) -> Any:
    """JAX's own primitive of that name, or None if this version of JAX has none."""
    places = primitives, lax, lax.linalg
    return next((found for place in places if (found := getattr(place, f"{name}_p", None))), None)


def _all(names: str) -> frozenset[core.Primitive]:
    return frozenset(primitive(name) for name in names.split()) - {None}


ADD, ADD_ANY, SUB, MUL, DIV, NEG = (primitive(name) for name in ("add", "add_jaxvals", "sub", "mul", "div", "neg"))
SQUARE, INTEGER_POW, REDUCE_SUM = (primitive(name) for name in ("square", "integer_pow", "reduce_sum"))
DOT, CONVOLUTION, GATHER, DYNAMIC_SLICE = (
    primitive(name) for name in ("dot_general", "conv_general_dilated", "gather", "dynamic_slice")
)
TRANSPOSE, RESHAPE, BROADCAST, CAST, ROUND_TO = (
    primitive(name) for name in ("transpose", "reshape", "broadcast_in_dim", "convert_element_type", "reduce_precision")
)
SLICE, SPLIT, UNSTACK = (primitive(name) for name in ("slice", "split", "unstack"))
MAX_POOL = primitive("reduce_window_max")
COMPLEX, CONJ, REAL, IMAG = (primitive(name) for name in ("complex", "conj", "real", "imag"))
LINEAR_SOLVE = primitive("linear_solve")
RAGGED_DOT = "ragged_dot_general"  # by name: JAX exports it nowhere
STOP_GRADIENT, SCAN, WHILE, COND, REMAT, CUSTOM_JVP, CUSTOM_VJP = (
    primitive(name)
    for name in ("stop_gradient", "scan", "while", "cond", "remat", "custom_jvp_call", "custom_vjp_call")
)

# Calls, whose equations are inlined, and the parameter that holds them.
CALLS = {primitive("jit"): "jaxpr", primitive("closed_call"): "call_jaxpr"}
# Their derivative is zero everywhere.
FLAT = _all("stop_gradient floor ceil round sign")
# Linear in either operand.
BILINEAR = _all("dot_general conv_general_dilated")
# Every output entry copies one input entry, and no input entry is copied twice.
LAYOUT = _all("""
    reshape transpose squeeze rev copy slice split unstack convert_element_type reduce_precision broadcast_in_dim
    dynamic_slice
""")
# An output entry adds up input entries, or copies one, or has a number of its own.
STRUCTURAL = _all(
    "concatenate cumsum dynamic_update_slice gather pad reduce_sum scatter scatter_add select_n stack tile"
)
# The same entries in the same order, where input and output have equally many.
RESHAPING = _all("reshape squeeze broadcast_in_dim")
# The same, and every entry stays in its place.
CASTS = _all("convert_element_type reduce_precision copy")
# The same for the real parts of complex numbers and for the imaginary ones.
OF_PARTS = _all("transpose reshape broadcast_in_dim squeeze slice rev copy reduce_sum")
# Linear in one input: equal cotangents of the outputs give equal cotangents of the input.
SPLITTING = _all("split reshape squeeze transpose")
# An output entry depends only on the input entries in the same place.
ENTRYWISE = _all("""
    neg exp exp2 log log2 log1p expm1 tanh logistic sqrt rsqrt square one_minus_square abs sin cos integer_pow pow sign
    erf add sub mul div max min clamp select_n
""")
# The same, including those whose outputs have no gradient.
BY_ENTRY = ENTRYWISE | CASTS | _all("eq ne lt le gt ge is_finite and or not floor ceil round stop_gradient")
# XLA fuses them with what uses their results, which it then does not store.
RECOMPUTED = LAYOUT | _all("""
    neg square one_minus_square abs integer_pow sign add sub mul max min clamp select_n add_jaxvals
    and or not xor eq ne lt le gt ge is_finite iota floor ceil round real imag stop_gradient
""")
# Computed in float32 where the loss uses fewer bits: they take operands of any floating type.
WIDENED = (
    LAYOUT
    | ENTRYWISE
    | _all("""
    add_jaxvals concatenate cumsum dot_general floor pad reduce_max reduce_min reduce_sum round
""")
)
# Map numbers per filter to numbers per filter. (Those with several arguments broadcast at most axes of length 1, which
# cannot mix two filters unless the result has more axes than allowed.)
PER_FILTER = _all("""
    neg exp log log1p tanh logistic sqrt rsqrt cbrt square abs sign integer_pow pow add sub mul div max min select_n
    stop_gradient convert_element_type copy reshape squeeze broadcast_in_dim
""")
# JAX's own operations, whose derivatives are the mathematical ones and so linear in the cotangent.
ORDINARY = (
    WIDENED
    | PER_FILTER
    | _all("""
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e ceil cholesky complex conj conv_general_dilated cosh
    cumlogsumexp cummax cummin cumprod device_put digamma dynamic_update_slice eig eigh erf_inv erfc fft gather
    householder_product igamma igamma_grad_a igammac imag iota lgamma lu name nextafter optimization_barrier polygamma
    polynomial qr real reduce_prod reduce_window_max reduce_window_min reduce_window_sum regularized_incomplete_beta rem
    scatter scatter_add scatter_max scatter_min scatter_mul scatter_sub select_and_gather_add select_and_scatter_add
    sharding_constraint sinh sort stack svd tan tile top_k triangular_solve unstack zeta
    and argmax argmin bitcast_convert_type clz eq eq_to ge gt is_finite le le_to lt lt_to lu_pivots_to_permutation ne
    not or population_count reduce_and reduce_or reduce_xor shift_left shift_right_arithmetic shift_right_logical xor
""")
)
# Linear if all equations that they hold are, including their derivative rules.
HOLDING = _all("call closed_call cond custom_jvp_call jit remat scan")
# Linear in one operand, whichever it is; in the first one; in the second one; in all but the first; in all together.
LINEAR_IN = {
    **dict.fromkeys(BILINEAR | {MUL}, "one"),
    **dict.fromkeys(_all("div gather"), "first"),
    **dict.fromkeys(_all("triangular_solve"), "second"),
    **dict.fromkeys(_all("select_n"), "others"),
    **dict.fromkeys(_all("""
        add add_jaxvals sub neg reduce_sum concatenate transpose reshape squeeze rev copy slice broadcast_in_dim
    """), "all"),
}  # fmt: skip
