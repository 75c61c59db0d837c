"""A warning before a run spends its budget on noise alone."""

import warnings

import jax
from jax.interpreters import partial_eval

from dpopt.common import trees
from dpopt.common.types import Batch, LossFn, PyTree
from dpopt.engines import explicit_axes


def warn_if_constant(loss_fn: LossFn, params: PyTree, batch: Batch) -> None:
    """Warns if the gradient of the loss of an example depends neither on the example nor on the parameters.

    So it is if the loss closes over other parameters than those it is given, or counts mistakes (``argmax``, ``==``).

    *Privacy*: reads shapes only.

    >>> import jax.numpy as jnp
    >>> warn_if_constant(lambda w, x: jnp.sum((w - x) ** 2), jnp.ones(2), jnp.ones((3, 2)))
    """

    if explicit_axes.explicit_mesh((params, batch)) is not None:
        return  # shapes alone do not say what the loss is given there

    def loss(params: PyTree, example: PyTree) -> jax.Array:
        found = loss_fn(params, example)
        return found[0] if isinstance(found, tuple) else found

    try:
        program = jax.make_jaxpr(jax.grad(loss))(trees.structs(params), trees.structs(batch, 1)).jaxpr
    except Exception:  # the first step says what is wrong, and what to do
        return
    _, is_read = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    if not any(is_read):
        warnings.warn(
            "the gradient of this loss is a constant: it depends neither on the example nor on the parameters, so "
            "there is nothing to learn, and a run would spend its budget on noise. A loss must use the parameters that "
            "it is given (not those it closes over), and have a derivative (argmax, ==, rounding, counts have none).",
            UserWarning,
            stacklevel=2,
        )
