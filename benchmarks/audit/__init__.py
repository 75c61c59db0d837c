"""Lower bounds on epsilon by attack: of optimizers, of whole runs, and of what is built around them."""
