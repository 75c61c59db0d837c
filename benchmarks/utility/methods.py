"""Optimizers by name, built from plain settings that JSON can hold."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

import dpopt
from dpopt.adaptive import quantile_clip
from dpopt.clipping import as_clip_function
from dpopt.optimizers import filters
from dpopt.optimizers.adadps import adadps
from dpopt.optimizers.adam_bc import dp_adam_bc, scale_by_adam_bc
from dpopt.optimizers.baselines.noise_first import dp2_noise_first
from dpopt.optimizers.baselines.public import dp_adam_pub, dp_r_pub, pda_dpmd
from dpopt.optimizers.baselines.two_queries import dp2_extra_query
from dpopt.optimizers.dp2 import dp2
from dpopt.optimizers.microadam import dp_micro_adam, scale_by_micro_adam
from dpopt.optimizers.muon import scale_by_muon_bc
from dpopt.optimizers.scale_then_privatize import scale_then_privatize
from dpopt.preconditioners.delayed import delayed_moments
from dpopt.preconditioners.moments import last_moments, public_moments

# Optimizers from papers, called with their own arguments.
NAMED: dict[str, Callable[..., dpopt.PrivateOptimizer]] = {
    "DP-SGD": dpopt.dp_sgd,
    "DP-Adam": dpopt.dp_adam,
    "DP-RMSProp": lambda lr, **options: dpopt.dp_rmsprop(lr, eps_in_sqrt=False, **options),
    "DP-AdamBC": dp_adam_bc,
    "DP-MicroAdam": dp_micro_adam,
    "scale-then-privatise": scale_then_privatize,
    "AdaDPS": adadps,
    "PDA-DPMD": pda_dpmd,
    "DP-R-Pub": dp_r_pub,
    "DP-Adam-Pub": dp_adam_pub,
    "DP2": dp2,
    "DP2, extra query": dp2_extra_query,
    "DP2, noise first": dp2_noise_first,
}
NEEDS_PUBLIC_DATA = {"AdaDPS", "PDA-DPMD", "DP-R-Pub", "DP-Adam-Pub"}

# Parts of a combination after the noise, and preconditioners before it.
AFTER: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda momentum=0.0: optax.trace(momentum) if momentum else optax.identity(),
    "adam": optax.scale_by_adam,
    "adam_bc": scale_by_adam_bc,
    "micro_adam": scale_by_micro_adam,
    "muon": lambda: optax.chain(contrib.muon(1.0), optax.scale(-1.0)),  # the learning rate follows
    "muon_bc": lambda gamma: scale_by_muon_bc(key=jax.random.key(3_000), gamma=gamma),
    "lion": optax.scale_by_lion,
    "low_pass": filters.low_pass,
    "kalman": lambda kappa, momentum: optax.chain(filters.simplified_kalman(kappa), optax.trace(momentum)),
}
BEFORE: dict[str, Callable[..., Any]] = {
    "delayed": delayed_moments,
    "public": public_moments,
    "last": last_moments,
}


def needs_public_gradients(method: str, options: dict[str, Any]) -> bool:
    """Whether ``update`` needs ``public_grads``."""
    if method == "combination":
        return options.get("before", {}).get("kind") == "public"
    return method in NEEDS_PUBLIC_DATA and "scale" not in options


def look_ahead(method: str, options: dict[str, Any]) -> float:
    """Where gradients are taken: beyond the parameters, by this multiple of the last step. Nonzero for DiSK only."""
    after = options.get("after", {}) if method == "combination" else {}
    return (1 - after["kappa"]) / after["kappa"] if after.get("kind") == "kalman" else 0.0


def to_be_scored(state: Any, params: Any) -> Any:
    """The parameters that the optimizer recommends for use, or None if they are ``params``."""
    for part in state:
        if isinstance(part, contrib.ScheduleFreeState):
            return contrib.schedule_free_eval_params(part, params)
    return None


def clip_function(clip: Any) -> Any:
    """A clip norm, ``{"normalized": C}``, ``{"layerwise": C}``, or ``{"adaptive": C_0, "quantile": gamma}``."""
    if not isinstance(clip, dict):
        return clip
    if "layerwise" in clip:
        return dpopt.LayerwiseClip(clip["layerwise"])
    if "normalized" in clip:
        return dpopt.clipping.NormalizedClip(clip["normalized"])
    return quantile_clip(clip["adaptive"], quantile=clip["quantile"])


def build(
    method: str, options: dict[str, Any], *, steps: int, privacy_four: dict[str, Any], side_information: Any = None
) -> dpopt.PrivateOptimizer:
    """The optimizer of one run.

    Args:
        method: a name in `NAMED`, or ``"combination"``: ``{"before": {...}, "after": {...}}`` with kinds from `BEFORE`
            (or ``"side information"``) and `AFTER`. ``gamma_share`` is AdamBC's floor as a share of the noise variance.
        options: arguments of the optimizer. ``learning_rate`` is a number; ``decay_to`` (optional, or None) is the
            share of it at which a linear decay ends. ``scale: "side information"`` stands for the task's own diagonal.
        steps: length of the run.
        privacy_four: clip norm, noise multiplier, expected batch size and key.
        side_information: the task's diagonal.
    """
    options = dict(options)
    rate = start = options.pop("learning_rate")
    decay_to = options.pop("decay_to", None)
    if decay_to is not None:
        rate = optax.linear_schedule(rate, rate * decay_to, steps)
    privacy_four = privacy_four | {"l2_clip_norm": clip_function(privacy_four["l2_clip_norm"])}
    if method != "combination":
        if options.get("scale") == "side information":
            options["scale"] = side_information
        if method == "PDA-DPMD":
            options["total_steps"] = steps
        return NAMED[method](rate, **options, **privacy_four)
    before, after = dict(options.get("before", {})), dict(options["after"])
    kind = before.pop("kind", None)
    if kind == "side information":
        preconditioner = dpopt.side_information(side_information)
    else:
        preconditioner = None if kind is None else BEFORE[kind](**before)
    core = dpopt.privatize(**privacy_four, preconditioner=preconditioner)
    if "gamma_share" in after:
        after["gamma"] = after.pop("gamma_share") * noise_in_mean(privacy_four) ** 2
    if after["kind"] == "schedule_free":  # with a constant rate
        return dpopt.chain(core, contrib.schedule_free(optax.sgd(start), start, b1=after["b1"]))
    rule = AFTER[after.pop("kind")](**after)
    return dpopt.chain(core, rule, optax.scale_by_learning_rate(rate))


def noise_in_mean(privacy_four: dict[str, Any]) -> float:
    """The standard deviation of the noise in a mean gradient; with correlated noise, the largest over steps."""
    clip, strategy = as_clip_function(privacy_four["l2_clip_norm"]), privacy_four.get("noise")
    one = privacy_four["noise_multiplier"] * clip.sensitivity / privacy_four["expected_batch_size"]
    return one if strategy is None else one * float(strategy.deviations[-1])


def state_bytes(optimizer: dpopt.PrivateOptimizer, params: Any) -> int:
    """The bytes of the optimizer state."""
    state = jax.eval_shape(optimizer.init, params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
