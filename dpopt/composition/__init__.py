"""What a sequence of private steps costs together: bounds on epsilon that `dpopt.accounting` takes the smallest of."""
