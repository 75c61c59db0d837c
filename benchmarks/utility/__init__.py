"""Accuracy of private training: tasks, optimizers, suites of settings, and runs of them."""
