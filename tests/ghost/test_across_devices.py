"""What a clipped sum sends between devices."""

import ghost_cases
import pytest
from runs import ROOT, script


@pytest.mark.slow  # four processes, each of which compiles some thirty programs for eight devices
@pytest.mark.parametrize("part", range(4))
def test_only_sums_travel_between_devices(part):
    """Every coverage case, in one pass and in two: whatever the model, no examples and no gradients of theirs."""
    found = script(ROOT / "tests" / "programs" / "collectives_run.py", part, 4, devices=8, timeout=900)
    assert len(found) == 2 * len(ghost_cases.CASES[part::4])
    assert {case: sent for case, sent in found.items() if sent} == {}
