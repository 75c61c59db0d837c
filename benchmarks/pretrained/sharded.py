"""The pretrained Transformer trained privately on one device, on a mesh of simulated devices, and in two processes.

    python -m benchmarks.pretrained.sharded --out benchmarks/results

trains the same few steps in each of these ways, in separate processes, and records the largest difference between their
parameters and the time they took. With ``--save FILE`` it is one such process; the record has their commands.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks import records
from benchmarks.data import DamagedData, MissingData
from benchmarks.pretrained import bert, task, tokens, weights
from dpopt.run import meshes, sharding

# Relative to a move by the learning rate in every step. Sums differ in order, and Adam divides by small numbers.
TOLERANCE = 1e-4
RATE = 3e-3
SPENT: dict[str, Any] = {"delta": 1e-5, "accountant": "rdp"}


def arguments(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", choices=("lora", "all"), default="lora", help="what is trained")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="expected size of a batch (default 64)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a review that are read (default 64)")
    parser.add_argument("--mesh", help="of devices (default data=4,fsdp=2, and data=2 of two processes)")
    parser.add_argument("--data", type=Path, help="folder with the data (default: DPOPT_DATA, then ./data)")
    parser.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    parser.add_argument("--save", type=Path, help="train once, as this process is placed, and save the parameters here")
    words = "ADDRESS", "COUNT", "INDEX"
    parser.add_argument("--processes", nargs=3, metavar=words, help="with --save: one of several processes")
    return parser, parser.parse_args(argv)


def train(options: argparse.Namespace) -> None:
    """One run from a fixed key; saves its parameters and prints its figures as JSON."""
    mesh = meshes.start(options.mesh, options.processes)
    files = weights.folder(options.data)
    reviews = tokens.reviews(options.data, files, options.length)
    body, config = weights.load(files)
    model = bert.Classifier(body, config.hidden_size, task.CLASSES, rngs=nnx.Rngs(0))
    if options.train == "lora":
        bert.adapt(model.body, 8, rngs=nnx.Rngs(1))
    which = bert.trained(options.train, bert.first_trained(config.num_hidden_layers))
    loss_fn, params = dpopt.flax.nnx_loss(model, task.mean_loss, wrt=which)
    plan = (
        dpopt.Builder(
            num_examples=len(reviews.train_labels),
            expected_batch_size=options.batch_size,
            steps=options.steps,
            key=jax.random.key(0),
            pad_to=options.batch_size // 2 * 3,  # so that all batches have one shape
        )
        .clip(1.0)
        .budget(epsilon=8.0, **SPENT)
        .then(optax.adam(RATE))
        .build()
    )
    done = []
    settings: dict[str, Any] = {"replay": True, "verify": False, "on_step": lambda t, _: done.append(time.monotonic())}
    began = time.monotonic()
    data = tuple(reviews.train), reviews.train_labels
    if mesh is None:
        result = plan.run(loss_fn, params, data, **settings)
    else:
        result = meshes.train_on(mesh, plan, loss_fn, params, data, **settings)
    leaves = jax.tree.leaves(sharding.whole(result.params))
    moved = max(float(np.abs(a - b).max()) for a, b in zip(leaves, jax.tree.leaves(params), strict=True))
    if jax.process_index() == 0:
        np.savez(options.save, *leaves)
    figures = {
        "mesh": None if mesh is None else dict(mesh.shape),
        "processes": jax.process_count(),
        "trained_parameters": sum(np.size(x) for x in leaves),
        "steps": result.ledger.steps,
        "epsilon": result.epsilon(**SPENT),
        "largest_move": moved,
        "seconds": done[-1] - began,
        "seconds_per_later_step": (done[-1] - done[0]) / max(1, len(done) - 1),
    }
    print(json.dumps(figures))


def started(options: argparse.Namespace, folder: Path, name: str, devices: int, mesh: str | None, processes: int):
    """Figures (with the commands to repeat it) and parameters of a run in separate processes."""
    shared = ["--train", options.train, "--steps", str(options.steps), "--batch-size", str(options.batch_size)]
    shared += ["--length", str(options.length), *(["--mesh", mesh] if mesh else [])]
    where = ["--data", str(options.data)] if options.data else []
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices}"
    running, commands = [], []
    for number in range(processes):
        more = ["--processes", address, str(processes), str(number)] if processes > 1 else []
        line = ["-m", "benchmarks.pretrained.sharded", *shared, *more, "--save"]
        commands.append(" ".join([f"XLA_FLAGS={flags}", "python", *line, f"{name}.npz"]).replace(address, "ADDRESS"))
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, *line, str(folder / f"{name}.npz"), *where]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=records.ROOT))
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"a run failed; its command, with an address for ADDRESS: {commands[0]}")
    with np.load(folder / f"{name}.npz") as stored:
        leaves = [stored[key] for key in stored.files]
    return {"run": name, "commands": commands, **json.loads(printed[0].splitlines()[-1])}, leaves


def compare(options: argparse.Namespace) -> None:
    """Runs every way and records the differences from the run on one device.

    Raises:
        AssertionError: if a difference is too large.
    """
    mesh = options.mesh or "data=4,fsdp=2"
    ways = [("one device", 1, None, 1), ("a mesh of 8 devices", 8, mesh, 1), ("two processes", 1, "data=2", 2)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, devices, mesh, processes in ways:
            figures, leaves = started(options, Path(folder), name.replace(" ", "-"), devices, mesh, processes)
            expected = found[0][1] if found else leaves
            apart = max(float(np.abs(a - b).max()) for a, b in zip(leaves, expected, strict=True))
            found.append(({**figures, "largest_difference": apart}, leaves))
            print(f"{name}: {figures['seconds']:.0f} s, largest difference from one device {apart:.2g}", flush=True)
    runs = [figures for figures, _ in found]
    limit = TOLERANCE * RATE * options.steps
    settings = {k: getattr(options, k) for k in ("train", "steps", "batch_size", "length")}
    content = {"environment": records.environment(), "settings": settings, "tolerance": limit, "runs": runs}
    records.write_json(options.out / "pretrained-sharded.json", content)
    wrong = [run["run"] for run in runs if not run["largest_difference"] <= limit < run["largest_move"]]
    if wrong:
        raise AssertionError(f"not trained like one device (differences above {limit:.2g}): {', '.join(wrong)}")


def main(argv: list[str] | None = None) -> None:
    parser, options = arguments(argv)
    if options.processes and options.save is None:
        parser.error("--processes needs --save FILE: they are the processes of one run")
    try:
        (compare if options.save is None else train)(options)
    except (MissingData, DamagedData, ValueError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
