"""Augmentation multiplicity: the loss of an example is its mean over several augmentations, which are clipped as one.

Averaged before the clip, K augmentations of an example cost no more privacy than one; K examples in the batch would.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from dpopt.common import validate
from dpopt.engines import batches


def augmented(
    loss_fn: Callable[..., Any], augment: Callable[[Any, jax.Array], Any], *, multiplicity: int
) -> Callable[..., Any]:
    r"""A loss of one example that is averaged over random augmentations of it, ``(1/K) sum_k loss(augment(x, key_k))``.

    Its gradient is the mean gradient over the augmentations; all that follows (clip, noise, accounting) takes it for
    the gradient of one example. Every engine does: to it the augmentations are one more axis. A step costs about K
    times one without them.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of one example, or ``(scalar, aux)`` where
            ``has_aux`` asks for it: ``aux`` then has an axis ``(K, ...)``. One with an attribute ``takes_key`` that is
            true (those that `dpopt.flax` makes of models with dropout) gets ``(example, key)``, another key for every
            augmentation.
        augment: ``augment(example, key) -> example``, a random variant of one example (leaves without a batch axis),
            drawn from this key alone; shapes and dtypes may change, what there is (images, labels) may not. It must
            not read other private examples: mixing two of them (mixup) would let one move two gradients.
        multiplicity: K, how many augmentations; 1 is ordinary augmentation.

    Returns:
        ``loss_fn(params, (example, key)) -> scalar``. `dpopt.train` and ``Plan.run`` put the keys there, made of the
        step and the example, so that a replay draws the same. In a loop of your own, let the batch be ``(examples,
        dpopt.example_keys(key, step, indices))``, or pass `dpopt.Steps` an ``example_key``. Scores take ``loss_fn``.

    Raises:
        ValueError, TypeError: for a bad argument; in the returned function, for an example without a key, or an
            ``augment`` that returns something of another structure.

    *Privacy*: the mean depends on one example and its own draws, and the clip bounds the mean gradient: sensitivity,
    noise and epsilon are the same for every K.

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
            "loss_fn makes gradients of many examples. Augment the loss of one, inside: "
            "per_user_grads(augmented(loss_fn, augment, multiplicity=...))."
        )
    validate.positive_int(multiplicity=multiplicity)
    takes_key = getattr(loss_fn, "takes_key", False)

    def mean_loss(params: Any, example_and_key: Any) -> Any:
        example, key = _parted(example_and_key)

        def of_one(key: jax.Array) -> Any:
            own, left = jax.random.split(key)
            variant = _checked(augment(example, own), example)
            return loss_fn(params, (variant, left) if takes_key else variant)

        # Not split(key, K): the first augmentations are then the same for every K, as a comparison of K's wants.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(multiplicity))
        if multiplicity == 1:  # the loss itself, without an axis that engines would see
            found = of_one(keys[0])
            return (found[0], jax.tree.map(lambda a: a[None], found[1])) if isinstance(found, tuple) else found
        found = jax.vmap(of_one)(keys)
        losses, *aux = found if isinstance(found, tuple) else (found,)
        mean = jnp.mean(losses, axis=0)  # of scalars; if they are none, `per_example_grads` says so
        return (mean, *aux) if aux else mean

    cast(Any, mean_loss).takes_key = True  # `dpopt.train` asks
    return mean_loss


def _parted(example_and_key: Any) -> tuple[Any, jax.Array]:
    example, key = batches.example_and_key(example_and_key)
    if key is None:
        raise ValueError(
            "an augmented loss takes (example, key), and the example comes without a key, so that all examples would "
            "share one draw. dpopt.train and Plan.run give every example its own; in a loop of your own, let the batch "
            "be (examples, dpopt.example_keys(key, step, indices)). To evaluate, use the loss without augmentation."
        )
    return example, key


def _checked(variant: Any, example: Any) -> Any:
    found, expected = jax.tree.structure(variant), jax.tree.structure(example)
    if found != expected:
        raise ValueError(
            f"augment must return an example, as it gets one: {expected}; it returned {found}. Return what it leaves "
            "alone (labels), too."
        )
    return variant
