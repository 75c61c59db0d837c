"""To how many bits a product rounds its factors."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core

from dpopt.ghost.primitives import CONVOLUTION, DOT

_EXACT = {lax.DotAlgorithmPreset.F32_F32_F32, lax.DotAlgorithmPreset.F64_F64_F64}


def precisions(eqn: core.JaxprEqn) -> set[Any]:
    """That of each factor of a product, or an algorithm for it."""
    given = eqn.params.get("precision")
    return set(given) if isinstance(given, tuple) else {given}


def is_precise(eqn: core.JaxprEqn) -> bool:
    """Whether a product rounds no factor."""
    found = precisions(eqn)
    if not found <= {None, *lax.Precision}:
        return found <= _EXACT
    # Other devices than CPUs multiply in fewer bits by default.
    return found == {lax.Precision.HIGHEST} or jax.default_backend() == "cpu"


def precise(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """The equation, a product at full precision. A sum that is rounded can be off by more than an example adds."""
    if eqn.primitive not in (DOT, CONVOLUTION) or is_precise(eqn):
        return eqn
    return eqn.replace(params={**eqn.params, "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)})
