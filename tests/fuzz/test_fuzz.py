"""Random programs, a few in every run; ``python -m tests.fuzz`` runs more. A failure names its seed."""

import json
import os
import pathlib

import jax
import pytest
from emulated_gpu import emulated_gpu
from helpers import slow_unless

from dpopt.ghost import multiples, products

from . import check, program

PROGRAMS = int(os.environ.get("DPOPT_FUZZ_PROGRAMS", "100"))
_PARTS = 16  # tests, which workers share


@pytest.fixture(autouse=True)
def _settings():
    with jax.numpy_rank_promotion("allow"):
        yield
    jax.clear_caches()  # programs have nothing in common


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", slow_unless(range(_PARTS // 8), range(_PARTS)))
def test_no_example_moves_the_sum_further(part):
    for seed in range(part, PROGRAMS, _PARTS):
        outcome = check.run(seed, compare=seed % 6 == 0)
        assert not outcome.failures, f"python -m tests.fuzz --seed {seed}: {outcome.failures}"
        assert outcome.kind != "fell_back", f"seed {seed}: the ghost engine can run all of these"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_no_example_moves_the_sum_further_on_a_gpu(part):
    """Contributions are not compared with plain gradients, which a GPU rounds, too."""
    for seed in range(4 * part, 4 * part + 4):
        with emulated_gpu(keeps=seed % 2 == 1):
            outcome = check.run(seed, compare=False)
        assert not outcome.failures, f"seed {seed} on an emulated GPU: {outcome.failures}"


def _drawn_as_then(monkeypatch):
    """Without what programs of the same seeds have been given since."""
    for share in ("PAIRED", "MADE_OF_PRODUCTS", "STOPPED", "CROSSED", "COMPLEX", "EXPERTS", "REORDERED"):
        monkeypatch.setattr(program, share, 0.0)


# Found in long runs: terms that cancel beside a bad example, gradients that are roundings and nothing else, cotangents
# that were computed twice, products with coefficients that vanished. (10013 fell back: an error while it was traced.)
@pytest.mark.parametrize("seed", [786, 807, 1680, 1976, 2276, 2301, 5165, 8007, 9421, 10013, 21135])
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.one_in(4)
def test_programs_that_once_exceeded(monkeypatch, seed, fast):
    _drawn_as_then(monkeypatch)
    outcome = check.run(seed, fast=fast)
    assert not outcome.failures and outcome.kind == "ran"


# The first two exceeded while the inner product with a penalty was taken of other numbers than the norm.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [84_021, 84_070, *range(84_100, 84_120)])
def test_no_example_of_a_loss_with_a_penalty_moves_the_sum_further(monkeypatch, seed):
    _drawn_as_then(monkeypatch)
    monkeypatch.setattr(program, "PENALIZED", 1.0)
    outcome = check.run(seed, compare=seed % 4 == 0)
    assert not outcome.failures, f"seed {seed} with a penalty: {outcome.failures}"


_SHARES = ["MULTIPLIED", "MADE_OF_PRODUCTS", "PAIRED", "STOPPED", "CROSSED", "COMPLEX", "EXPERTS", "REORDERED"]


# Weights that are multiples of parameters or products of them, layers whose output is a constant, too, weights that are
# used in several ways, weights that meet complex numbers, experts, and weights and examples in another order.
@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", slow_unless([87_009], range(87_000, 87_040)))
@pytest.mark.parametrize("share", _SHARES)
def test_no_example_of_a_loss_with_such_weights_moves_the_sum_further(monkeypatch, share, seed):
    monkeypatch.setattr(program, share, 1.0)
    monkeypatch.setattr(multiples, "_saves_memory", lambda *_: True)
    monkeypatch.setattr(products, "_MOST_OPERATIONS", float("inf"))
    outcome = check.run(seed, compare=seed % 4 == 0)
    assert not outcome.failures, f"seed {seed} with {share}: {outcome.failures}"


def test_pages_state_what_was_run():
    """How many programs `fuzz.json` records: of the first ones, and of those with seeds of their own after them."""
    root = pathlib.Path(__file__).parents[2]
    record = json.loads((root / "benchmarks/results/fuzz.json").read_text())
    later = [run for run in record["runs"] if run["first_seed"] >= 20_000]
    clean = [run for run in later if not run["exceeding"]]
    assert [run["exceeding"] for run in later] == [1, *[0] * len(clean)]
    page = " ".join((root / "SECURITY.md").read_text().split())
    assert f"Of {record['programs']:,} random programs" in page
    assert f"Of {later[0]['programs']:,} later ones one did" in page
    said = f"of the {sum(run['programs'] for run in clean):,} after that none, {clean[-1]['programs']:,} of them by the"
    assert said in page
    assert sum(run["programs"] for run in later) == record["programs_of_later_commits"]


def test_a_seed_gives_one_program():
    one, other = program.draw(5), program.draw(5)
    assert one.features == other.features
    assert all((a[k] == b[k]).all() for a, b in zip(one.batches[:1], other.batches[:1], strict=True) for k in a)


def test_the_fuzzer_finds_a_clip_that_is_too_loose(monkeypatch):
    """A clip norm that is exceeded by a per mille does not go unnoticed."""
    import dpopt

    true = dpopt.FlatClip.coefficients
    monkeypatch.setattr(
        dpopt.FlatClip, "coefficients", lambda self, norms: jax.tree.map(lambda c: 1.001 * c, true(self, norms))
    )
    seeds = [s for s in range(40) if "FlatClip" in program.draw(s).features and "vmap" in program.draw(s).features]
    assert any(check.run(seed).failures for seed in seeds[:3])
