"""Federated training with client-level privacy: the change by a local run replaces the gradient of an example.

A round of Algorithm 3 of AdaDPS is a step of the same chains: every sampled client trains locally, its change
``Delta_i = w_i - w`` is clipped, noise is added to the sum, and the server moves by the mean. `client_deltas` promises
``-Delta_i``, since an Optax optimizer subtracts its input: ``dp_sgd(1.0, ...)`` adds the private mean of the changes as
the paper does, ``momentum=0.9`` gives server momentum, and ``dp_adam`` gives FedAdam.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpopt._units import arrays_of, stated_for
from dpopt.chain import PrivateOptimizer
from dpopt.common import trees, validate
from dpopt.common.averages import at_step
from dpopt.common.types import Batch, LossFn, PyTree, ScalarOrSchedule
from dpopt.constants import wrapped
from dpopt.engines import batches, promises
from dpopt.gradients import PerExampleGrads, rows_of
from dpopt.preconditioners.base import side_information


class Clients(NamedTuple):
    """A batch for `client_deltas`: the examples of each client, padded to the same number.

    *Privacy*: private data.

    >>> Clients(jnp.ones((10, 3, 2)), jnp.ones((10, 3), bool)).example_mask.shape
    (10, 3)
    """

    data: PyTree  # leaves (clients, examples, ...)
    example_mask: jax.Array | np.ndarray  # (clients, examples) bool, False for padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ClientRuns(promises.Rows):
    """Deferred local runs, one per row. The batch is ``(data of the clients, example masks or None)``."""

    local_steps: int
    local_learning_rate: float | jax.Array
    local_scale: PyTree | None
    local_batch_size: int | None

    unit = "client"

    def examples(self, row: tuple[PyTree, jax.Array | None]) -> tuple[PyTree, jax.Array]:
        data, mask = row
        return data, jnp.ones(jax.tree.leaves(data)[0].shape[0], bool) if mask is None else mask

    def of_examples(self, function: Callable[..., PyTree], params: PyTree) -> promises.OtherRows:
        # Only local runs have to be formed.
        return dataclasses.replace(super().of_examples(function, params), engine="auto")

    def _value_and_grad(self, row: tuple[PyTree, jax.Array | None]) -> tuple[jax.Array, PyTree]:
        """The mean loss of one client at its first step, and ``w - w_i``."""
        data, mask = row
        first_batch = self._local_batch(data, mask, 0)

        def mean_loss(w: PyTree, local_batch: tuple[PyTree, jax.Array]) -> jax.Array:
            examples, counts = local_batch
            # The run is in float32, but the model gets weights of its own dtype.
            w = jax.tree.map(lambda x, p: x.astype(jnp.result_type(p)), w, self.params)
            losses = jax.vmap(self.loss_fn, in_axes=(None, 0))(w, examples)
            return jnp.sum(jnp.where(counts, losses, 0)) / jnp.maximum(jnp.sum(counts), 1)

        def step(moved: PyTree, k: jax.Array) -> tuple[PyTree, jax.Array]:
            local_batch = first_batch if self.local_batch_size is None else self._local_batch(data, mask, k)
            w = jax.tree.map(jnp.subtract, self.params, moved)
            loss, grads = jax.value_and_grad(mean_loss)(w, local_batch)
            if self.local_scale is not None:
                grads = jax.tree.map(lambda g, s: g * jnp.asarray(s, g.dtype), grads, self.local_scale)
            # Accumulates w - w_i instead of w_i, so that no digits cancel in the difference.
            moved = jax.tree.map(lambda d, g: d + jnp.asarray(self.local_learning_rate, g.dtype) * g, moved, grads)
            return moved, loss

        moved, losses = jax.lax.scan(step, trees.zeros(self.params), jnp.arange(self.local_steps))
        return losses[0], moved

    def _local_batch(self, data: PyTree, mask: jax.Array | None, step: int | jax.Array) -> tuple[PyTree, jax.Array]:
        """The examples of a local step and their mask; each example of the client occurs at most once."""
        num_examples = jax.tree.leaves(data)[0].shape[0]
        size = num_examples if self.local_batch_size is None else min(self.local_batch_size, num_examples)
        if mask is None and size == num_examples:
            return data, jnp.ones((size,), bool)
        mask = jnp.ones((num_examples,), bool) if mask is None else mask
        own = jnp.sum(mask)
        own_first = jnp.argsort(jnp.logical_not(mask), stable=True)
        # Cycles through the client's own examples; padding is never read.
        rows = own_first[(step * size + jnp.arange(size)) % jnp.maximum(own, 1)]
        return jax.tree.map(lambda x: x[rows], data), jnp.arange(size) < own


def client_deltas(
    loss_fn: LossFn,
    *,
    local_steps: int,
    local_learning_rate: float | jax.Array,
    scale: PyTree = None,
    local_batch_size: int | None = None,
    microbatch_size: int | None = None,
) -> Callable[..., PerExampleGrads]:
    r"""Makes ``f(params, client_batches, *, mask, example_mask=None)``, a promise of the change of every client.

    Client i starts at the server's w and takes ``local_steps`` steps of
    :math:`w_i \leftarrow w_i - \eta\, S \nabla F_i(w_i)` on its own data. Row i is :math:`-\Delta_i = w - w_i`.

    Args:
        loss_fn: ``loss_fn(params, example) -> scalar``, the loss of one example.
        local_steps: number of local steps, at least 1.
        local_learning_rate: eta, positive.
        scale: S = 1 / A, public side information that multiplies the local gradients: positive numbers, a prefix of the
            parameters; None for 1. (To scale changes before the clip, use `dpopt.precondition_by_side_information`.)
        local_batch_size: number of examples in a local step. Step k takes the next ones in the given order, cyclically;
            a client with fewer examples uses all of them. None: every step uses all.
        microbatch_size: number of clients to run at a time, to save memory; None for all. The result is the same.

    Returns:
        A function of ``params``; ``client_batches``, leaves ``(clients, examples, ...)``, or `Clients`; ``mask``,
        ``(clients,)`` bool, and ``example_mask``, ``(clients, examples)`` bool: False for padding, which may hold any
        values, None if there is none. A client whose run ends in NaN or Inf contributes zero. ``SensitiveAux.losses``
        holds the mean loss of each client at its first step. Train steps, `dpopt.train` and ``Plan.run`` accept the
        function in place of a loss (``Builder(..., unit="client")``).

    Raises:
        ValueError, TypeError: for a bad argument; in the returned function, for anything that does not fit.

    *Privacy*: the unit is the client: the clip bounds the effect of all data of one client. Mark the optimizer by
    `client_level`, and sample clients: ``expected_batch_size`` and the sampler count them. ``scale`` must be public.

    Reference: Li, Zaheer, Reddi and Smith (2022), Private Adaptive Optimization with Side Information, Algorithm 3.

    >>> deltas = client_deltas(lambda w, x: 0.5 * (w - x) ** 2, local_steps=2, local_learning_rate=0.5)
    >>> promise = deltas(jnp.array(0.0), jnp.array([[4.0, 4.0], [8.0, 0.0]]), mask=None)
    >>> promise.materialize().tolist()  # both clients move from 0 to 2, then to 3
    [-3.0, -3.0]
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, example); got {loss_fn!r}.")
    validate.positive_int(local_steps=local_steps)
    validate.positive(local_learning_rate=local_learning_rate)
    sizes = {"local_batch_size": local_batch_size, "microbatch_size": microbatch_size}
    validate.positive_int(**{name: size for name, size in sizes.items() if size is not None})
    if scale is not None:
        side_information(scale)  # checks the values

    make = functools.partial(
        _deltas,
        local_steps=local_steps,
        local_learning_rate=local_learning_rate,
        local_batch_size=local_batch_size,
        microbatch_size=microbatch_size,
        scale=scale,
    )
    return wrapped(make, loss_fn, takes_key=False)


def _deltas(
    loss_fn: LossFn,
    *,
    local_steps: int,
    local_learning_rate: float | jax.Array,
    local_batch_size: int | None,
    microbatch_size: int | None,
    scale: PyTree,
) -> Callable[..., PerExampleGrads]:
    @validate.requires_mask
    def promise(
        params: PyTree, client_batches: Batch, *, mask: ArrayLike | None, example_mask: ArrayLike | None = None
    ) -> PerExampleGrads:
        validate.floating_params(params)
        data, (clients, examples), example_mask = arrays_of(client_batches, example_mask, Clients, "client")
        mask = batches.checked_mask(mask, clients)
        all_examples = jax.tree.map(lambda x: x.reshape((clients * examples,) + x.shape[2:]), data)
        batches.check_loss(loss_fn, params, all_examples, has_aux=False)
        runs = _ClientRuns(
            loss_fn,
            params,
            (data, example_mask),
            batch_size=clients,
            engine="vmap",
            microbatch_size=microbatch_size,
            has_aux=False,
            local_steps=local_steps,
            local_learning_rate=local_learning_rate,
            local_scale=None if scale is None else trees.broadcast_prefix(scale, params, "scale"),
            local_batch_size=local_batch_size,
        )
        return PerExampleGrads(runs, mask)

    cast(Any, promise).makes_promise = True  # read by train steps
    return promise


def client_level(optimizer: PrivateOptimizer) -> PrivateOptimizer:
    """The same optimizer with its privacy stated for clients; it refuses gradients of single examples.

    Args:
        optimizer: what a named optimizer, `dpopt.privatize` or `dpopt.chain` returns.

    Raises:
        TypeError: if it is another kind of transformation; in ``update``, if rows are not clients.

    *Privacy*: ``privacy.unit`` is ``"client"``: the event holds for adding or removing one client with all its data.

    >>> import dpopt
    >>> server = client_level(dpopt.dp_sgd(
    ...     1.0, l2_clip_norm=0.5, noise_multiplier=1.0, expected_batch_size=20, key=jax.random.key(0), momentum=0.9))
    >>> server.privacy.unit
    'client'
    """
    return stated_for("client", optimizer)


def client_rows(changes: PyTree, *, mask: ArrayLike | None) -> PerExampleGrads:
    r"""A promise of client changes that were computed elsewhere, such as reports that a server received.

    Args:
        changes: leaves ``(clients, *parameter.shape)``; row i is :math:`-\Delta_i = w - w_i`, as in `client_deltas`.
        mask: ``(clients,)`` bool, False for padding; None if there is none.

    Raises:
        ValueError, TypeError: if leaves disagree on the number of clients, are not floating, or the mask does not fit.

    *Privacy*: dpopt cannot check that a row is all that one client sent.

    >>> client_rows(jnp.ones((3, 2)), mask=None).unit
    'client'
    """
    return rows_of("client", changes, mask)


def device_noise(noise_multiplier: ScalarOrSchedule, *, num_devices: int) -> ScalarOrSchedule:
    r"""The noise multiplier of the sum if every device adds its own noise: :math:`\sqrt{b}\, \sigma`.

    In the paper each of b devices sends :math:`\mathrm{clip}(\Delta_i) + N(0, \sigma^2 C^2)`. The noise in the sum
    then has standard deviation :math:`\sqrt b \sigma C`, the same as one draw of that size: pass the result as
    ``noise_multiplier``, so that the noise drawn and the event accounted for agree.

    b is a public constant: in rounds of fixed size (`dpopt.FixedSizeSampler`), the number of clients. Under Poisson
    sampling that number varies, and noise from reporting devices alone would have a variance that depends on who takes
    part, for which a Gaussian event with :math:`\sqrt b \sigma` does not hold. So here every round has exactly b shares
    of noise, as if the server added the missing ones. If only devices add noise in a deployment, use rounds of fixed
    size, and the smallest number of honest devices that is certain to report as b.

    Args:
        noise_multiplier: sigma on one device, relative to the clip norm: a number, or a schedule ``step -> number``.
        num_devices: b, the number of shares, at least 1.

    Raises:
        ValueError, TypeError: for a bad argument.

    *Privacy*: the result holds against anyone who sees the sum but not the single reports. Against a server that sees
    the reports, a report is a Gaussian mechanism with multiplier sigma (sigma / 2 under replace-one), and sampling that
    the server observes does not amplify; dpopt does not account for that view.

    Reference: Li, Zaheer, Reddi and Smith (2022), Private Adaptive Optimization with Side Information, Algorithm 3.

    >>> device_noise(0.3, num_devices=100)
    3.0
    """
    validate.positive_int(num_devices=num_devices)
    shares = math.sqrt(num_devices)
    if callable(noise_multiplier):
        return lambda step: shares * at_step(noise_multiplier, step)
    validate.non_negative(noise_multiplier=noise_multiplier)
    return shares * noise_multiplier
