"""Privacy statements: as text, in JSON, as a curve, and from a shell."""

import json
import re
import subprocess
import sys

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import DATA, loss_fn, tiny_plan
from scipy import stats

import dpopt
from dpopt import __main__ as shell
from dpopt import events
from dpopt.run import checkpoint, journal, statement
from dpopt.trade_off import true_positive_rates

RATES = np.array([0.0, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])


def assert_stated(text, epsilon, delta):
    """What is printed is at least what was found, and not much more."""
    printed = float(re.search(r"The training is \(epsilon = ([0-9.e-]+), delta = ([0-9.e-]+)\)", text).group(1))
    assert epsilon <= printed <= 1.01 * epsilon and f", delta = {delta})" in text


@pytest.mark.parametrize("epsilon", [0.0045280463, 0.020746, 1.0, 1.0000001, 7.999, 99.96, 123.4, 1e5, 3.14159e-9])
def test_no_statement_claims_less_than_was_found(epsilon):
    text = statement._up(epsilon, zeros=True)
    assert epsilon <= float(text) <= 1.01 * epsilon and float(statement._up(epsilon)) == float(text)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sigma", [2.0, 9.0, 30.0, 100.0])
def test_no_attack_does_better_than_is_stated(sigma):
    stated = statement.state(dp.GaussianDpEvent(sigma), delta=1.2349e-5)
    said = re.findall(r"detects ([0-9.e-]+)% at ([0-9.]+)% false alarms", str(stated))
    assert [float(rate) for _, rate in said] == [0.1, 1, 10]
    for detected, rate in said:
        exact = 100 * stats.norm.cdf(stats.norm.ppf(float(rate) / 100) + 1 / sigma)
        assert exact <= float(detected) <= 1.05 * exact
    for delta, epsilon in stated.to_json()["epsilons"].items():  # no smaller delta than epsilon is for
        assert epsilon >= dpopt.epsilon_of_event(dp.GaussianDpEvent(sigma), delta=float(delta))


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_trade_off_of_a_gaussian_is_the_one_in_closed_form(sigma, accountant):
    found = true_positive_rates(dp.GaussianDpEvent(sigma), RATES, accountant=accountant)
    exact = stats.norm.cdf(stats.norm.ppf(RATES) + 1 / sigma)
    assert np.all(found >= exact - 1e-9)
    if accountant == "pld":
        np.testing.assert_allclose(found, exact, atol=2e-3)


def test_no_test_of_a_sampled_run_beats_the_curve_and_the_best_one_meets_it():
    """The likelihood ratio of three Poisson sampled steps, simulated: the best test there is."""
    q, sigma, steps, draws = 0.5, 1.0, 3, 400_000
    rng = np.random.default_rng(0)

    def ratio(x):
        return np.sum(np.log1p(q * (np.exp((2 * x - 1) / (2 * sigma**2)) - 1)), axis=1)

    absent = ratio(rng.normal(size=(draws, steps)) * sigma)
    present = ratio(rng.normal(size=(draws, steps)) * sigma + (rng.random((draws, steps)) < q))
    rates = np.array([0.01, 0.05, 0.2, 0.5])
    pairs = (absent, present), (-present, -absent)  # either may be the truth
    detected = np.max([[np.mean(b > np.quantile(a, 1 - rate)) for rate in rates] for a, b in pairs], axis=0)
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), steps)
    found = true_positive_rates(event, rates)
    assert np.all(found >= detected - 4e-3)
    assert np.all(found <= detected + 0.02)
    two_thirds = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(1.5 * sigma)), steps)
    assert not np.all(true_positive_rates(two_thirds, rates) >= detected - 4e-3)  # the check can fail


@pytest.mark.slow
def test_trade_offs_at_the_ends():
    nothing, everything = dp.NoOpDpEvent(), dp.NonPrivateDpEvent()
    np.testing.assert_array_equal(true_positive_rates(nothing, RATES), RATES)
    np.testing.assert_array_equal(true_positive_rates(everything, RATES), 1)
    np.testing.assert_array_equal(true_positive_rates(dp.GaussianDpEvent(1e-3), RATES), 1)
    hidden = true_positive_rates(dp.GaussianDpEvent(1e6), RATES)
    np.testing.assert_allclose(hidden, RATES, atol=1e-5)
    fixed = dp.SampledWithoutReplacementDpEvent(1_000, 10, dp.GaussianDpEvent(1.0))
    assert np.all(true_positive_rates(fixed, RATES, accountant="rdp") >= RATES)
    with pytest.raises(ValueError, match="accountant='rdp'"):
        true_positive_rates(fixed, RATES)


@pytest.mark.parametrize("rates", [[-0.1], [1.1], [np.nan], 0.5], ids=str)
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ValueError, match="false_positive_rates must be a list of numbers between 0 and 1"):
        true_positive_rates(dp.GaussianDpEvent(1.0), rates)


def _plan(**options):
    builder = dpopt.Builder(num_examples=100, expected_batch_size=10, steps=3, key=dpopt.secure_key())
    return builder.clip(1.0).noise(2.0, **options).then(optax.sgd(0.1)).build()


def _run(plan, **options):
    data = np.ones((100, 2), np.float32)
    return plan.run(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(2), lambda indices: data[indices], **options)


@pytest.mark.slow
def test_a_result_states_what_its_ledger_holds():
    plan = _plan()
    result = _run(plan)
    stated = result.statement(delta=1e-3)
    assert stated.epsilon == result.epsilon(delta=1e-3) == plan.statement(delta=1e-3).epsilon
    first, second, *table = str(stated).splitlines()
    assert_stated(first, stated.epsilon, "0.001")
    assert first.endswith("-differentially private for adding or removing one example.")
    assert "with one example as with none" in second
    words = "\n".join(table)
    for expected in (
        "3 x Gaussian noise of 1.999 times what adding or removing one example can change, on Poisson samples, each "
        "example with probability 0.1",
        "privacy loss distributions",
        "choosing settings by trials on the same data",
        f"dpopt {dpopt.__version__}",
    ):
        assert expected in words
    assert list(stated.epsilons()) == pytest.approx([1e-3, 1e-4, 1e-5, 1e-6])
    assert json.loads(json.dumps(stated.to_json()))["epsilon"] == stated.epsilon
    assert "key" not in repr(stated).lower()


def test_a_statement_says_what_kind_of_run_it_was():
    fixed = dp.SampledWithoutReplacementDpEvent(1_000, 10, dp.GaussianDpEvent(1.0))
    replaced = statement.state(dp.SelfComposedDpEvent(fixed, 5), delta=1e-4, unit="client")
    assert replaced.accountant == "rdp"
    text = str(replaced)
    assert "for replacing one client." in text and "with another in its place" in text
    assert "on samples of 10 out of 1000" in text and "Renyi divergences |" in text
    steps = [dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0 + n)) for n in range(9)]
    assert "... 6 more kinds of steps ..." in str(statement.state(dp.ComposedDpEvent(steps), delta=1e-5))
    assert "epsilon = inf" in str(statement.state(dp.NonPrivateDpEvent(), delta=1e-5))
    assert "nothing was released" in str(statement.state(dp.NoOpDpEvent(), delta=1e-5))


@pytest.mark.parametrize("delta", [0, -1, 1, 2])
def test_a_statement_refuses_deltas_out_of_range(delta):
    with pytest.raises(ValueError, match="delta"):
        statement.state(dp.GaussianDpEvent(1.0), delta=delta)


def test_a_plan_without_a_delta_asks_for_one():
    with pytest.raises(ValueError, match="no delta is set"):
        _plan().statement()


def test_the_curve_is_drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = statement.state(dp.GaussianDpEvent(1.0), delta=1e-5).plot()
    line, guess = axes.get_lines()
    np.testing.assert_allclose(line.get_ydata()[20], stats.norm.cdf(stats.norm.ppf(0.1) + 1), atol=2e-3)
    assert "epsilon 4.38 at delta 1e-05" in line.get_label() and guess.get_label() == "a guess"


RUN = ("--examples", "1000", "--batch-size", "50", "--steps", "100")


def test_epsilon_from_a_shell_is_the_librarys(capsys):
    assert shell.main(["epsilon", *RUN, "--noise-multiplier", "1.5", "--delta", "1e-5", "--json"]) == 0
    want = dpopt.epsilon(noise_multiplier=1.5, sampling_prob=0.05, steps=100, delta=1e-5)
    assert json.loads(capsys.readouterr().out)["epsilon"] == want
    epochs = ["--examples", "1000", "--batch-size", "50", "--epochs", "5"]
    assert shell.main(["epsilon", *epochs, "--noise-multiplier", "1.5", "--delta", "1e-5"]) == 0
    assert_stated(capsys.readouterr().out, want, "1e-05")


@pytest.mark.slow
def test_noise_from_a_shell_meets_the_budget(capsys):
    for sampling in ("poisson", "fixed"):
        budget = [*RUN, "--delta", "1e-5", "--sampling", sampling]
        assert shell.main(["calibrate", *budget, "--epsilon", "2", "--json"]) == 0
        sigma = json.loads(capsys.readouterr().out)["noise_multiplier"]
        assert shell.main(["epsilon", *budget, "--noise-multiplier", str(sigma), "--json"]) == 0
        assert 1.98 < json.loads(capsys.readouterr().out)["epsilon"] <= 2
    assert shell.main(["calibrate", *RUN, "--epsilon", "2"]) == 0
    assert "at delta 0.0001 after 100 steps, for adding or removing one example" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_stated_from_its_directory_also_while_it_goes_on(tmp_path, capsys):
    plan, seen = _plan(), []

    def look(step, _):
        assert shell.main(["statement", str(tmp_path), "--json"]) == 0
        seen.append(json.loads(capsys.readouterr().out))

    with checkpoint.Checkpointer(tmp_path) as keeper:
        result = _run(plan, checkpointer=keeper, on_step=look)
    assert len(seen) == 3 and seen[0]["epsilon"] < seen[1]["epsilon"] < seen[2]["epsilon"]
    assert seen[-1]["epsilon"] == result.epsilon(delta=1e-3) and seen[-1]["delta"] == 1e-3
    assert shell.main(["statement", str(tmp_path / "ledger.jsonl"), "--delta", "1e-4"]) == 0
    assert_stated(capsys.readouterr().out, result.epsilon(delta=1e-4), "0.0001")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["statement", "nowhere"], "No such file"),
        (["statement", "EMPTY"], "its run has not started"),
        (["statement", "DAMAGED"], "line 1 of"),
        (["epsilon", *RUN, "--noise-multiplier", "-1"], "noise"),
        (["epsilon", *RUN, "--noise-multiplier", "1", "--delta", "2"], "delta must be below 1"),
        (["calibrate", "--examples", "10", "--batch-size", "50", "--steps", "1", "--epsilon", "1"], "sampling_prob"),
        (["calibrate", *RUN[:3], "1.5", *RUN[4:], "--epsilon", "1", "--sampling", "fixed"], "an integer --batch-size"),
        (["epsilon", *RUN[:-1], "0", "--noise-multiplier", "1"], "steps"),
        (["calibrate", *RUN, "--epsilon", "0"], "epsilon"),
    ],
)  # fmt: skip
def test_mistakes_in_a_shell_are_named(arguments, message, tmp_path, capsys):
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "DAMAGED").write_text("0123 {}\n")
    arguments = [str(tmp_path / a) if a in ("EMPTY", "DAMAGED") else a for a in arguments]
    assert shell.main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.startswith(f"dpopt {arguments[0]}: ") and not out


@pytest.mark.slow
def test_the_shell_knows_the_package():
    command = [sys.executable, "-m", "dpopt", "calibrate", *RUN, "--epsilon", "2", "--delta", "1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("noise multiplier ") and not done.stderr


@pytest.mark.slow
def test_a_ledger_is_read_without_being_held(tmp_path):
    plan = _plan()
    with checkpoint.Checkpointer(tmp_path) as keeper:
        result = _run(plan, checkpointer=keeper)
    identity, ledger = journal.read(tmp_path / "ledger.jsonl")
    assert ledger == result.ledger and identity["num_examples"] == 100
    assert events.flattened(ledger.event).total() == 3
    assert isinstance(jax.tree.leaves(result.params)[0], jax.Array)


@pytest.mark.parametrize("delta", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1 / 3_000])
def test_smaller_deltas_are_as_one_writes_them(delta):
    """1e-5 * 0.1 is 1.0000000000000002e-06, and would be rounded up to 1.01e-06."""
    stated = statement.state(dp.GaussianDpEvent(2.0), delta=delta, accountant="rdp")
    assert [*stated.epsilons()] == [delta, *(pytest.approx(delta / 10**n, rel=1e-14) for n in (1, 2, 3))]
    assert ("1.01e-" in str(stated) or "1.01e-" in json.dumps(stated.to_json())) is False


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", ["epsilon", "calibrate", "statement"])
def test_the_shell_warns_of_a_delta_that_protects_nobody(command, tmp_path, capsys):
    arguments = {"epsilon": [*RUN, "--noise-multiplier", "1"], "calibrate": [*RUN, "--epsilon", "2"]}.get(command)
    if arguments is None:
        with checkpoint.Checkpointer(tmp_path) as checkpointer:
            tiny_plan().run(loss_fn, jnp.zeros(3), lambda i: DATA[i], steps=1, checkpointer=checkpointer)
        arguments = [str(tmp_path)]
    assert shell.main([command, *arguments, "--delta", "0.5"]) == 0
    assert capsys.readouterr().err.count("choose a delta well below 1/n") == 1
    assert shell.main([command, *arguments, "--delta", "1e-9"]) == 0
    assert not capsys.readouterr().err


def test_a_selection_among_fixed_samples_states_the_noise_that_a_run_has():
    """Queries on all data are halved for replace-one; within a selection they were halved twice."""
    fixed = events.from_json(events.to_json(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(4.0))))
    run = dp.ComposedDpEvent([dp.GaussianDpEvent(4.0), fixed])
    selection = dp.dp_event.RepeatAndSelectDpEvent(run, 5.0, 1.0)
    alone, within = (str(statement.state(event, delta=1e-5)) for event in (run, selection))
    said = re.findall(r"Gaussian noise of \S+ times", alone)
    assert said and re.findall(r"Gaussian noise of \S+ times", within) == said
