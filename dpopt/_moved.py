"""Modules and top-level names that have moved since version 0.1. Both still work for one version, with a warning."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ROOMS = {
    "optimizers": ("averaging", "baselines", "filters"),
    "preconditioners": ("delayed", "moments"),
    "run": (
        *("allowance", "builder", "checkpoint", "entropy", "identity", "journal", "loading", "loop", "meshes", "plan"),
        *("results", "sharding", "statement", "training"),
    ),
    "samplers": ("parts", "truncated"),
}
MOVED = {f"dpopt.{name}": f"dpopt.{room}.{name}" for room, names in _ROOMS.items() for name in names} | {
    "dpopt.optimizers.after_noise": "dpopt.optimizers.baselines.after_noise",
    "dpopt.optimizers.dp2_extra_query": "dpopt.optimizers.baselines.two_queries",
    "dpopt.preconditioning": "dpopt.preconditioners.base",
}
_MODULES = {
    "baselines": (
        *("blend_public_gradients", "dp2_extra_query", "dp2_noise_first", "dp_adam_pub", "dp_r_pub", "extra_query"),
        *("pda_dpmd", "precondition_after_noise", "scale_by_public_adam"),
    ),
    "clipping": ("NormalizedClip",),
    "correlated": ("add_correlated_noise",),
    "gradients": ("PerExampleGrads",),
    "optimizers.adadps": ("broadcast_feature_scale", "scale_from_frequencies", "tfidf_scores"),
    "optimizers.adam_bc": ("scale_by_adagrad_bc", "scale_by_rms_bc"),
    "optimizers.averaging": ("averaged_params",),
    "optimizers.dp2": ("scale_by_phase_learning_rate",),
    "optimizers.public": ("with_public_arguments",),
    "preconditioners.base": ("scheduled_clip_norm",),
    "privacy": ("Privacy",),
    "run.allowance": ("steps_within",),
    "run.state": ("TrainState",),
    "run.journal": ("Journal", "JournalError"),
    "run.results": ("Evaluation", "ReplayError", "TrainResult"),
    "run.training": ("SensitiveMetrics", "TrainStep"),
    "samplers.parts": ("BallsInBinsSampler", "CyclicPoissonSampler", "EpochSampler"),
    "verification": ("VerificationError",),
}
# The module that has each name now, by the path that the name had.
NAMES = {f"dpopt.{name}": f"dpopt.{module}" for module, names in _MODULES.items() for name in names} | {
    "dpopt.events.privacy_event": "dpopt.inspection"
}


def attribute(module: str, name: str) -> Any:
    """The object that was ``module.name``; an AttributeError if the module never had that name."""
    old = f"{module}.{name}"
    if old not in NAMES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    place = NAMES[old]
    warnings.warn(f"{old} has moved: {place}.{name}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(MOVED.get(place, place)), name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the empty module by the one that has moved, so that both names are one module."""
        old = module.__name__
        warnings.warn(f"{old} has moved: {MOVED[old]}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])


def install() -> None:
    """Makes ``import`` find the modules that have moved."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
