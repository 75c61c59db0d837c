"""A clipped gradient over an ordinary one where a batch is sharded over devices: time, memory, and what is sent.

Simulated devices share one processor, so times show only what is computed and sent in addition, not a speed-up.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from benchmarks import arguments, records
from benchmarks.cost import checked, gradients, timing
from benchmarks.cost.families import FAMILIES, Family
from benchmarks.cost.speed import clip_norm
from benchmarks.report import markdown as tables
from dpopt.run import sharding

WAYS = ("ordinary", "auto", "auto, diagonal")


def sent(program: str) -> Counter[str]:
    """How often a compiled program gathers or exchanges arrays, by kind. Sums over devices are not counted."""
    return Counter(re.findall(r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", program))


def measure(family: Family, mesh: Mesh, budget_s: float) -> dict[str, Any]:
    """Seconds, planned bytes of scratch memory per device, and collectives of every way, after a check of the results.

    Raises:
        AssertionError: if a clipped gradient differs from the one on a single device.
    """
    clip = clip_norm(family)
    functions = {
        "ordinary": gradients.ordinary(family),
        "auto": gradients.clipped(family, "auto", clip),
        "auto, diagonal": gradients.clipped(family, "auto", clip, scaled=True),
    }
    alone = family.params, family.batch, gradients.diagonal(family)
    places = sharding.replicated(family.params, mesh)
    params, diagonal = (jax.device_put(tree, places) for tree in (family.params, alone[2]))
    args = params, sharding.shard_batch(family.batch, mesh), diagonal
    calls, bytes_planned, moved = {}, {}, {}
    for name, function in functions.items():
        program = function.lower(*args).compile()
        calls[name] = checked.call(program, args)
        error = checked.relative_error(jax.device_get(program(*args)), jax.device_get(function(*alone)))
        assert error < 1e-3, f"{name}: the result on {mesh.size} devices differs from that on one by {error:.2g}"
        bytes_planned[name] = int(program.memory_analysis().temp_size_in_bytes)
        moved[name] = dict(sent(program.as_text()))
    seconds = timing.interleaved(calls, budget_s)
    return {"seconds": seconds, "scratch_bytes": bytes_planned, "sent": moved}


def markdown(content: dict[str, Any]) -> str:
    """Ratios to the ordinary gradient, for RESULTS.md."""
    head = ["family", *(f"{way}: {what}" for what in ("time", "scratch memory") for way in WAYS[1:]), "gathers"]
    lines = []
    for run in content["runs"]:
        ratios = [
            f"{run[what][way] / max(run[what]['ordinary'], 1e-12):.2f}"
            for what in ("seconds", "scratch_bytes")
            for way in WAYS[1:]
        ]
        more = sum((Counter(run["sent"][way]) - Counter(run["sent"]["ordinary"]) for way in WAYS[1:]), Counter())
        lines.append([run["family"], *ratios, "none" if not more else str(more.total())])
    device = content["environment"]
    intro = f"On {content['devices']} devices simulated on {device['device']}, {device['cores']} cores: time and "
    intro += "scratch memory per device over those of the ordinary gradient, and arrays gathered or exchanged besides."
    return f"{intro}\n\n" + tables.rows(head, lines, ["---", *["---:"] * (len(head) - 1)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, default=8, help="how many to simulate (default 8)")
    parser.add_argument("--only", action="append", help="part of a family's name (repeatable)")
    arguments.out(parser)


def run(options: argparse.Namespace) -> None:
    jax.config.update("jax_num_cpu_devices", options.devices)
    main(options.out, options.devices, only=options.only or ("",))


def main(out: Path, devices: int, *, only: Sequence[str] = ("",), budget_s: float = 5.0) -> None:
    """Measures the families whose names have one of ``only``, and writes ``mesh.json`` after each."""
    mesh, console, runs = sharding.make_mesh(devices), Console(stderr=True), []
    path = out / "mesh.json"
    for name in track([n for n in FAMILIES if any(part in n for part in only)], "families", console=console):
        runs.append({"family": name} | measure(FAMILIES[name](), mesh, budget_s))
        records.write_json(path, {"environment": records.environment(), "devices": devices, "runs": runs})
    print(f"Wrote {path}.")
