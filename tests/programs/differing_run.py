"""One of two processes of a run: with settings that differ between them, and without; prints JSON."""

import json
import sys

import jax

if __name__ == "__main__":
    port, directory, number = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))

    import numpy as np
    import optax

    import dpopt
    from dpopt.run import sharding
    from dpopt.run.checkpoint import Checkpointer

    mesh = sharding.make_mesh()
    data = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    me = int(number)

    def train(key, seed=0, noise=1.0, params=0.0, steps=2, folder=None, every=2, data=data, is_split=True):
        builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=3, key=key, seed=seed, pad_to=32)
        plan = builder.clip(1.0).noise(noise).then(optax.sgd(0.1)).build()
        state = sharding.place_state(plan.optimizer, np.full(4, params, np.float32), mesh)
        try:
            result = dpopt.train(
                plan, lambda w, x: ((w - x) ** 2).sum(), state, lambda i: data[i], steps=steps,
                place_batch=(lambda rows: sharding.shard_batch(rows, mesh)) if is_split else None,
                checkpointer=None if folder is None else Checkpointer(folder, every=every),
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            return str(error)
        return [float(x) for x in np.asarray(result.params)]

    keys = jax.random.split(jax.random.key(1), 8)
    shared = dpopt.secure_key(shared=True)
    seen = {
        "own keys": train(dpopt.secure_key(), seed=None),
        "own seeds": train(keys[0], seed=me),
        "own plans": train(keys[1], noise=1.0 + me),
        "own parameters": train(keys[2], params=float(me)),
        "own steps": train(keys[3], steps=1 + me),
        "own directories": train(keys[4], folder=f"{directory}/{me}"),
        "own intervals": train(keys[6], folder=directory, every=1 + me),
        "own data": train(keys[7], data=data + me, is_split=False),  # the same noise on another sum
        "shared key": train(shared),
        "twice": train(keys[5]),
    }
    print(json.dumps(seen))
