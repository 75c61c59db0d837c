"""Trains in several processes, as on several hosts; each runs this same program. To start two on one machine:

    python examples/multi_process.py localhost:12355 2 0 &
    python examples/multi_process.py localhost:12355 2 1

On a cluster, ``jax.distributed.initialize()`` finds the arguments itself. All processes must have access to the
checkpoint directory. The first one writes the journal, and no process continues before a step is written there.
"""

import argparse

import jax

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="host and port of the first process")
    parser.add_argument("processes", type=int, help="how many there are")
    parser.add_argument("number", type=int, help="of this one, from 0")
    parser.add_argument("directory", nargs="?", help="where to keep checkpoints")
    parser.add_argument("--replay", action="store_true", help="noise and batches follow from the plan's key alone")
    options = parser.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(options.address, num_processes=options.processes, process_id=options.number)

    import common  # only now: it computes with JAX

    from dpopt import sharding

    mesh = sharding.make_mesh()
    result = common.train_on(mesh, sharding.replicated, options.directory, replay=options.replay)
    common.report(result, mesh)
