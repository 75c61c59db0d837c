"""What one row of the data is, where it is more than an example."""

import dataclasses

from dpopt.chain import PrivateOptimizer


def stated_for(unit: str, optimizer: PrivateOptimizer) -> PrivateOptimizer:
    """The same optimizer, whose privacy is stated for another unit, and which refuses rows of any other kind.

    Raises:
        TypeError: if it is another kind of transformation.
    """
    if not isinstance(optimizer, PrivateOptimizer):
        raise TypeError(
            f"{unit}_level needs an optimizer made by dpopt (by name, dpopt.privatize or dpopt.chain); got "
            f"{optimizer!r}."
        )
    privacy = dataclasses.replace(optimizer.privacy, unit=unit)
    stated = PrivateOptimizer(optimizer.init, optimizer.run, privacy, optimizer.stages, is_chained=optimizer.is_chained)
    stated.noise_unknown = getattr(optimizer, "noise_unknown", False)
    return stated
