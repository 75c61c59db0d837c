"""Data parallelism: the batch is split over devices, parameters and noise are replicated.

Try it without accelerators: XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/data_parallel.py
"""

import sys

import common

from dpopt import sharding

if __name__ == "__main__":
    counts = [int(x) for x in sys.argv[1:] if x.isdecimal()]
    mesh = sharding.make_mesh(*counts)
    common.report(common.train_on(mesh, sharding.replicated), mesh)
