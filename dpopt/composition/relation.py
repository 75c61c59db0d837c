"""The neighbouring relation: which data sets an attacker is to tell apart."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dp_accounting


class Relation(enum.Enum):
    """Which data sets are neighbours, with the names of ``dp_accounting``.

    *Privacy*: a description; it holds no data.

    >>> import dp_accounting
    >>> Relation.of(dp_accounting.NeighboringRelation.REPLACE_ONE)
    <Relation.REPLACE_ONE: 'replace one'>
    """

    ADD_OR_REMOVE_ONE = "add or remove one"
    REPLACE_ONE = "replace one"

    @classmethod
    def of(cls, relation: Relation | dp_accounting.NeighboringRelation) -> Relation:
        """The relation of this name, which may be one of ``dp_accounting``."""
        return cls[relation.name]
