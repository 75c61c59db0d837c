"""Accuracy of private training: tasks, optimizers, suites of settings, and their runs."""
