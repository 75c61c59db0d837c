"""Lower bounds on epsilon by attack."""
