"""From a loss and a batch to a clipped sum: the ``vmap`` engine, and what it shares with `dpopt.ghost`."""
