"""What ``GridSearchCV`` is without privacy: a search over settings, all of whose fits and scores are paid for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone, is_classifier
from sklearn.model_selection import ParameterGrid
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data

from dpopt import tuning
from dpopt.keys import secure_key

_BUDGET = ("epsilon", "delta", "noise_multiplier")
_MOVE_EPSILON = (*_BUDGET, "steps", "expected_batch_size")


def _estimator_has(method: str) -> Callable[[PrivateSearch], bool]:
    return lambda self: hasattr(self.estimator, method)


@dataclasses.dataclass(eq=False, repr=False)
class PrivateSearch(MetaEstimatorMixin, BaseEstimator):
    """The best of a random number of private fits, with settings from a grid: `dpopt.tuning` for tables.

    ``GridSearchCV`` fits every setting on every fold and shows all scores. Each of those is a release from the same
    rows, so a model that it picked at epsilon 1 a fit has cost far more than 1. Here settings are drawn from the grid,
    every fit reads all rows with enough noise that the whole search stays within the budget, and only the best comes
    out.

    Args:
        estimator: a `PrivateLinearClassifier` or `PrivateLinearRegressor`. Its own budget is not used.
        param_grid: as ``ParameterGrid`` takes it: lists of values by name of the parameter, of any that do not move
            epsilon. So it is free to leave ``steps`` and ``expected_batch_size`` to the estimator alone.
        epsilon, delta: what the whole search may cost.
        mean_trials: expected number of fits; None for as many as the grid has settings, and at least 2.
        shape: of their distribution (`dpopt.tuning.NumTrials`); finite, so that there is at least one.
        public_rows: ``(X, y)`` that nobody has to protect, to score on; None scores on the private rows, with noise.
        score_noise_multiplier: of that noise, in rows: it moves an accuracy over n rows by this over n.
        directory: where to keep what resuming after a crash needs (`dpopt.tuning.repeat_and_select`), or None. It is
            secret, and for one data set with one set of ``public_rows``: `fit` cannot see whether they are the same.

    Attributes:
        best_estimator_: fitted, with the cost of the *search* as its ``epsilon_``, ``statement_`` and ``ledger_``.
        best_params_, best_score_: its setting and its score: accuracy, or for a regressor one minus the absolute error
            as a share of the target's range.
        epsilon_, statement_, ledger_: what the search cost.
        n_features_in_, feature_names_in_, classes_: as the estimators have them.

    Raises:
        ValueError, TypeError: by `fit`, for bad parameters, or a grid over one that moves epsilon.

    *Privacy*: everything it learns costs ``epsilon_``. Other fits and how many there were are kept nowhere.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 10, size=(2_000, 3))
    >>> y = X[:, 0] > X[:, 1]
    >>> from dpopt.sklearn import PrivateLinearClassifier
    >>> model = PrivateLinearClassifier(classes=[False, True], feature_range=(0, 10), steps=10)
    >>> search = PrivateSearch(model, {"learning_rate": [0.1, 1.0]}, epsilon=2.0, delta=1e-5).fit(X, y)
    >>> search.epsilon_ <= 2.0, search.best_params_["learning_rate"] in (0.1, 1.0), search.predict(X).shape
    (True, True, (2000,))
    """

    estimator: Any
    param_grid: Any
    _: dataclasses.KW_ONLY
    epsilon: float | None = None
    delta: float | None = None
    mean_trials: float | None = None
    shape: float = 0.0
    public_rows: tuple[Any, Any] | None = None
    score_noise_multiplier: float = 20.0
    directory: str | Path | None = None

    def fit(self, X: Any, y: Any) -> PrivateSearch:
        """Searches, on rows ``(n, features)`` and ``y`` ``(n,)``.

        Without a ``directory`` every call is a search of its own, and so is its cost. With one, it goes on with the
        search that began there; one that is done is returned as it was found, and nothing is fitted. Either only if
        all but the data is the same: the estimator's parameters but for its budget, grid, noise, how fits are counted
        and scored, how many rows and features there are. Else it is a ValueError that says what differs. Of the rows
        nothing is compared: to do so, they would have to leave a trace in the directory.
        """
        settings = self._settings()
        epsilon, delta = cast(float, self.epsilon), cast(float, self.delta)
        rows, y = cast(Any, validate_data(self, X, y, dtype="float64"))
        trials = tuning.NumTrials(max(2, len(settings)) if self.mean_trials is None else self.mean_trials, self.shape)
        score = self._score(rows, y)

        def trial(noise_multiplier: float, setting: dict[str, Any]) -> Any:
            own = dict(epsilon=None, delta=delta, noise_multiplier=noise_multiplier)
            return cast(Any, clone(self.estimator)).set_params(**setting, **own)

        noise_multiplier = tuning.calibrate(
            lambda sigma: trial(sigma, settings[0]).plan(len(rows)).event,
            num_trials=trials,
            score=score,
            epsilon=epsilon,
            delta=delta,
        )

        found = tuning.repeat_and_select(
            lambda setting, key: trial(noise_multiplier, setting).fit(rows, y),  # a fit draws a key of its own
            settings,
            event=lambda setting: trial(noise_multiplier, setting).plan(len(rows)).event,
            score=score,
            num_trials=trials,
            key=secure_key(),
            num_examples=len(rows),
            directory=self.directory,
            identity=self._identity(rows.shape[1]),
        )
        self.best_estimator_, self.best_params_, self.best_score_ = found.value, found.setting, found.score
        self.ledger_, self.statement_ = found.ledger, found.statement(delta=delta)
        self.epsilon_ = self.statement_.epsilon
        best = self.best_estimator_  # what it says of itself is the cost of one fit
        best.epsilon_, best.statement_, best.ledger_ = self.epsilon_, self.statement_, self.ledger_
        if (names := getattr(self, "feature_names_in_", None)) is not None:  # fits see arrays
            best.feature_names_in_ = names
        if is_classifier(self.estimator):
            self.classes_ = self.best_estimator_.classes_
        return self

    def _settings(self) -> list[dict[str, Any]]:
        from dpopt.sklearn import PrivateLinearClassifier, PrivateLinearRegressor  # which imports this module

        if not isinstance(self.estimator, PrivateLinearClassifier | PrivateLinearRegressor):
            raise TypeError(
                "estimator must be a PrivateLinearClassifier or PrivateLinearRegressor, whose cost is known; got "
                f"{type(self.estimator).__name__}. For other models: dpopt.tuning."
            )
        if self.epsilon is None or self.delta is None:
            raise ValueError("set epsilon and delta: what the whole search may cost.")
        if self.shape == np.inf:
            raise ValueError("shape must be finite: a Poisson number of fits may be none, and nothing be found.")
        settings = _plain(list(ParameterGrid(self.param_grid)))
        moving = sorted({name for setting in settings for name in setting} & set(_MOVE_EPSILON))
        if moving:
            raise ValueError(
                f"param_grid varies {', '.join(moving)}, which moves epsilon, and all fits of a search cost the same: "
                "set it on the estimator."
            )
        return settings

    def _identity(self, features: int) -> dict[str, Any]:
        """What a directory's search is of, besides what `dpopt.tuning` compares. All of it is public."""
        parameters = {name: value for name, value in self.estimator.get_params().items() if name not in _BUDGET}
        public = None if self.public_rows is None else np.shape(self.public_rows[0])
        return _plain(
            {"estimator": type(self.estimator).__name__, **parameters, "features": features, "public_rows": public}
        )

    def _score(self, X: Any, y: Any) -> tuning.PublicScore | tuning.PrivateScore:
        def right(fitted: Any, X: Any, y: Any) -> np.ndarray:
            if is_classifier(fitted):
                return fitted.predict(X) == y
            low, high = fitted.target_range
            return 1 - np.abs(fitted.predict(X) - y) / (high - low)

        if self.public_rows is not None:
            rows = check_X_y(*self.public_rows, dtype="float64")
            return tuning.PublicScore(lambda fitted: float(np.mean(right(fitted, *rows))), data="public_rows")
        return tuning.PrivateScore(
            per_example=lambda fitted: right(fitted, X, y),
            num_examples=len(X),
            noise_multiplier=self.score_noise_multiplier,
        )

    def predict(self, X: Any) -> np.ndarray:
        """The best estimator's predictions, ``(n,)``."""
        check_is_fitted(self)
        return self.best_estimator_.predict(X)

    @available_if(_estimator_has("decision_function"))
    def decision_function(self, X: Any) -> np.ndarray:
        """The best classifier's logits."""
        check_is_fitted(self)
        return self.best_estimator_.decision_function(X)

    @available_if(_estimator_has("predict_proba"))
    def predict_proba(self, X: Any) -> np.ndarray:
        """The best classifier's probabilities, ``(n, classes)``."""
        check_is_fitted(self)
        return self.best_estimator_.predict_proba(X)

    def score(self, X: Any, y: Any) -> float:
        """The best estimator's score; on private rows it is not covered."""
        check_is_fitted(self)
        return self.best_estimator_.score(X, y)

    def __sklearn_tags__(self) -> Any:
        """Those of a classifier or a regressor, as the estimator is one."""
        tags, own = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.estimator_type, tags.classifier_tags = own.estimator_type, own.classifier_tags
        tags.regressor_tags, tags.target_tags, tags.input_tags = own.regressor_tags, own.target_tags, own.input_tags
        return tags


def _plain(value: Any) -> Any:
    """The same for JSON: arrays and ranges as lists, NumPy's numbers as Python's."""
    return json.loads(json.dumps(value, default=_listed))


def _listed(value: Any) -> Any:
    if np.ndim(value) == 0 and not hasattr(value, "tolist"):
        raise TypeError(f"the estimator's parameters must be plain values, or arrays of them; got {value!r}.")
    return np.asarray(value).tolist()
