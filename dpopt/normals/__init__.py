"""Standard normals on every backend, bit for bit the same: what `dpopt.noise` draws."""
