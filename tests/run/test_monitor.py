"""What a run shows while it trains: evaluations requested by the user, and a progress line on a terminal."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import DATA, DELTA, fetch, loss_fn, run, start, tiny_plan

import dpopt
from dpopt.run.checkpoint import Checkpointer


def distance(params):
    return {"distance": jnp.sqrt(sum(jnp.sum(p**2) for p in jax.tree.leaves(params))), "of": "zero"}


def test_a_run_is_evaluated_at_the_start_regularly_and_at_the_end():
    seen = {0: start()}
    result = run(
        tiny_plan(steps=7),
        eval_fn=distance,
        eval_every=3,
        on_step=lambda t, params: seen.__setitem__(t, jax.tree.map(jnp.copy, params)),
    )
    assert [e.step for e in result.history] == [0, 3, 6, 7]
    for step, value in result.history:
        assert value == {"distance": float(distance(seen[step])["distance"]), "of": "zero"}


def test_without_a_number_it_is_evaluated_twice():
    result = run(tiny_plan(steps=4), eval_fn=lambda params: np.zeros(2))
    assert [e.step for e in result.history] == [0, 4]
    assert isinstance(result.history[0].value, np.ndarray)
    assert run(tiny_plan(steps=2)).history == ()


def test_an_error_in_it_costs_nothing():
    plan = tiny_plan(steps=4)
    with pytest.raises(ZeroDivisionError):
        run(plan, eval_fn=lambda params: 1 / 0)
    assert plan.journal.ledger.steps == 0


@pytest.mark.slow
def test_the_average_is_evaluated_where_there_is_one():
    import optax

    plan = dpopt.Builder(num_examples=len(DATA), expected_batch_size=8, steps=3, key=jax.random.key(5))
    plan = plan.clip(1.0).noise(1.0).then(optax.sgd(1.0)).average(0.9).build()
    result = plan.run(loss_fn, start(), fetch, eval_fn=distance)
    assert result.history[-1].value == {"distance": float(distance(result.averaged_params)["distance"]), "of": "zero"}
    assert result.history[-1].value["distance"] != float(distance(result.params)["distance"])


@pytest.mark.slow
def test_a_resumed_run_goes_on_being_evaluated(tmp_path):
    run(tiny_plan(steps=6), steps=3, checkpointer=Checkpointer(tmp_path, every=1))
    result = run(tiny_plan(steps=6), checkpointer=Checkpointer(tmp_path, every=1), eval_fn=distance, eval_every=2)
    assert [e.step for e in result.history] == [3, 4, 6]


def test_a_terminal_gets_a_line_and_a_file_none(capsys):
    plan = tiny_plan(steps=5)
    run(plan, budget=dpopt.Budget(1e6, DELTA), progress=True, eval_fn=distance)
    line = capsys.readouterr().err
    assert "5/5" in line and "epsilon" in line and "distance" in line
    run(tiny_plan(steps=5))
    run(tiny_plan(steps=5), progress=False)
    assert capsys.readouterr().err == ""


def test_no_line_is_drawn_where_rich_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    run(tiny_plan(steps=1))
    with pytest.raises(ImportError, match="pip install rich"):
        run(tiny_plan(steps=1), progress=True)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"eval_every": 3}, ValueError, "needs an eval_fn to call; got eval_fn=None"),
        ({"eval_every": 0, "eval_fn": distance}, ValueError, "eval_every must be at least 1"),
        ({"eval_fn": 3}, TypeError, "eval_fn must be a function; got 3"),
        ({"on_step": "x"}, TypeError, "on_step must be a function; got 'x'"),
    ],
)
def test_mistakes_are_named_before_anything_is_drawn(options, error, message):
    plan = tiny_plan(steps=2)
    with pytest.raises(error, match=message):
        run(plan, **options)
    assert plan.journal.ledger.steps == 0
