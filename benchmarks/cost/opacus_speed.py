"""Times Opacus's clipped gradient against torch's ordinary gradient, in the same process.

Needs torch and Opacus, but neither JAX nor dpopt. Ratios can be compared between libraries; seconds cannot.
"""

import argparse
import copy
import importlib.util
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, records
from benchmarks.cost import timing

MISSING = "the comparison with Opacus needs torch and opacus: pip install torch opacus"
PACKAGES = ("torch", "opacus", "numpy")


def installed() -> bool:
    """Whether both torch and Opacus can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "opacus"))


def relative_error(a: Sequence[Any], b: Sequence[Any]) -> float:
    """The largest difference between two lists of tensors, over the largest entry of the second."""
    largest = max(float(y.abs().max()) for y in b)
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) / largest


def ordinary(family: Any) -> Callable[[], list]:
    """The mean gradient that training without privacy computes."""
    from torch.nn import functional as F

    model = copy.deepcopy(family.model)
    params = dict(model.named_parameters())

    def call() -> list:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(family.x), family.y).backward()
        return [params[name].grad for name in family.names]

    return call


def hooks(family: Any, l2_clip_norm: float, diagonal: Sequence[Any] | None = None) -> Callable[[], list]:
    """The clipped sum of per-example gradients that hooks store on the parameters; a diagonal scales them first."""
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from torch.nn import functional as F

    model = GradSampleModule(copy.deepcopy(family.twin), loss_reduction="sum")
    params = list(model.parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(params, 0.1),
        noise_multiplier=0.0,
        max_grad_norm=l2_clip_norm,
        expected_batch_size=len(family.x),
        loss_reduction="sum",
    )

    def call() -> list:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(family.x), family.y, reduction="sum").backward()
        for p, d in zip(params, diagonal or (), strict=diagonal is not None):
            p.grad_sample.mul_(d)
        optimizer.clip_and_accumulate()
        return [p.summed_grad for p in params]

    return call


def ghost(family: Any, l2_clip_norm: float) -> Callable[[], list]:
    """The clipped sum by two backward passes: norms (for linear layers and embeddings without gradients), then sum."""
    import torch
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        copy.deepcopy(family.twin), max_grad_norm=l2_clip_norm, use_ghost_clipping=True, loss_reduction="sum"
    )
    params = list(model.parameters())
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(params, 0.1),
        noise_multiplier=0.0,
        max_grad_norm=l2_clip_norm,
        expected_batch_size=len(family.x),
        loss_reduction="sum",
    )
    loss = DPLossFastGradientClipping(model, optimizer, torch.nn.CrossEntropyLoss(reduction="sum"), "sum")

    def call() -> list:
        optimizer.zero_grad(set_to_none=True)
        loss(model(family.x), family.y).backward()
        return [p.grad for p in params]

    return call


def _norms(family: Any) -> Any:
    """The norms of the per-example gradients."""
    import torch
    from opacus import GradSampleModule
    from torch.nn import functional as F

    model = GradSampleModule(copy.deepcopy(family.twin), loss_reduction="sum")
    F.cross_entropy(model(family.x), family.y, reduction="sum").backward()
    return torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)


def measure(name: str, family: Any, budget_s: float) -> dict[str, Any]:
    """Times one model: torch's ordinary gradient, Opacus's hooks (with and without a diagonal) and its ghost clipping.

    Opacus's ghost clipping supports no diagonal: it computes the norms of unscaled gradients.
    """
    import torch

    clip = float(_norms(family).median())  # so that half of the examples are clipped
    diagonal = [0.5 + 1.5 * torch.rand_like(p) for p in family.twin.parameters()]
    calls = {
        "ordinary": ordinary(family),
        "Opacus hooks": hooks(family, clip),
        "Opacus hooks, diagonal": hooks(family, clip, diagonal),
        "Opacus ghost": ghost(family, clip),
    }
    # Without clipping, the sum is the batch size times the mean gradient. This checks that both models are equal.
    mean = [len(family.x) * g for g in calls["ordinary"]()]
    errors = {
        "Opacus hooks, no clip": relative_error(hooks(family, 1e9)(), mean),
        "Opacus ghost": relative_error(calls["Opacus ghost"](), calls["Opacus hooks"]()),
    }
    wrong = {n: e for n, e in errors.items() if not e < 1e-4}
    if wrong:
        raise AssertionError(f"{name}: Opacus's results differ: {wrong}")
    seconds = timing.with_few_slow(calls, {n: timing.seconds_of(c) for n, c in calls.items()}, budget_s)
    return {
        "family": name,
        "parameters": sum(p.numel() for p in family.model.parameters()),
        "seconds": seconds,
        "ratio": {n: s / seconds["ordinary"] for n, s in seconds.items()},
        "largest_relative_error": errors,
    }


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table: torch's ordinary gradient in ms, and ratios to it, for each model."""
    columns = [n for n in rows[0]["ratio"] if n != "ordinary"]
    body = [
        [r["family"], f"{1e3 * r['seconds']['ordinary']:.1f}", *(f"{r['ratio'][n]:.2f}" for n in columns)] for r in rows
    ]
    return [["model", "torch (ms)", *columns], *body]


def markdown(content: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    device, lines = content["environment"], cells(content["runs"])
    versions = device["versions"]
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    intro = (
        f"Time over torch's ordinary gradient of the same model, on {device['device']}, {device['threads']} of "
        f"{device['cores']} cores, with torch {versions['torch']} and Opacus {versions['opacus']}. Of the layers here, "
        "Opacus's ghost clipping covers linear layers and embeddings, without a diagonal; for the others, it forms "
        "per-example gradients one layer at a time. Opacus's LSTM is a Python loop, torch's is not."
    )
    return intro + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="measure only models whose name contains this text")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds to spend on timing each model (default 20)"
    )
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    main(options.out, options.only, options.seconds)


def main(out: Path, only: str | None, budget_s: float) -> None:
    """Measures every model (or those whose name contains ``only``) and writes ``opacus.json``."""
    if not installed():
        raise SystemExit(MISSING)
    import torch

    from benchmarks.cost.opacus_models import MODELS

    warnings.filterwarnings("ignore", "Full backward hook is firing")  # given where a model's input needs no gradient
    names = [n for n in MODELS if only is None or only.lower() in n.lower()]
    if not names:
        raise SystemExit(f"no model matches {only!r}; there are: {'; '.join(MODELS)}")
    path = out / "opacus.json"
    environment = records.environment(PACKAGES, device="cpu: cpu") | {"threads": torch.get_num_threads()}
    before = json.loads(path.read_text()) if path.exists() else {"environment": None, "runs": []}
    # Earlier results from the same machine and versions are kept unless measured again.
    found = {r["family"]: r for r in before["runs"] if before["environment"] == environment}
    for name in names:
        torch.manual_seed(0)
        found[name] = measure(name, MODELS[name](), budget_s)
        records.write_json(path, {"environment": environment, "runs": [found[n] for n in MODELS if n in found]})
    for line in cells([found[n] for n in MODELS if n in found]):
        print(f"{line[0]:30}", *(f"{cell:>24}" for cell in line[1:]))  # rich may not be installed beside torch
    print(f"Wrote {path}.")
