"""Fully sharded training: every device holds a part of the parameters, of Adam's moments and of the noise.

Try it without accelerators: XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/fully_sharded.py
"""

import common

from dpopt import sharding

if __name__ == "__main__":
    options = common.parsed(__doc__)
    mesh = sharding.make_mesh(options.devices)
    result = common.train_on(mesh, sharding.fully_sharded, replay=options.replay)
    kernel = result.params["hidden"]["kernel"]
    print(f"the first kernel is {kernel.shape}; a device holds {kernel.addressable_shards[0].data.shape} of it")
    common.report(result, mesh)
