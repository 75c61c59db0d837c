"""Several processes, as on several hosts: each runs this same program. Start two on this machine:

    python examples/multi_process.py localhost:12355 2 0 &
    python examples/multi_process.py localhost:12355 2 1

On a cluster, ``jax.distributed.initialize()`` finds the arguments by itself. All processes must see the checkpoint
directory; the first one keeps the journal, and no process goes on before a step is written there.
"""

import sys

import jax

if __name__ == "__main__":
    address, processes, number, *directory = [x for x in sys.argv[1:] if x != "--replay"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=int(processes), process_id=int(number))

    import common

    from dpopt.run.sharding import make_mesh, replicated

    mesh = make_mesh()
    common.report(common.train_on(mesh, replicated, *directory), mesh)
