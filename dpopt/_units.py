"""Privacy stated for users or clients instead of examples."""

import dataclasses

from dpopt.chain import PrivateOptimizer


def stated_for(unit: str, optimizer: object) -> PrivateOptimizer:
    """The same optimizer with its privacy stated for another unit; it refuses rows of any other unit.

    Raises:
        TypeError: if it is another kind of transformation.
    """
    if not isinstance(optimizer, PrivateOptimizer):
        raise TypeError(
            f"{unit}_level needs an optimizer made by dpopt (a named one, dpopt.privatize or dpopt.chain); got "
            f"{optimizer!r}."
        )
    privacy = dataclasses.replace(optimizer.privacy, unit=unit)
    stated = PrivateOptimizer(optimizer.init, optimizer.run, privacy, optimizer.stages, is_chained=optimizer.is_chained)
    stated.noise_unknown = optimizer.noise_unknown
    return stated
