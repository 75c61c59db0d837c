"""The rule taught in docs/adding_a_ghost_rule.md, in place of the engine's own."""

import re
from pathlib import Path

import ghost_cases
import jax
import pytest
from ghost_check import check, flat_clip

from dpopt.ghost.rules import base

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_ghost_rule.md"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [ghost_cases.table_of_two_indices, ghost_cases.table_of_two_indices_out_of_range],
    ids=lambda case: case.__name__,
)
def test_the_rule_that_is_taught_is_exact_for_every_look_up(case, x64, monkeypatch):
    """A rule that accepts a variant it does not handle makes norms too small, so that too little is clipped."""
    monkeypatch.setattr(base, "_RULES", {**base._RULES})
    names = {}
    exec(re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1], names)
    assert base._RULES[jax.lax.gather_p] is names["table_of_two_indices"]
    with jax.numpy_rank_promotion("allow"):
        check(*case(ghost_cases.Arrays()), clips=(flat_clip,))
