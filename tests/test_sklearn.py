"""Linear models and the search over them keep scikit-learn's contracts and the ledger's, and peek at no data."""

import contextlib
import math

import dp_accounting
import numpy as np
import pytest
from helpers import paid

pytest.importorskip("sklearn")

from sklearn.base import clone, is_classifier, is_regressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import get_scorer
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import column_or_1d

from dpopt.run.journal import read
from dpopt.run.plan import Plan
from dpopt.sklearn import PrivateLinearClassifier, PrivateLinearRegressor, PrivateSearch

CHEAP = dict(noise_multiplier=1e-9, delta=1e-9, steps=30)  # next to no noise: what scikit-learn checks is not privacy


class ToldByTheLabels(PrivateLinearClassifier):
    """For scikit-learn's checks alone, which name no classes: reads them off the labels, which is not private."""

    def fit(self, X, y):
        with contextlib.suppress(Exception):  # of what is no label, the estimator itself must complain
            self.classes = np.unique(column_or_1d(y))
        try:
            return super().fit(X, y)
        finally:
            self.classes = None


class ToldByTheTargets(PrivateLinearRegressor):
    """The same for regression."""

    def fit(self, X, y):
        with contextlib.suppress(Exception):
            numbers = np.asarray(column_or_1d(y), np.float64)
            self.target_range = (numbers.min() - 1e-3, numbers.max() + 1e-3)
        try:
            return super().fit(X, y)
        finally:
            self.target_range = None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning", "ignore::DeprecationWarning")
@parametrize_with_checks([ToldByTheLabels(**CHEAP), ToldByTheTargets(**CHEAP)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def table(seed=0, rows=400, features=3):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(rows, features))
    return x, x @ np.arange(1, features + 1) + 0.3 * rng.normal(size=rows)


FREE = dict(noise_multiplier=0.0, delta=1e-5, l2_clip_norm=1e3, steps=300)  # no clip, no noise: the ordinary model


@pytest.mark.slow
def test_without_privacy_they_are_scikit_learns_own_models():
    x, y = table()
    x = 5 + 2 * x  # ranges that are not -1 to 1, and undone in the coefficients
    own = PrivateLinearRegressor(target_range=(-20, 20), feature_range=(3, 7), learning_rate=0.5, **FREE).fit(x, y)
    other = LinearRegression().fit(x, y)
    np.testing.assert_allclose(own.coef_, other.coef_, rtol=1e-2)
    np.testing.assert_allclose(own.intercept_, other.intercept_, rtol=1e-2)
    labels = np.digitize(y, [-1, 1])
    for classes in (2, 3):
        chosen = np.minimum(labels, classes - 1)
        own = PrivateLinearClassifier(classes=range(classes), feature_range=(3, 7), learning_rate=10.0, **FREE)
        other = LogisticRegression(C=1e6, max_iter=1_000).fit(x, chosen)
        own.fit(x, chosen)
        assert own.coef_.shape == other.coef_.shape
        np.testing.assert_allclose(own.predict_proba(x), other.predict_proba(x), atol=0.03)
        np.testing.assert_array_equal(own.decision_function(x).shape, other.decision_function(x).shape)


@pytest.mark.slow
def test_a_fit_costs_what_its_steps_do():
    x, y = table(rows=100)
    model = PrivateLinearRegressor(noise_multiplier=6.0, delta=1e-3, target_range=(-6, 6), steps=9).fit(x, y)
    steps = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(paid(6.0)), 9)
    exact = dp_accounting.pld.PLDAccountant().compose(steps).get_epsilon(1e-3)
    assert model.epsilon_ == pytest.approx(exact, rel=1e-3) == model.ledger_.epsilon(delta=1e-3)
    assert model.statement_.epsilon == model.epsilon_ == model.plan(100).epsilon(delta=1e-3)
    budgeted = clone(model).set_params(noise_multiplier=None, epsilon=1.5).fit(x, y)
    assert 1.49 < budgeted.epsilon_ <= 1.5


@pytest.mark.parametrize("seed", range(4))
def test_no_row_moves_what_is_trained_on_for_another(seed, monkeypatch):
    """Preparation is a row's own: whatever is added, the other rows reach the private run as they did."""
    rng = np.random.default_rng(seed)
    seen = []
    monkeypatch.setattr(Plan, "run", lambda self, loss, params, data, **options: seen.append((params, data)) or 1 / 0)
    x, y = table(seed, rows=20)
    models = [
        PrivateLinearRegressor(target_range=(-3, 3), feature_range=(-0.5, 0.5), **CHEAP),
        PrivateLinearClassifier(classes=[-1, 0, 1], **CHEAP),
    ]
    for model, targets, added in ((models[0], y, 1e6), (models[1], np.sign(y), 0.0)):
        more = np.vstack([x, rng.normal(size=3) * 10.0 ** rng.integers(-3, 6)]), np.append(targets, added)
        for rows in ((x, targets), more):
            with pytest.raises(ZeroDivisionError):
                model.fit(*rows)
        (params, data), (more_params, more_data) = seen[-2:]
        np.testing.assert_array_equal(params, more_params)
        for name in data:
            np.testing.assert_array_equal(data[name], more_data[name][:20])


def test_what_must_be_public_is_asked_for():
    x, y = table(rows=50)
    labels = y > 0
    for model, targets, said in (
        (PrivateLinearClassifier(**CHEAP), labels, "classes must list all labels that there may be"),
        (PrivateLinearClassifier(classes=[True], **CHEAP), labels, "classes must list two labels or more"),
        (PrivateLinearClassifier(classes=["a", "b"], **CHEAP), np.where(labels, "a", "c"), "not among the classes"),
        (PrivateLinearRegressor(**CHEAP), y, "target_range must say"),
        (PrivateLinearRegressor(target_range=(1, 1), **CHEAP), y, "low below high"),
        (PrivateLinearRegressor(target_range=3, **CHEAP), y, r"target_range must be \(low, high\)"),
        (PrivateLinearRegressor(target_range=(-6, 6), feature_range=([0, 1], [2, 3]), **CHEAP), y, "each of the 3"),
        (PrivateLinearRegressor(target_range=(-6, 6)), y, "set the budget"),
        (PrivateLinearRegressor(target_range=(-6, 6), epsilon=1.0), y, "set delta"),
        (PrivateLinearRegressor(target_range=(-6, 6), epsilon=1.0, **CHEAP), y, "one of both"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            model.fit(x, targets)
        assert "'c'" not in str(error.value)  # a row's own value


class StatesItsOwnCost(LogisticRegression):
    """An estimator that is not dpopt's, with the method that a search asks for the cost."""

    def plan(self, num_examples):
        raise AssertionError("a stranger was asked what it costs")


def private_search(**changes):
    model = PrivateLinearClassifier(classes=[False, True], feature_range=(-1, 1), steps=3)
    options = dict(epsilon=3.0, delta=1e-4, score_noise_multiplier=10.0, mean_trials=2.0) | changes
    return PrivateSearch(options.pop("estimator", model), options.pop("grid", {"learning_rate": [0.1, 1.0]}), **options)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["private", "public"])
def test_a_search_stays_within_its_budget_and_its_best_says_what_it_cost(score, tmp_path):
    x, y = table(rows=300)
    public = None if score == "private" else (x[:50], y[:50] > 0)
    search = private_search(public_rows=public, directory=tmp_path).fit(x, y > 0)
    assert 2.97 < search.epsilon_ <= 3.0
    best = search.best_estimator_
    assert best.epsilon_ == search.epsilon_ == search.statement_.epsilon == best.statement_.epsilon
    assert best.ledger_ == search.ledger_
    selection = search.ledger_.event.events[0].event
    assert selection.mean == 2.0 and selection.shape == 0.0
    parts = selection.event.events if score == "private" else [selection.event]
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(selection)
    assert accountant.get_epsilon(1e-4) == pytest.approx(search.epsilon_, rel=1e-6)
    assert len(parts) == (2 if score == "private" else 1) and parts[0].count == 3
    assert search.predict(x).shape == (300,) and search.predict_proba(x).shape == (300, 2)
    assert search.score(x, y > 0) == best.score(x, y > 0) and search.best_params_["learning_rate"] in (0.1, 1.0)
    assert not [name for name in vars(search) if "cv" in name or "trial" in name.removeprefix("mean_trials")]
    again = private_search(public_rows=public, directory=tmp_path).fit(x, y > 0)
    np.testing.assert_array_equal(again.best_estimator_.coef_, best.coef_)


@pytest.mark.slow
def test_a_directory_is_for_one_search(tmp_path):
    """What another estimator, another grid or another table found is not handed out as this one's."""
    x, y = table(rows=100)
    model = PrivateLinearClassifier(classes=np.array([False, True]), feature_range=(-1, np.float32(1)), steps=3)

    def fit(x=x, estimator=model, **changes):
        return private_search(estimator=estimator, directory=tmp_path, **changes).fit(x, y > 0)

    first = fit(grid={"l2_clip_norm": np.arange(1, 3)})
    same = fit(grid={"l2_clip_norm": [1, 2]}, estimator=clone(model).set_params(classes=[False, True], epsilon=9.0))
    np.testing.assert_array_equal(same.best_estimator_.coef_, first.best_estimator_.coef_)
    grid = {"l2_clip_norm": [1, 2]}
    for changes, said in (
        ({"estimator": clone(model).set_params(momentum=0.5)}, "identity.momentum: stored 0.9, now 0.5"),
        ({"estimator": clone(model).set_params(classes=[True, False, 7])}, "identity.classes: stored"),
        ({"estimator": PrivateLinearRegressor(target_range=(-1, 1), steps=3)}, "identity.estimator: stored"),
        ({"grid": {"l2_clip_norm": [1, 3]}}, "settings: stored"),
        ({"x": x[:, :2]}, "identity.features: stored 3, now 2"),
        ({"public_rows": (x, y > 0)}, "identity.public_rows: stored null, now .100, 3."),
        ({"epsilon": 2.0}, "trial.event.event.noise_multiplier: stored"),
        ({"score_noise_multiplier": 9.0}, "score: stored"),
    ):
        with pytest.raises(ValueError, match=rf"holds another search, or a run:\n(.*\n)*  {said}"):
            fit(**{"grid": grid} | changes)
    with pytest.raises(TypeError, match="parameters must be plain values"):
        fit(grid=grid, estimator=clone(model).set_params(classes={False, True}))


@pytest.mark.slow
def test_of_the_rows_a_directory_says_nothing_that_is_public(tmp_path):
    """Not even a digest: the file that states the cost is the same for all tables of one shape."""
    told = []
    for seed in (0, 1):
        x, y = table(seed, rows=100)
        private_search(directory=tmp_path / str(seed)).fit(x, y > 0)
        told.append(read(tmp_path / str(seed) / "ledger.jsonl"))
    assert told[0] == told[1]


def test_a_search_of_what_cannot_be_covered_is_refused():
    x, y = table(rows=50)
    for changes, error, said in (
        ({"grid": {"steps": [3, 4]}}, ValueError, "param_grid varies steps, which moves epsilon"),
        ({"grid": [{"noise_multiplier": [1.0]}, {"epsilon": [1.0]}]}, ValueError, "epsilon, noise_multiplier"),
        ({"estimator": LogisticRegression()}, TypeError, "whose cost is known; got LogisticRegression"),
        ({"estimator": StatesItsOwnCost()}, TypeError, "whose cost is known; got StatesItsOwnCost"),
        ({"epsilon": None}, ValueError, "set epsilon and delta"),
        ({"shape": math.inf}, ValueError, "shape must be finite"),
    ):
        with pytest.raises(error, match=said):
            private_search(**changes).fit(x, y > 0)


def test_a_search_knows_its_columns_by_name():
    pandas = pytest.importorskip("pandas")
    x, y = table(rows=200)
    rows = pandas.DataFrame(x, columns=["a", "b", "c"])
    search = private_search().fit(rows, y > 0)
    assert [*search.feature_names_in_] == [*search.best_estimator_.feature_names_in_] == ["a", "b", "c"]
    np.testing.assert_array_equal(search.predict(rows), search.best_estimator_.predict(rows))
    for predict in (search.predict, search.predict_proba, search.decision_function, lambda r: search.score(r, y > 0)):
        with pytest.raises(ValueError, match="feature names should match"):
            predict(rows[["b", "a", "c"]])


def test_a_search_is_what_its_estimator_is():
    """To scorers of scikit-learn, too."""
    x, y = table(rows=200)
    search = private_search()
    assert is_classifier(search) and not is_regressor(search)
    found = get_scorer("roc_auc")(search.fit(x, y > 0), x, y > 0)
    assert found == get_scorer("roc_auc")(search.best_estimator_, x, y > 0)
    other = private_search(estimator=PrivateLinearRegressor(target_range=(-6, 6), feature_range=(-1, 1), steps=3))
    assert is_regressor(other) and not hasattr(other, "predict_proba") and not hasattr(other, "decision_function")


# Which setting is drawn, and the noise, differ between two fits.
RANDOM = dict.fromkeys(["check_fit_idempotent", "check_supervised_y_2d"], "settings and noise are drawn anew")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning", "ignore::DeprecationWarning")
@parametrize_with_checks(
    [PrivateSearch(ToldByTheLabels(), {"learning_rate": [0.1]}, epsilon=1e3, delta=1e-2, mean_trials=2.0)],
    expected_failed_checks=lambda _: RANDOM,
)
def test_scikit_learns_own_checks_of_a_search(estimator, check):
    check(estimator)
