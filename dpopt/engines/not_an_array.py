"""The array operations that `dpopt.gradients.PerExampleGrads` refuses, with an explanation."""

from typing import NoReturn

_NOT_CLIPPED = (
    "per-example gradients (PerExampleGrads, a promise) were used in a computation before they were clipped, or "
    "crossed a jax.jit. In dpopt.chain or optax.chain, put dpopt.clip_and_sum first, or the private optimizer; "
    "whatever clips, decays, scales or counts gradients goes after it. Wrappers that read the gradients themselves "
    "(apply_if_finite, MultiSteps) cannot wrap it; instead of nnx.Optimizer use dpopt.flax.NNXOptimizer. Make the "
    "promise in the same jax.jit as the update."
)


def refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError(_NOT_CLIPPED)


class NotAnArray:
    """Base of a class whose objects are passed where arrays are expected, and must not be computed with."""

    def __contains__(self, key: object) -> bool:
        return False  # flax's TrainState looks for a special key in the gradients

    def __getattr__(self, name: str) -> NoReturn:
        # Code that computes with gradients reads attributes of arrays, such as ``dtype``.
        raise AttributeError(f"no {name!r}: {_NOT_CLIPPED}", name=name, obj=self)

    __array__ = refuse  # NumPy calls it to convert; JAX's own error names the type
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __neg__ = __abs__ = refuse
