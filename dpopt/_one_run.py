"""Warnings where an optimizer and a sampler are not those of the run that is accounted for."""

import math
import warnings
from typing import Any

from dpopt import _stages
from dpopt.common import validate


def warn_of_another(optimizer: Any, sampling: Any, steps: int) -> None:
    """Compares the steps drawn and the size of batches; a scheme, which stands for a planned run, has neither."""
    _warn_of_another_optimizer(optimizer, sampling)
    _warn_of_other_steps(optimizer, getattr(sampling, "drawn_to", None), steps)
    _warn_of_another_size(optimizer, getattr(sampling, "expected_batch_size", None))


def _warn_of_another_optimizer(optimizer: Any, sampling: Any) -> None:
    held = _held(optimizer)
    if not getattr(sampling, "drawn_to", 0) or not getattr(held, "updated", False):
        return  # nothing has been trained yet: this is a plan
    accounted = getattr(sampling, "accounted", [])
    if any(other is not held for other in accounted):
        warnings.warn(
            "this sampler's batches have been accounted for with another optimizer. If both trained on them, each step "
            "made two queries of one sample, which costs more than their epsilons added up. For another run, make a "
            "sampler with a seed of its own; for the cost of a planned run, pass a scheme (sampler.scheme).",
            UserWarning,
            stacklevel=4,
        )
    elif not accounted:
        accounted.append(held)


def _warn_of_other_steps(optimizer: Any, drawn_to: int | None, steps: int) -> None:
    if drawn_to == 0 and getattr(_held(optimizer), "updated", False):
        warning = (
            "this optimizer has been used, but this sampler has drawn no batches. If they came from elsewhere, such as "
            "epochs over shuffled data, epsilon does not hold for them. Pass the sampler that drew them, or a scheme "
            "(sampler.scheme) for the cost of a planned run."
        )
    elif drawn_to is not None and steps < drawn_to:
        warning = (
            f"this sampler has drawn the batches of {drawn_to} steps, but only {steps} are accounted for: the others "
            "cost nothing only if their results were never used. Pass a scheme (sampler.scheme) for the cost of a "
            "shorter run."
        )
    elif drawn_to and steps > drawn_to:
        warning = (
            f"this sampler has drawn the batches of {drawn_to} steps, and {steps} are accounted for. If these were all "
            "taken, some took a batch that another had, which costs more. Pass a scheme (sampler.scheme) for the cost "
            "of a planned run."
        )
    else:
        return
    warnings.warn(warning, UserWarning, stacklevel=4)


def _warn_of_another_size(optimizer: Any, expected: float | None) -> None:
    """Epsilon does not depend on it, but the mean that the optimizer is given does."""
    stages = getattr(_held(optimizer), "stages", ())
    while stages and hasattr(stages[0], "stages"):
        stages = stages[0].stages
    for stage in (getattr(part, "stage", None) for part in stages):
        divisor = validate.concrete(stage.divisor) if isinstance(stage, _stages.Normalize) else None
        if expected is not None and divisor is not None and not math.isclose(divisor, expected, rel_tol=1e-3):
            warnings.warn(
                f"this optimizer divides by an expected_batch_size of {divisor:g}, and the sampler expects batches of "
                f"{expected:g}: every step is {expected / divisor:.3g} times the mean gradient.",
                UserWarning,
                stacklevel=4,
            )


def _held(optimizer: Any) -> Any:
    """The optimizer that a train step or an NNX optimizer holds, or itself."""
    while not hasattr(optimizer, "updated") and optimizer is not None:
        optimizer = getattr(optimizer, "optimizer", getattr(optimizer, "tx", None))
    return optimizer
