"""How many rows floats may add up, and in which order, so that one row moves the sum by no more than it should.

A float32 sum of B rows of norm C, added up one after another, rounds at every step by up to ``u B C`` with
``u = 2**-24``, and one row more or less can change the sign of every rounding error. Together that is up to
``u B**2 C``: whole multiples of C at B = 28,666 (Casacuberta et al. 2022). Here at most `ROWS` rows are added up in
float32, in any order the device chooses, then a few of these blocks one after another, and then a few such groups.
Longer sums are pairs of floats, whose rounding is negligible. Neighbouring batches differ in one row of one block.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 86  # in a block: three blocks hold a batch of 256
BLOCKS = 3  # added up in floats


def lost(rows: int, *counts: int) -> int:
    """The rounding error of a sum of blocks of so many rows, in units of u C: see `ROUNDING`.

    The first of ``counts`` blocks are added up one after another, then the second of these sums, and so on."""
    total = rows**2
    for count in counts:
        total += rows * (count * (count + 1) - 2)
        rows *= count
    return total + 2 * rows


def floats_suffice(rows: int, *counts: int) -> bool:
    """Whether a sum of these blocks loses no more than is paid for."""
    return lost(rows, *counts) <= lost(ROWS, BLOCKS)


_NORM = 1024
PAIRS = 188
ROUNDING = (lost(ROWS, BLOCKS) + _NORM + PAIRS) * 2.0**-24
"""How much further than C one example can move a clipped float32 sum, in units of C: 6.0e-4, covered by every event.

In units of ``u = 2**-24`` this is 9984:

* 7396 for a block of n = 86 rows: the k-th addition in any order (or the k-th step of a matrix product, fused or not)
  rounds a partial sum of norm at most ``k C`` by at most ``u k C`` in L2. Together that is ``u (n (n + 1) / 2 - 1)``;
  the neighbour's block, of n - 1 rows, may be rounded the other way: less than ``u n**2``;
* 860 for adding up three blocks: sums of 2 n and 3 n rows, rounded once each, for both neighbours;
* 516 for the diagonal after the sum of three blocks, for both neighbours.
  More rows lose no more where blocks are smaller. Groups of g rows are added up like blocks: the k-th addition rounds a
  sum of k g rows. 512 rows in 4 groups of two blocks of 64 lose 4096 + 256 + 2304, and 1024 for the diagonal;
* 1024 for the norm by which the row was clipped;
* 188 for pairs of floats. M pairs, for a batch of B, lose less than ``3 u**2 B M``: 111 u for 400,000 examples in
  blocks of 258, 84 u for 200,000 in blocks of 86. (Smaller blocks are more numerous, but lose less each;
  `sums._stacked` has no more pairs than this allows.)

This is for rows that have norm C when they enter the sum. A gradient that is itself a sum over positions adds up larger
terms that cancel: SECURITY.md states what that adds. Float64 sums stay far below all of this.
"""


class Split(NamedTuple):
    """Rows in a ``number`` of parts of ``length``, one of which may be shorter."""

    length: int
    number: int

    @classmethod
    def into(cls, number: int, size: int) -> Split:
        return cls(-(-size // number), number)


def blocks(size: int) -> Split:
    """The blocks of a group of ``size`` rows."""
    return Split.into(-(-size // ROWS), size)


def groups(size: int) -> Split:
    """The groups of ``size`` rows."""
    found = levels(size)
    return Split.into(-(-size // (BLOCKS * ROWS)) if found is None else found[-1], size)


def levels(size: int) -> tuple[int, int, int] | None:
    """How floats can add up ``size`` rows: rows of a block, blocks of a group, groups. None: they cannot.

    These are the fewest groups. More are smaller, and so may their blocks be, but adding them up loses more."""
    fewest = -(-size // (BLOCKS * ROWS))
    for count in range(fewest, max(fewest, lost(ROWS, BLOCKS) // size) + 1):
        length, number = blocks(-(-size // count))
        found = length, number, count
        if floats_suffice(*found):
            return found
    return None
