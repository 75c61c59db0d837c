"""Decoupled weight decay, after the noise."""

from typing import Any

import optax

from dpopt.common import validate


def decayed_weights(weight_decay: Any) -> tuple[optax.GradientTransformation, ...]:
    """The stage that adds ``weight_decay * params``; none where that is 0, so that no parameters need to be passed.

    Raises:
        ValueError: for a negative number.
    """
    validate.non_negative(weight_decay=weight_decay)
    return () if validate.concrete(weight_decay) == 0 else (optax.add_decayed_weights(weight_decay),)
