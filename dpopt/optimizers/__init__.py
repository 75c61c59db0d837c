"""Named optimizers: each a chain of parts, with its paper's defaults."""
