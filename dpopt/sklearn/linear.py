"""Linear models for tables, trained by `dpopt.train` within a budget."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dpopt.common import validate
from dpopt.keys import secure_key
from dpopt.run.builder import Builder
from dpopt.run.plan import Plan


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class _PrivateLinear(BaseEstimator):
    """What both models share: features in their ranges, a private run, coefficients in the features' own units."""

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    feature_range: Any = None
    l2_clip_norm: float = 1.0
    steps: int = 30
    expected_batch_size: float | None = None
    learning_rate: float = 1.0
    momentum: float = 0.9
    fit_intercept: bool = True
    _of_output: ClassVar[Any]  # from a row's outputs and its target to its loss

    def plan(self, num_examples: int) -> Plan:
        """The private run that `fit` makes on so many rows; ``plan.event`` is what it costs, ``print(plan)`` all of it.

        Raises:
            ValueError, TypeError: for parameters out of range, or a budget that is not set.
        """
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                "set the budget, epsilon and delta, or the noise_multiplier: one of both. There is no default, since "
                "nobody but you knows what is right for these data."
            )
        if self.delta is None:
            raise ValueError("set delta, well below one over the number of rows: epsilon means nothing without it.")
        validate.positive(learning_rate=self.learning_rate)
        validate.fraction(momentum=self.momentum)
        if not isinstance(self.fit_intercept, bool | np.bool_):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"fit_intercept must be True or False; got {self.fit_intercept!r}.")
        rate = optax.linear_schedule(self.learning_rate, 0.0, self.steps)
        batch = num_examples if self.expected_batch_size is None else self.expected_batch_size
        builder = Builder(num_examples=num_examples, expected_batch_size=batch, steps=self.steps, key=secure_key())
        builder = builder.clip(self.l2_clip_norm)
        if self.noise_multiplier is None:
            builder = builder.budget(epsilon=cast(float, self.epsilon), delta=self.delta)
        else:
            builder = builder.noise(self.noise_multiplier)
        return builder.then(optax.sgd(rate, momentum=self.momentum)).build()

    def _fit(self, rows: np.ndarray, targets: np.ndarray, outputs: int) -> None:
        middle, half = np.zeros(rows.shape[1]), np.ones(rows.shape[1])
        if self.feature_range is not None:
            middle, half = _middle_and_half("feature_range", self.feature_range, rows.shape[1])
        scaled = np.clip((rows - middle) / half, -1, 1) if self.feature_range is not None else rows
        one = np.ones(len(rows)) if self.fit_intercept else np.zeros(len(rows))
        data = {"x": np.column_stack([scaled, one]).astype(np.float32), "y": targets}
        plan = self.plan(len(rows))
        result = plan.run(_loss(type(self)._of_output), jnp.zeros((rows.shape[1] + 1, outputs)), data, progress=False)
        weights = np.asarray(result.params, np.float64)
        self.coef_ = weights[:-1].T / half
        self.intercept_ = weights[-1] - self.coef_ @ middle if self.fit_intercept else -self.coef_ @ middle
        self.n_iter_ = self.steps
        self.ledger_ = result.ledger
        self.statement_ = result.statement(delta=self.delta)
        self.epsilon_ = self.statement_.epsilon

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        rows = cast(Any, validate_data(self, X, reset=False, dtype=np.float64))
        return rows @ self.coef_.T + self.intercept_


def _middle_and_half(name: str, given: Any, size: int | None = None) -> tuple[Any, Any]:
    try:
        low, high = (np.asarray(end, np.float64) for end in given)
        shape = () if size is None else (size,)
        low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    except (TypeError, ValueError) as error:
        each = "" if size is None else f", numbers or one for each of the {size} features"
        raise ValueError(f"{name} must be (low, high){each}; got {given!r}.") from error
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ValueError(f"{name} must be finite, and low below high; got {given!r}.")
    return (low + high) / 2, (high - low) / 2


@functools.cache  # one function a model, so that one program is compiled
def _loss(of_output: Any) -> Any:
    return lambda params, row: of_output(row["x"] @ params, row["y"])


def _log_loss(output: jax.Array, label: jax.Array) -> jax.Array:
    if output.shape == (1,):
        return optax.sigmoid_binary_cross_entropy(output[0], label.astype(output.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(output, label)


def _squared_error(output: jax.Array, target: jax.Array) -> jax.Array:
    return (output[0] - target) ** 2 / 2


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearClassifier(ClassifierMixin, _PrivateLinear):
    r"""Logistic regression with differential privacy, for two classes or more.

    Gradient descent on the clipped gradients of the log loss, with momentum and a rate that falls to 0; by default each
    step reads all rows.

    Nothing is read off the data that the budget does not cover: ``classes`` and ``feature_range`` are yours to give,
    from public knowledge (a code book, what a sensor can measure). Rows that cannot be used (NaN, a label that is not
    among the classes) raise an error, which tells that they are there: prepare data before. Noise is fresh at every
    fit, so there is no ``random_state``.

    Args:
        epsilon, delta: the budget of a fit. No default.
        noise_multiplier: in place of ``epsilon``, the noise itself; 0 is not private.
        classes: all labels that there may be.
        feature_range: ``(low, high)``, numbers or one for each feature: what is outside is moved to the edge, and the
            range is mapped to -1 .. 1. None takes features as they are, which should be of similar size, near 1.
        l2_clip_norm: how long a row's gradient may be.
        steps: how many.
        expected_batch_size: rows that a step is expected to read; None for all.
        learning_rate: of the first step.
        momentum: in [0, 1).
        fit_intercept: whether there is one.

    Attributes:
        coef_: ``(outputs, features)``; ``outputs`` is 1 for two classes, else their number.
        intercept_: ``(outputs,)``.
        classes_: in sorted order.
        epsilon_: what the fit cost, at ``delta``.
        statement_, ledger_: the same in full (`dpopt.run.statement`, `dpopt.Ledger`).
        n_iter_, n_features_in_: as scikit-learn has them.

    Raises:
        ValueError, TypeError: by `fit`, for parameters out of range or data that do not fit them.

    *Privacy*: what `fit` learns costs ``epsilon_`` for adding or removing one row, whose number is public. Each fit has
    its own cost. `score` on training rows is not covered.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 10, size=(2_000, 3))
    >>> y = np.where(X[:, 0] > X[:, 1], "left", "right")
    >>> model = PrivateLinearClassifier(epsilon=1.0, delta=1e-5, classes=["left", "right"], feature_range=(0, 10))
    >>> bool(model.fit(X, y).score(X, y) > 0.9), round(model.epsilon_, 1)
    (True, 1.0)
    """

    classes: Any = None

    _of_output = staticmethod(_log_loss)

    def fit(self, X: Any, y: Any) -> PrivateLinearClassifier:
        """Trains on rows ``(n, features)`` and labels ``(n,)``."""
        rows, y = cast(Any, validate_data(self, X, y, dtype=np.float64))
        check_classification_targets(y)
        if self.classes is None:
            raise ValueError(
                "classes must list all labels that there may be. They are not read off y: a label that few rows have "
                "would tell that one of those rows is there."
            )
        classes = np.unique(np.asarray(self.classes))
        if len(classes) < 2:
            raise ValueError(f"classes must list two labels or more; got {self.classes!r}: one class is no choice.")
        if not np.isin(y, classes).all():
            raise ValueError(f"y holds labels that are not among the classes {self.classes!r}; leave such rows out.")
        labels = np.searchsorted(classes, y).astype(np.int32)
        self._fit(rows, labels, 1 if len(classes) == 2 else len(classes))
        self.classes_ = classes  # last, so that a fit that fails leaves an earlier one whole
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Of rows ``(n, features)``: ``(n,)`` for two classes, above 0 for the second; else ``(n, classes)``."""
        outputs = self._outputs(X)
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities, ``(n, classes)``."""
        outputs = self._outputs(X)
        if outputs.shape[1] == 1:
            outputs = np.column_stack([np.zeros(len(outputs)), outputs])
        odds = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of every row, ``(n,)``."""
        likeliest = np.argmax(self.predict_proba(X), axis=1)  # first, since it checks that the model is fitted
        return self.classes_[likeliest]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearRegressor(RegressorMixin, _PrivateLinear):
    r"""Linear regression with differential privacy: least squares on clipped gradients.

    As `PrivateLinearClassifier`, which says what is not read off the data; here that is the range of the target.

    Args:
        target_range: ``(low, high)`` of what is predicted, from public knowledge; targets outside are moved to the
            edge.
        others: see `PrivateLinearClassifier`; ``learning_rate`` is 0.2 by default.

    Attributes:
        coef_: ``(features,)``.
        intercept_: a number.
        epsilon_, statement_, ledger_, n_iter_, n_features_in_: see `PrivateLinearClassifier`.

    Raises:
        ValueError, TypeError: by `fit`, for parameters out of range or data that do not fit them.

    *Privacy*: as `PrivateLinearClassifier`.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, size=(2_000, 3))
    >>> y = 100 + 20 * X[:, 0] + rng.normal(size=2_000)
    >>> model = PrivateLinearRegressor(epsilon=1.0, delta=1e-5, target_range=(75, 125), feature_range=(-1, 1))
    >>> bool(model.fit(X, y).score(X, y) > 0.9), round(model.epsilon_, 1)
    (True, 1.0)
    """

    target_range: Any = None
    learning_rate: float = 0.2

    _of_output = staticmethod(_squared_error)

    def fit(self, X: Any, y: Any) -> PrivateLinearRegressor:
        """Trains on rows ``(n, features)`` and targets ``(n,)``."""
        rows, y = cast(Any, validate_data(self, X, y, dtype=np.float64, y_numeric=True))
        if y.dtype.kind not in "biuf":
            raise ValueError(f"y must be numbers; got an array of dtype {y.dtype}.")
        if self.target_range is None:
            raise ValueError("target_range must say between which numbers targets lie: it is not read off y.")
        middle, half = _middle_and_half("target_range", self.target_range)
        self._fit(rows, np.clip((y - middle) / half, -1, 1).astype(np.float32), 1)
        self.coef_ = self.coef_[0] * half
        self.intercept_ = (self.intercept_ * half + middle).item()
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The prediction for every row, ``(n,)``."""
        return self._outputs(X)
