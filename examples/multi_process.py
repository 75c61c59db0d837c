"""Trains in several processes, as on several hosts; each runs this same program. To start two on one machine:

    python examples/multi_process.py localhost:12355 2 0 &
    python examples/multi_process.py localhost:12355 2 1

On a cluster, ``jax.distributed.initialize()`` finds the arguments itself. All processes must have access to the
checkpoint directory. The first one writes the journal, and no process continues before a step is written there.
"""

import sys

import jax

if __name__ == "__main__":
    address, processes, number, *directory = [x for x in sys.argv[1:] if x != "--replay"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=int(processes), process_id=int(number))

    import common

    from dpopt import sharding

    mesh = sharding.make_mesh()
    common.report(common.train_on(mesh, sharding.replicated, *directory), mesh)
