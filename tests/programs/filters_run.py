"""Norms and sums of losses with convolutions, by every engine, of a batch that is divided among devices."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpopt
from tests.helpers import preferring


def convolved(x, w):
    return jnp.tanh(lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0])


@jax.custom_vjp
def own_rule(x, w):
    return convolved(x, w)


own_rule.defvjp(lambda x, w: (convolved(x, w), (x, w)), lambda saved, y: jax.vjp(convolved, *saved)[1](y))
LOSSES = {
    "plain": lambda w, x: jnp.sum(convolved(x, w)),
    "cond": lambda w, x: lax.cond(x[0, 0] > 9, lambda w: 0.0, lambda w: jnp.sum(convolved(x, w)), w),
    "custom_vjp": lambda w, x: jnp.sum(own_rule(x, w)),
    "jit": lambda w, x: jnp.sum(jax.jit(convolved)(x, w)),
    "a filter of each example": lambda w, x: jnp.sum(jax.jit(convolved)(x, w * jnp.mean(x))),
    "twice": lambda w, x: jnp.sum(convolved(x, w) * convolved(x[::-1], w)),
    "remat": lambda w, x: jnp.sum(jax.checkpoint(convolved)(x, w)),
}


def main():
    warnings.simplefilter("ignore")
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 3, 4), (8, 8, 3)))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    divided = jax.device_put(w, whole), jax.device_put(x, rows), jax.device_put(jnp.ones(8, bool), rows)
    found = {}
    for name, loss in LOSSES.items():
        grads = np.stack([np.asarray(jax.jit(jax.grad(loss))(w, row), np.float64) for row in x])
        norms = np.linalg.norm(grads.reshape(8, -1), axis=1)
        expected = np.tensordot(np.minimum(1, 1 / norms), grads, 1)
        for engine in ("ghost", "ghost, joined", "auto", "vmap"):
            name_of_engine, _, method = engine.partition(", ")

            def clipped(w, x, mask, loss=loss, engine=name_of_engine):
                return dpopt.per_example_grads(loss, engine=engine)(w, x, mask=mask).clipped_sum(dpopt.FlatClip(1.0))

            with preferring(method):
                got = jax.jit(clipped)(*divided)
            off = np.abs(np.asarray(got.sensitive.norms) - norms).max(), np.abs(np.asarray(got.sum) - expected).max()
            found[f"{name}, {engine}"] = float(max(off))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
