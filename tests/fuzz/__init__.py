"""A fuzzer of the clipped sum: random losses, random neighbouring batches, and what one example moves.

* weights.py  what may lie between a parameter and its use
* losses.py   where weights meet the example, one function a kind
* program.py  a program drawn from a seed: loss, parameters, batches, diagonal, clip, engine
* check.py    runs one and compares it with float64 arithmetic on plain gradients

``python -m tests.fuzz --seed N`` runs one program, ``--programs N --json FILE`` many.
"""
