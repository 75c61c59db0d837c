"""Upper bounds on the epsilon of a composition of steps; `dpopt.accounting` returns the smallest of them."""
