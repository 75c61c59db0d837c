"""Set before JAX starts: tests compile thousands of tiny programs, and optimising them takes longer than running them.

``JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test`` runs the same tests on fully optimised programs.
"""

import os

import pytest

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture(autouse=True)
def _a_process_of_its_own():
    """Tests and examples use the same few keys: each starts as a new process would, which has trained nothing."""
    from dpopt import entropy

    entropy._runs.clear()
