"""Trains a decoder with a billion parameters on text, with privacy for documents and parameters split over all devices.

    python examples/train_decoder.py --text corpus --epsilon 8 --directory runs/decoder

``--text`` is a folder of .txt files, each a document, read as bytes; or, with ``--vocabulary`` and ``--end``, a .npy
file of tokens. ``--predict`` compiles a step and prints the memory it takes, without training. The same command
resumes a run that was stopped. Needs dpopt[benchmarks,checkpoint].

THE UNIT OF PRIVACY IS THE DOCUMENT. A step draws documents, takes a few windows of each at random, and clips the
gradient of a document's mean loss: epsilon is for adding or removing one document, however long. If a person wrote
several, put them into one file. (dpopt and its statement call this unit a user.)

A small version, on eight simulated devices:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/train_decoder.py --text docs --layers 2 \
        --width 128 --length 64 --batch-size 16 --steps 10 --delta 1e-3
"""

import argparse
import contextlib
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import dpopt
from benchmarks.cost import llm_scaling
from benchmarks.data import documents
from dpopt import sharding, truncated, users
from dpopt.run.results import TrainResult
from dpopt.run.state import TrainState

CLIP_NORM = 1.0
MATRICES = {
    "embedding": 0,
    "qkv": 1,
    "out": 1,
    "gate": 1,
    "up": 1,
    "down": 1,
}  # number of leading axes that index layers
BOTH = ("data", "fsdp")


def loss_fn(params: Any, window: jax.Array) -> jax.Array:
    """Mean loss over the tokens of one window ``(length + 1,)``. (Only the causal mask gives their order.)"""
    follows = window[1:]
    foretold = jax.nn.log_softmax(llm_scaling.logits(params, jnp.maximum(window[:-1], 0)))
    losses = -jnp.take_along_axis(foretold, jnp.maximum(follows, 0)[:, None], axis=1)[:, 0]
    counts = follows != documents.PAD
    return jnp.sum(jnp.where(counts, losses, 0)) / jnp.maximum(jnp.sum(counts), 1)


def make_mesh(options: argparse.Namespace, kind: AxisType) -> Mesh:
    """``data`` copies of the parameters, each split over ``fsdp`` devices; documents are split over all devices."""
    return jax.make_mesh((options.data, jax.device_count() // options.data), BOTH, axis_types=(kind,) * 2)


def layout(tree: Any, mesh: Mesh) -> Any:
    """Shardings of parameters, or of a state with arrays like them: matrices split, everything else replicated.

    The axis that indexes layers is not split, since a scan reads them one by one.
    """

    def place(path: Any, x: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if not names or names[-1] not in MATRICES:
            return NamedSharding(mesh, PartitionSpec())
        axes = MATRICES[names[-1]]
        matrix = jax.ShapeDtypeStruct(x.shape[axes:], x.dtype)
        return NamedSharding(mesh, PartitionSpec(*[None] * axes, *sharding.fully_sharded(matrix, mesh, "fsdp").spec))

    return jax.tree_util.tree_map_with_path(place, tree)


def initialize(key: jax.Array, shapes: Any) -> Any:
    """Normal initial values, smaller for matrices that add to the residual stream the more layers there are."""
    layers = shapes["layers"]["out"].shape[0]

    def start(path: Any, x: Any) -> jax.Array:
        name = path[-1].key
        if name not in MATRICES:
            return jnp.ones(x.shape, x.dtype)
        own = jax.random.fold_in(key, sorted(MATRICES).index(name))
        stddev = 0.02 / (math.sqrt(2 * layers) if name in ("out", "down") else 1)
        return stddev * jax.random.normal(own, x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(start, shapes)


def make_plan(options: argparse.Namespace, num_documents: int) -> dpopt.Plan:
    """Clip, noise for the budget, Adam. All batches have one shape, so that a large model is compiled once."""
    ample = truncated.ample_batch_size(num_documents, options.batch_size, steps=options.steps, delta=options.delta)
    devices = jax.device_count()
    clip = dpopt.FlatClip(CLIP_NORM)
    if options.clip == "layerwise":
        clip = dpopt.LayerwiseClip(CLIP_NORM, scanned={"embedding": False, "layers": True, "last": False})
    secret = dpopt.secure_key(shared=True) if options.seed is None else jax.random.key(options.seed)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(1, options.steps // 20), max(2, options.steps)
    )
    return (
        dpopt.Builder(
            num_examples=num_documents,
            expected_batch_size=options.batch_size,
            steps=options.steps,
            key=secret,
            sampling="truncated_poisson",
            max_batch_size=-(-ample // devices) * devices,
            unit="user",
        )
        .clip(clip)
        .budget(epsilon=options.epsilon, delta=options.delta)
        .then(optax.adam(rate))
        .build()
    )


def predict(plan: dpopt.Plan, shapes: Any, options: argparse.Namespace) -> dict[str, float]:
    """Compiles a private and an ordinary step for the available devices, and prints the memory each takes."""
    mesh, automatic = make_mesh(options, AxisType.Explicit), make_mesh(options, AxisType.Auto)
    size = plan.sampler.scheme.max_batch_size
    adam = optax.adam(1e-3)

    def placed(tree: Any, mesh: Mesh) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout(tree, mesh))

    def rows(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.along_rows(shape[0], mesh, BOTH))

    def ordinary(params: Any, state: Any, windows: jax.Array) -> Any:
        def mean(params: Any) -> jax.Array:
            return jnp.mean(jax.vmap(jax.vmap(loss_fn, (None, 0)), (None, 0))(params, windows))

        updates, state = adam.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    def memory(step: Any, init: Any, mesh: Mesh, *batch: Any) -> Any:
        states = placed(shapes, mesh), placed(jax.eval_shape(init, shapes), mesh)
        places = jax.tree.map(lambda x: x.sharding, states)
        compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=places).lower(*states, *batch).compile()
        return compiled.memory_analysis()

    private = plan.train_step(users.per_user_grads(loss_fn, memory=options.memory))
    windows = (size, options.windows, options.length + 1)
    batch = users.Users(rows(windows, jnp.int32, mesh), rows(windows[:2], bool, mesh))
    own = memory(lambda p, s, *b: private(p, s, *b)[:2], plan.optimizer.init, mesh, batch, rows((size,), bool, mesh))
    usual = memory(ordinary, adam.init, automatic, rows(windows, jnp.int32, automatic))
    ratio = own.temp_size_in_bytes / usual.temp_size_in_bytes
    count = sum(x.size for x in jax.tree.leaves(shapes))
    print(
        f"{count:,} parameters on {jax.device_count()} devices; a batch has room for {size} documents of "
        f"{options.windows} windows of {options.length} tokens\n"
        f"a device holds {own.argument_size_in_bytes / 1e9:.3g} GB of parameters, Adam's moments and data\n"
        f"a private step ({options.clip} clip) takes {own.temp_size_in_bytes / 1e9:.3g} GB beside them, an ordinary "
        f"one {usual.temp_size_in_bytes / 1e9:.3g} GB: {ratio:.2f} times as much\n"
        "compiled, not run; other devices than these may plan their memory otherwise"
    )
    return {"private": own.temp_size_in_bytes, "ordinary": usual.temp_size_in_bytes, "ratio": ratio}


def held_out_loss(params: Any, windows: documents.Windows, options: argparse.Namespace, most: int = 1024) -> float:
    """Mean loss over the first ``most`` windows of held-out documents."""
    mesh = make_mesh(options, AxisType.Auto)  # outside the engine XLA may split the loss over devices
    params = jax.tree.map(jax.device_put, params, layout(params, mesh))
    mean = jax.jit(lambda p, w, counts: jnp.sum(jnp.where(counts, jax.vmap(loss_fn, (None, 0))(p, w), 0)))
    together, total, count = 8 * mesh.size, 0.0, min(most, len(windows))
    for first in range(0, count, together):
        rows = np.arange(first, first + together)
        batch = windows(np.minimum(rows, count - 1)), rows < count
        total += float(mean(params, *sharding.shard_batch(batch, mesh, BOTH)))
    return total / count


def read(options: argparse.Namespace, path: Path) -> documents.Windows:
    return documents.read(path, options.length, vocabulary=options.vocabulary, end=options.end)


def train(plan: dpopt.Plan, windows: documents.Windows, shapes: Any, options: argparse.Namespace) -> TrainResult:
    """Trains on all devices, from random parameters or from the checkpoint in the directory."""
    mesh = make_mesh(options, AxisType.Explicit)
    key = jax.random.key(0)  # of the initial parameters: not secret
    params = jax.jit(lambda key: initialize(key, shapes), out_shardings=layout(shapes, mesh))(key)
    states = jax.eval_shape(plan.optimizer.init, params)
    state = TrainState(params, jax.jit(plan.optimizer.init, out_shardings=layout(states, mesh))(params))
    # The sampler's seed is the same in all processes, so they all draw the same windows.
    groups = users.group(windows.document, max_examples=options.windows, how="resample", seed=plan.sampler.seed)
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if options.directory is not None:
            from dpopt.run.checkpoint import Checkpointer

            checkpointer = stack.enter_context(Checkpointer(options.directory, every=options.save_every))
        return plan.run(
            users.per_user_grads(loss_fn, memory=options.memory),
            state,
            groups.batches(windows),
            place_batch=lambda rows: sharding.shard_batch(rows, mesh, BOTH),
            checkpointer=checkpointer,
            prefetch=2,
        )


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of .txt files, one of them, or .npy of tokens")
    parser.add_argument("--held-out", type=Path, help="the same, with held-out documents to test on")
    parser.add_argument("--vocabulary", type=int, help="of a .npy file: how many tokens there are")
    parser.add_argument("--end", type=int, help="of a .npy file: the token that ends a document")
    parser.add_argument("--layers", type=int, default=15, help="(default 15: a billion parameters with --width 2048)")
    parser.add_argument("--width", type=int, default=2048, help=f"a multiple of {llm_scaling.HEAD} (default 2048)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window (default 1024)")
    parser.add_argument("--windows", type=int, default=1, help="of a document in a batch, drawn anew (default 1)")
    parser.add_argument("--epsilon", type=float, default=8.0, help="budget of the whole run (default 8)")
    parser.add_argument("--delta", type=float, default=1e-6, help="below one over the documents (default 1e-6)")
    parser.add_argument("--batch-size", type=int, default=256, help="expected documents in a batch (default 256)")
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of Adam, at its highest (default 3e-4)")
    parser.add_argument("--clip", choices=("layerwise", "flat"), default="layerwise", help="one pass, or two")
    parser.add_argument("--memory", type=float, default=1.25, help="that a flat clip may take, over an ordinary step's")
    parser.add_argument("--data", type=int, default=1, help="copies of the parameters (default 1: each device a part)")
    parser.add_argument("--directory", type=Path, help="where checkpoints and the journal of the budget are kept")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints (default 100)")
    parser.add_argument("--predict", action="store_true", help="compile, print what memory a step takes, and stop")
    parser.add_argument("--seed", type=int, help="for tests; without it noise and batches are secret")
    options = parser.parse_args(argv)
    if options.width < 1 or options.width % llm_scaling.HEAD:
        parser.error(f"--width must be a multiple of {llm_scaling.HEAD}, the width of a head; got {options.width}")
    if options.data < 1 or jax.device_count() % options.data:
        parser.error(f"--data must divide the number of devices, {jax.device_count()}; got {options.data}")
    for name in ("layers", "length", "windows", "batch_size", "steps", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parsed(argv)
    try:
        windows = read(options, options.text)
        held_out = None if options.held_out is None else read(options, options.held_out)
    except (documents.MissingData, documents.DamagedData) as error:
        raise SystemExit(str(error)) from None
    shapes = llm_scaling.parameters(options.layers, options.width, windows.vocabulary)
    plan = make_plan(options, windows.documents)
    if options.predict:
        predict(plan, shapes, options)
        return
    print(plan.summary(shapes))
    result = train(plan, windows, shapes, options)
    spent = result.epsilon(delta=options.delta)
    print(f"epsilon {spent:.2f} at delta {options.delta:g} for one document of {windows.documents}")
    if held_out is not None:
        print(f"held-out loss {held_out_loss(result.params, held_out, options):.3f} a token")
    print(result.message)
    print(result.statement(delta=options.delta))
    print("Here a user is a document, with all its windows.")


if __name__ == "__main__":
    main()
