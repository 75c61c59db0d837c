"""One of two processes of a run: with settings that differ between them, and without; prints JSON."""

import json
import os
import pathlib
import shutil
import sys

import jax

if __name__ == "__main__":
    port, directory, number = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))

    import numpy as np
    import optax
    from jax.experimental import multihost_utils

    import dpopt
    from dpopt.run import sharding
    from dpopt.run.checkpoint import Checkpointer

    mesh = sharding.make_mesh()
    data = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    me = int(number)

    class Later:
        """Rows that are other ones in the second process once rows were compared."""

        def __init__(self):
            self.readings = 0

        def __getitem__(self, indices):
            self.readings += 1
            return data[indices] + (me if self.readings > 2 else 0)

    def copied(key):
        """A run that each process continues from a copy of its directory."""
        train(key, folder=f"{directory}/one", every=1)
        multihost_utils.sync_global_devices("copies")
        shutil.copytree(f"{directory}/one", f"{directory}/copy{me}")
        return train(key, folder=f"{directory}/copy{me}", every=1, steps=3)

    def damaged(key):
        """What one process wrote of the newest checkpoint is damaged: both continue from the one before it."""
        folder = pathlib.Path(directory) / "damaged"
        train(key, folder=folder, every=1, size=200_000)
        multihost_utils.sync_global_devices("saved")
        newest = max(Checkpointer(folder).positions())
        if me == 0:
            parts = (folder / "checkpoints" / str(newest)).glob("state/ocdbt.process_1/d/*")
            os.truncate(max(parts, key=lambda path: path.stat().st_size), 100)
        multihost_utils.sync_global_devices("truncated")
        train(key, folder=folder, every=1, steps=3, size=200_000)
        multihost_utils.sync_global_devices("continued")
        return sorted(path.name.split("-")[0] for path in folder.iterdir())

    def loss(w, example):
        x = example[0] if isinstance(example, tuple) else example
        return ((w[:4] - x) ** 2).sum()

    def train(
        key, seed=0, noise=1.0, params=0.0, steps=2, folder=None, every=2, data=data, is_split=True, size=4, own=None
    ):
        builder = dpopt.Builder(num_examples=64, expected_batch_size=8, steps=3, key=key, seed=seed, pad_to=32)
        plan = builder.clip(1.0).noise(noise).then(optax.sgd(0.1)).build()
        layout = sharding.replicated if size == 4 else sharding.fully_sharded
        state = sharding.place_state(plan.optimizer, np.full(size, params, np.float32), mesh, layout)
        try:
            result = dpopt.train(
                plan, loss, state, lambda i: data[i], steps=steps, example_key=own,
                place_batch=(lambda rows: sharding.shard_batch(rows, mesh)) if is_split else None,
                checkpointer=None if folder is None else Checkpointer(folder, every=every),
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            return str(error)
        return [float(x) for x in np.asarray(sharding.whole(result.params))[:4]]

    keys = jax.random.split(jax.random.key(1), 13)
    shared = dpopt.secure_key(shared=True)
    seen = {
        "own keys": train(dpopt.secure_key(), seed=None),
        "own example keys": train(keys[10], own=jax.random.key(me)),  # dropout, say
        "own seeds": train(keys[0], seed=me),
        "own plans": train(keys[1], noise=1.0 + me),
        "own parameters": train(keys[2], params=float(me)),
        "own steps": train(keys[3], steps=1 + me),
        "own directories": train(keys[4], folder=f"{directory}/{me}"),
        "own intervals": train(keys[6], folder=directory, every=1 + me),
        "own data": train(keys[7], data=data + me),
        "own order": train(keys[8], data=data[::-1] if me else data),  # an example may be in both parts of a batch
        "own data, later": train(keys[9], data=Later(), is_split=False),  # the same noise on another sum
        "own copies": copied(keys[12]),
        "damaged": damaged(keys[11]),
        "shared key": train(shared),
        "twice": train(keys[5]),
    }
    print(json.dumps(seen))
