"""Standard normals for `dpopt.noise`, from bits that are the same on every backend."""
