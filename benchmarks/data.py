"""Data sets. None is committed; what a package ships is read from there."""

from typing import NamedTuple

import numpy as np
from sklearn import datasets, model_selection


class Split(NamedTuple):
    """A data set cut in two."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def digits() -> Split:
    """1,797 real digits, ``(8, 8, 1)`` float32 in [0, 1], shipped with scikit-learn; a fifth is for testing."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        images, labels.astype(np.int32), test_size=0.2, random_state=0, stratify=labels
    )
    return Split(train_x, train_y, test_x, test_y)
