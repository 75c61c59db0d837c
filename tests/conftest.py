"""Settings of all tests: reproducible hypothesis runs, and no silent promotion of ranks."""

import collections
from unittest import mock

import hypothesis
import jax
import pytest
from helpers import enable_x64

hypothesis.settings.register_profile(
    "dpopt",
    derandomize=True,
    max_examples=30,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("dpopt")


@pytest.hookimpl(tryfirst=True)  # before those that `-m` leaves out are removed
def pytest_collection_modifyitems(items):
    """Of the cases of a test marked ``one_in(n)``, every n-th runs in every run, the others with ``-m slow``."""
    seen = collections.Counter()
    for item in items:
        share = item.get_closest_marker("one_in")
        if share is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % share.args[0]:
                item.add_marker("slow")
            seen[test] += 1


@pytest.fixture(autouse=True, scope="module")
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="session")
def _two_processors():
    """Into how many parts a batch is split depends on the machine's processors."""
    with mock.patch("dpopt.ghost.splitting._processors", lambda: 2):
        yield


@pytest.fixture
def x64():
    """Runs the test with 64-bit types."""
    with enable_x64(True):
        yield


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def either_precision(request):
    """Runs the test twice: with 32-bit and with 64-bit types."""
    with enable_x64(request.param):
        yield request.param


@pytest.fixture
def count_draws(monkeypatch):
    """A list that grows by the structure of every noise draw made while tracing or running."""
    from dpopt import noise

    draws = []
    real = noise.standard_normal_like

    def counted(key, tree):
        draws.append(jax.tree.structure(tree))
        return real(key, tree)

    monkeypatch.setattr(noise, "standard_normal_like", counted)
    return draws
