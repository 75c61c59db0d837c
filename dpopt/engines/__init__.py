"""From a loss and a batch to a clipped sum: what both engines share, and the plain one (fast: `dpopt.ghost`)."""
