"""Data parallelism: the batch is split over devices, parameters and noise are replicated.

Try it without accelerators: XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/data_parallel.py
"""

import common

from dpopt import sharding

if __name__ == "__main__":
    options = common.parsed(__doc__)
    mesh = sharding.make_mesh(options.devices)
    common.report(common.train_on(mesh, sharding.replicated, replay=options.replay), mesh)
