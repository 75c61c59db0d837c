"""Set before JAX starts: tests compile thousands of tiny programs, and optimising them takes longer than running them.

``JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS= make test`` runs the same tests on programs as users compile them.
"""

import importlib.metadata
import os

import pytest

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if importlib.metadata.version("jaxlib").split(".")[:2] < ["0", "12"]:  # the older emitters: two thirds of the time
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")


@pytest.fixture(autouse=True)
def _a_process_of_its_own():
    """Tests and examples use the same few keys: each starts as a new process would, which has trained nothing."""
    from dpopt import entropy

    entropy._runs.clear()


@pytest.fixture(autouse=True)
def _not_verified(request, monkeypatch):
    """Runs are compared with plain gradients in tests/test_verification.py; elsewhere that would compile all twice."""
    from dpopt import verification

    if request.node.path.name != "test_verification.py":
        monkeypatch.setattr(verification, "verify_once", lambda *args, **kwargs: None)
