"""Augmentation multiplicity: the loss of an example is its mean over several augmentations, clipped as one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpopt.common import validate
from dpopt.common.types import Example, LossFn, PyTree
from dpopt.constants import wrapped
from dpopt.engines import batches


def augmented(loss_fn: LossFn, augment: Callable[[Example, jax.Array], Example], *, multiplicity: int) -> LossFn:
    r"""The mean loss over random augmentations of an example, ``(1/K) sum_k loss(augment(x, key_k))``.

    Every engine can compute its gradient: the augmentations are one more axis. A step costs about K times as much.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of one example, or ``(scalar, aux)`` with ``has_aux``:
            ``aux`` then has an axis ``(K, ...)``. A loss with a true attribute ``takes_key`` (such as `dpopt.flax`
            makes from models with dropout) gets ``(example, key)``, with a different key for every augmentation.
        augment: ``augment(example, key) -> example``, a random variant of one example (leaves without a batch axis),
            drawn from this key alone. Shapes and dtypes may change, the tree structure may not. It must not read other
            private examples: if it mixes two (mixup), one example moves two gradients.
        multiplicity: K, how many augmentations; 1 is ordinary augmentation.

    Returns:
        ``loss_fn(params, (example, key)) -> scalar``. `dpopt.train` and ``Plan.run`` pass the keys, computed from the
        step and the example, so that a replay draws the same. In your own loop, pass the batch as ``(examples,
        dpopt.example_keys(key, step, indices))``, or give `dpopt.Steps` an ``example_key``. Evaluate with ``loss_fn``.

    Raises:
        ValueError, TypeError: for a bad argument; in the loss, without a key, or if ``augment`` changes the tree.

    *Privacy*: the mean depends on one example and its own draws, and the clip bounds the mean gradient: sensitivity,
    noise and epsilon are the same for every K, unlike with K rows of a batch.

    Reference: De, Berrada, Hayes, Smith and Balle 2022, "Unlocking high-accuracy differentially private image
    classification through scale" (arXiv:2204.13650), section 3.2.

    >>> import dpopt
    >>> def jitter(x, key):
    ...     return x + 0.1 * jax.random.normal(key, x.shape)
    >>> loss_fn = augmented(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), jitter, multiplicity=100)
    >>> batch = jnp.array([[3.0, 4.0]]), dpopt.example_keys(jax.random.key(0), 0, [7])
    >>> grads = dpopt.per_example_grads(loss_fn)(jnp.zeros(2), batch, mask=None)
    >>> grads.materialize().round().tolist()
    [[-3.0, -4.0]]
    """
    for name, function in (("loss_fn", loss_fn), ("augment", augment)):
        if not callable(function):
            arguments = "(params, example)" if name == "loss_fn" else "(example, key)"
            raise TypeError(f"{name} must be a function of {arguments}; got {function!r}.")
    if getattr(loss_fn, "makes_promise", False):
        raise TypeError(
            "loss_fn makes gradients of many examples. Augment the loss of a single one instead: "
            "per_user_grads(augmented(loss_fn, augment, multiplicity=...))."
        )
    validate.positive_int(multiplicity=multiplicity)
    takes_key = getattr(loss_fn, "takes_key", False)

    def mean_loss(loss_fn: LossFn, params: PyTree, example_and_key: tuple[Example, jax.Array]) -> Any:
        example, key = batches.example_and_key(example_and_key)
        if key is None:
            raise ValueError(
                "an augmented loss takes (example, key), but the example has no key, so all examples would share one "
                "draw. dpopt.train and Plan.run pass a key per example; in your own loop, pass the batch as (examples, "
                "dpopt.example_keys(key, step, indices)). To evaluate, use the loss without augmentation."
            )

        def of_one(key: jax.Array) -> Any:
            own, left = jax.random.split(key)
            variant = augment(example, own)
            found, expected = jax.tree.structure(variant), jax.tree.structure(example)
            if found != expected:
                raise ValueError(
                    f"augment must return the tree structure of its example, {expected}; it returned {found}. Return "
                    "the unchanged parts (labels) too."
                )
            return loss_fn(params, (variant, left) if takes_key else variant)

        # Not split(key, K), so that the first augmentations are the same for every K, and values of K can be compared.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(multiplicity))
        if multiplicity == 1:  # the loss itself, without an extra axis
            found = of_one(keys[0])
            return (found[0], jax.tree.map(lambda a: a[None], found[1])) if isinstance(found, tuple) else found
        found = jax.vmap(of_one)(keys)
        losses, *aux = found if isinstance(found, tuple) else (found,)
        mean = jnp.mean(losses, axis=0)  # over K scalars; `per_example_grads` raises for other losses
        return (mean, *aux) if aux else mean

    return wrapped(lambda loss_fn: functools.partial(mean_loss, loss_fn), loss_fn, takes_key=True)
