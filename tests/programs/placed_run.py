"""What is checked, and what runs, where parameters and batches lie on a mesh of 8 simulated devices."""

import json
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpopt


def strided(p, x):
    h = jnp.tanh(lax.conv_general_dilated(x[None, None], p["filters"], (2, 1), "SAME")[0].mean(1))
    return jnp.sum((h.repeat(2, 0) @ p["head"]).mean(0) ** 2)


def verified(mesh, engine, microbatch_size):
    """Whether the engine passes, and whether it is right, on a placement of which XLA's partitions may be wrong."""
    rng = np.random.default_rng(0)
    params = {"filters": rng.normal(size=(4, 1, 3, 3)) / 3, "head": rng.normal(size=(8, 4)) / 3}
    params, x = jax.tree.map(np.float32, (params, rng.normal(size=(12, 8, 8))))
    grads = dpopt.per_example_grads(strided, engine=engine, microbatch_size=microbatch_size)
    norms = jax.jit(lambda p, x: grads(p, x, mask=None).clipped_sum(dpopt.FlatClip(1.0)).sensitive.norms)
    specs = {"filters": P("tensor"), "head": P("data")}
    placed = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in params.items()}
    rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    try:
        dpopt.verify(strided, placed, rows, engine=engine, microbatch_size=microbatch_size)
        passes = True
    except dpopt.VerificationError:
        passes = False
    return [passes, bool(np.allclose(norms(placed, rows), norms(params, x), rtol=1e-4))]


def constrained(mesh):
    """Verifies a loss that names the devices of the mesh, whose gradient cannot be taken on one of them."""
    rng = np.random.default_rng(0)
    w, x = (np.float32(rng.normal(size=s)) for s in ((4, 8), (8, 4)))
    place = NamedSharding(mesh, P("tensor"))

    def loss(w, x):
        return jnp.sum(lax.with_sharding_constraint(jnp.tanh(x @ w), place))

    dpopt.verify(loss, jax.device_put(w, NamedSharding(mesh, P(None, "tensor"))), jax.device_put(x, place))
    return True


def explicit(mesh):
    """Ways to a clipped sum on a mesh with explicit axes, by their distance from one device."""
    rng = np.random.default_rng(0)
    w, x, many = (np.float32(rng.normal(size=s)) for s in ((4, 8), (8, 4), (8, 3, 4)))
    specs = P(None, "tensor"), P("data"), P("data"), P("data", None, "tensor")
    clip = dpopt.FlatClip(1.0)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    stacked = np.asarray(jax.vmap(jax.grad(loss), (None, 0))(w, x))
    ways = {
        "shift": lambda w, x, many, g: dpopt.per_example_grads(loss)(w, x, mask=None).shift(0.1).clipped_sum(clip).sum,
        "scale": lambda w, x, many, g: dpopt.per_example_grads(loss)(w, x, mask=None).scale(0.5).clipped_sum(clip).sum,
        "users": lambda w, x, many, g: dpopt.users.per_user_grads(loss)(w, many, mask=None).clipped_sum(clip).sum,
        "stacked": lambda w, x, many, g: dpopt.clip_and_sum(1.0).update(g, None, w)[0],
    }
    args = w, x, many, stacked
    placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(args, specs, strict=True)]

    def total(way, args):
        found = jax.jit(way)(*args)
        return np.asarray(getattr(found, "total", found))

    return {name: float(np.abs(total(way, placed) - total(way, args)).max()) for name, way in ways.items()}


def learned_image(mesh):
    """By how much of its sensitivity one example moves the sum, of a filter applied to an image that is learned, too.

    XLA multiplies the gradient of such a filter by the devices along another axis than the image's."""
    rng = np.random.default_rng(0)
    params = {"filter": rng.normal(size=(2, 2, 3, 4)), "image": rng.normal(size=(1, 4, 4, 3))}
    params, x = jax.tree.map(np.float32, (params, rng.normal(size=(8, 3, 3, 4))))
    specs = {"filter": P(), "image": P(None, None, "tensor")}
    placed = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in params.items()}
    rows, clip = jax.device_put(x, NamedSharding(mesh, P("data"))), dpopt.FlatClip(1.0)

    def loss(p, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        image = lax.conv_general_dilated(p["image"], p["filter"], (1, 1), "VALID", dimension_numbers=numbers)[0]
        return jnp.sum(jnp.tanh(image * x) ** 2)

    grads = dpopt.per_example_grads(loss)
    total = jax.jit(lambda p, x, mask: grads(p, x, mask=mask).clipped_sum(clip).sum)
    apart = jax.tree.map(jnp.subtract, total(placed, rows, np.ones(8, bool)), total(placed, rows, np.arange(8) != 3))
    return float(np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(apart))))


def resumed(mesh):
    """Steps after each of two calls of a run whose parameters the caller has placed, and the optimizer's state not."""
    from dpopt.run.checkpoint import Checkpointer

    x = np.float32(np.random.default_rng(0).normal(size=(64, 8)))
    w, steps = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("tensor"))), []
    with tempfile.TemporaryDirectory() as folder:
        for last in (2, 4):
            builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=4, key=dpopt.secure_key(), pad_to=32)
            plan = builder.clip(1.0).noise(2.0).then(optax.adam(0.1)).build()
            with Checkpointer(folder, every=2) as checkpointer:
                result = plan.run(
                    lambda w, x: jnp.sum((jnp.tanh(w) - x) ** 2), w, x, steps=last, checkpointer=checkpointer
                )
            steps.append(result.state.update)
    return steps


def main():
    warnings.simplefilter("ignore")
    automatic, typed = (jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2) for kind in
                        (AxisType.Auto, AxisType.Explicit))  # fmt: skip
    ways = ("vmap", None), ("ghost", 5), ("ghost", None)
    found = {"verified": [verified(automatic, *way) for way in ways], "constrained": constrained(automatic)}
    found["moved"] = learned_image(automatic)
    found["resumed"] = [resumed(automatic), resumed(typed)]
    print(json.dumps(found | {"explicit": explicit(typed)}))


if __name__ == "__main__":
    main()
