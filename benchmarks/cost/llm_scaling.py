"""Memory and collectives of a language model's clipped gradient, sharded over many devices: compiled, not run.

Compiling needs neither the parameters nor the devices, so a CPU can tell how much memory each of 256 devices would
need. The model has the shape of Llama: scanned, rematerialised layers, and tied input and output embeddings. Parameters
are fully sharded, and each device has two examples. Every row is compiled in its own process, because the number of
devices is fixed when a process starts.
"""

import collections
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from rich.console import Console
from rich.table import Table

import dpopt
from benchmarks import records
from dpopt.run import sharding

HEAD, LENGTH, VOCABULARY, EACH = 128, 1024, 32_000, 2  # head width, tokens, vocabulary, examples per device
# Layers and width by number of parameters in billions.
SIZES = {"1.7": (24, 2048), "7": (26, 4096), "30": (42, 6656)}
DEVICES = (8, 64, 256)
TIMEOUT = 900  # seconds per row
_COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def parameters(layers: int, width: int, vocabulary: int | None = None) -> Any:
    """The shapes of the parameters."""
    shapes = {
        "embedding": (VOCABULARY if vocabulary is None else vocabulary, width),
        "layers": {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "gate": (layers, width, 4 * width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
            "before_attention": (layers, width),
            "before_mlp": (layers, width),
        },
        "last": (width,),
    }
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def _normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def _layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    heads = x.shape[-1] // HEAD
    h = _normalized(x, p["before_attention"])
    q, k, v = (z.reshape(1, -1, heads, HEAD) for z in jnp.split(h @ p["qkv"], 3, axis=-1))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    h = _normalized(x, p["before_mlp"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None


def logits(params: Any, tokens: jax.Array) -> jax.Array:
    """Logits ``(length, vocabulary)`` of the next token at each position of an example ``(length,)``."""
    x, _ = jax.lax.scan(jax.checkpoint(_layer), params["embedding"][tokens], params["layers"])
    return _normalized(x, params["last"]) @ params["embedding"].T


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of an example ``(LENGTH + 1,)``."""
    log_probs = jax.nn.log_softmax(logits(params, tokens[:-1]))
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[1:, None], axis=1))


def _ordinary(params: Any, batch: jax.Array) -> Any:
    return jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)


def _clipped(clip: Any) -> Any:
    return lambda p, b: dpopt.per_example_grads(loss)(p, b, mask=None).clipped_sum(clip).sum


WAYS = {
    "ordinary": _ordinary,
    "flat": _clipped(dpopt.FlatClip(1.0)),
    "layerwise": _clipped(dpopt.LayerwiseClip(1.0, scanned={"embedding": False, "layers": True, "last": False})),
}


def compiled(size: str, devices: int) -> dict[str, Any]:
    """Compiles every way for one model size on the devices of this process."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    shapes = parameters(*SIZES[size])

    def place(x):
        if x.size < 1 << 20:  # gains are replicated
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        layers = x.ndim - 2  # the layer axis is not sharded, because the scan reads one layer at a time
        inner = sharding.fully_sharded(jax.ShapeDtypeStruct(x.shape[layers:], x.dtype), mesh)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * layers, *inner.spec))

    places = jax.tree.map(place, shapes)
    args = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct((EACH * devices, LENGTH + 1), jnp.int32, sharding=rows)
    found = {}
    for name, way in WAYS.items():
        began = time.perf_counter()
        program = jax.jit(way, out_shardings=places).lower(args, tokens).compile()
        sent = re.findall(rf"= \S+ ({_COLLECTIVES})", program.as_text())
        found[name] = {
            "bytes": int(program.memory_analysis().temp_size_in_bytes),
            "collectives": dict(sorted(collections.Counter(sent).items())),
            "compile_seconds": time.perf_counter() - began,
        }
    count = sum(x.size for x in jax.tree.leaves(shapes))
    return {"size": size, "parameters": count, "devices": devices, "ways": found}


def _elsewhere(size: str, devices: int) -> dict[str, Any]:
    """`compiled`, in a new process with this number of simulated devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "benchmarks.cost.llm_scaling", size, str(devices)]
    env = {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"size": size, "devices": devices, "failed": f"not compiled within {TIMEOUT} s"}
    if done.returncode:
        return {"size": size, "devices": devices, "failed": (done.stderr.strip().splitlines() or ["killed"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def _cells(row: dict[str, Any]) -> list[str]:
    first = [f"{row['size']} billion", str(row["devices"])]
    if "failed" in row:
        return [*first, row["failed"], "", "", ""]
    ordinary = row["ways"]["ordinary"]

    def against(name: str) -> str:
        return f"{row['ways'][name]['bytes'] / ordinary['bytes']:.2f}"

    sent = " / ".join(str(sum(way["collectives"].values())) for way in row["ways"].values())
    seconds = " / ".join(f"{way['compile_seconds']:.0f}" for way in row["ways"].values())
    return [*first, f"{ordinary['bytes'] / 1e9:.2f} GB", against("flat"), against("layerwise"), sent, seconds]


_HEADER = [
    "parameters", "devices", "ordinary, per device", "flat clip", "layerwise clip", "collectives", "compile time, s",
]  # fmt: skip


def markdown(content: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    lines = [_HEADER, ["---"] * len(_HEADER), *map(_cells, content["runs"])]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        "Temporary memory of a clipped gradient over the ordinary one's. Collectives in the program and seconds to "
        f"compile are for the ordinary, flat and layerwise gradients. Compiled, not run.\n\n{table}"
    )


def main(out: Path, sizes: list[str], devices: list[int]) -> None:
    """Compiles and writes ``scaling-llm.json``, keeping its rows for other sizes and numbers of devices."""
    path, console = out / "scaling-llm.json", Console()
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    for size in sizes:
        for count in devices:
            row = _elsewhere(size, count)
            kept = [r for r in rows if (r["size"], r["devices"]) != (size, count)]
            rows = sorted([*kept, row], key=lambda r: (float(r["size"]), r["devices"]))
            records.write_json(path, {"environment": records.environment(), "runs": rows})
            console.print(*_cells(row), sep="  ")
    view = Table(*_HEADER, title="Clipped gradient of a language model, fully sharded")
    for row in rows:
        view.add_row(*_cells(row))
    console.print(view)
    console.print(f"Wrote {path}.")


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1], int(sys.argv[2]))))
