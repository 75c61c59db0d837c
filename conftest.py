"""Set before JAX starts: tests compile thousands of tiny programs, and optimising them takes longer than running them.

``JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS= make test`` runs the same tests on programs as users compile them.
"""

import gc
import importlib.metadata
import os
import tempfile

import pytest

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1", "--xla_cpu_multi_thread_eigen=false"]  # workers share the cores
if importlib.metadata.version("jaxlib").split(".")[:2] < ["0", "12"]:  # the older emitters: two thirds of the time
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# Workers and the processes that tests start compile much that is the same.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="dpopt-tests-")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": _cache.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
gc.set_threshold(200_000, 20, 100)  # tracing makes millions of objects, few of them garbage


@pytest.fixture(autouse=True)
def _a_process_of_its_own():
    """Tests and examples use the same few keys: each starts as a new process would, which has trained nothing."""
    from dpopt.run import entropy

    entropy._runs.clear()


@pytest.fixture(autouse=True)
def _not_verified(request, monkeypatch):
    """Runs are compared with plain gradients in tests/test_verification.py; elsewhere that would compile all twice."""
    from dpopt import verification

    if request.node.path.name != "test_verification.py":
        monkeypatch.setattr(verification, "verify_once", lambda *args, **kwargs: None)
