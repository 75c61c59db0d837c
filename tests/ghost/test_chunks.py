"""Sizes of the chunks in which a batch is processed."""

import jax
import pytest

from dpopt.ghost.chunks import together


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_every_device_has_an_equal_share_of_a_chunk(monkeypatch, devices):
    """Where it has one of the batch: otherwise rows would be sent to all others (44 rows of 176 on 8 devices)."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    for size in [*range(1, 60), 176, 1_024]:
        for chunk in (0, 1, 2, 3, 6, 11, 50, size):
            rows = together(size, chunk)
            assert size % rows == 0 and rows <= max(1, chunk) * devices
            assert size % devices or rows % devices == 0
    assert together(1_024, 16) == 16 * devices or devices == 3
