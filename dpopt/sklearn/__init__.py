"""Private linear models for tables, and a private search over their settings, as scikit-learn has them.

Needs the extra ``dpopt[sklearn]``; nothing else in dpopt imports scikit-learn.

What scikit-learn reads off the data, these are told: the classes, the ranges of features and targets. scikit-learn's
own searches (``GridSearchCV`` and its relatives), ``cross_val_score``, and scalers that are fitted to private rows are
*not* covered by any epsilon here: every fit that they make is a run of its own, and the scores they print have no
noise. `PrivateSearch` is the search that is paid for.
"""

from dpopt.sklearn.linear import PrivateLinearClassifier as PrivateLinearClassifier
from dpopt.sklearn.linear import PrivateLinearRegressor as PrivateLinearRegressor
from dpopt.sklearn.search import PrivateSearch as PrivateSearch
