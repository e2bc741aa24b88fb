"""A law as a scikit-learn regressor, for its pipelines, searches and cross-validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data

from qscale.errors import QscaleError
from qscale.fit import fit
from qscale.fit.storage import from_json
from qscale.laws import Law, from_spec, get
from qscale.laws.factors import constant, growth, power

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from sklearn.utils import Tags

_EACH = {"power": power, "growth": growth}


class LawRegressor(RegressorMixin, BaseEstimator):
    """Regression by a law, fitted as `qscale.fit.fit` does.

    Parameters
    ----------
    law
        A named law, such as ``ouyang``; a `Law`; or ``power`` (all columns above zero) or
        ``growth``, for a product of a power or an exponential of each column of ``X``.
    cluster
        Column of ``X``, a frame, whose values mark rows with shared noise, such as ``run``: they
        get a random effect. None takes rows to be independent.
    fixed
        Natural-scale values of parameters that are held.
    likelihood
        ``huber``, ``gaussian`` or ``student_t``.

    Attributes
    ----------
    fit_ : qscale.fit.Fit
        The fit: ``fit_.summary()``, ``fit_.conf_int()``.
    columns_ : tuple of str
        What the law reads.
    n_features_in_, feature_names_in_
        As everywhere in scikit-learn.

    Notes
    -----
    Of a frame the law's columns are taken by name; others are left aside. An array has the law's
    columns in their order, `qscale.laws.Law.columns`. The target must be above zero unless the
    law's link is the identity. Mistakes are ``ValueError``, as scikit-learn expects.

    Examples
    --------
    >>> from qscale import datasets
    >>> table = datasets.load("published_ptq").query("method == 'rtn' and delta_loss > 0")
    >>> table = table.dropna(subset=["tokens", "n_params", "bits"])
    >>> model = LawRegressor("kumar", cluster="run").fit(table, table["delta_loss"])
    >>> model.columns_
    ('tokens', 'n_params', 'bits')
    """

    def __init__(
        self,
        law: str | Law = "power",
        *,
        cluster: str | None = None,
        fixed: Mapping[str, float] | None = None,
        likelihood: str = "huber",
    ) -> None:
        self.law = law
        self.cluster = cluster
        self.fixed = fixed
        self.likelihood = likelihood

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's name
        """Fit the law.

        Parameters
        ----------
        X
            Frame or array of shape (n, p).
        y
            Target, shape (n,), in the law's unit.

        Raises
        ------
        ValueError
            If a column is missing, a value is not a number, or the law cannot be fitted.
        """
        frame, y = self._frame(X, y, reset=True)
        try:
            law = self._law(frame)
            rows = frame.assign(**{law.target: y, "run": self._clusters(X, len(frame))})
            self.fit_ = fit(
                rows,
                law,
                random=("run",) if self.cluster else (),
                fixed=self.fixed,
                likelihood=self.likelihood,  # type: ignore[arg-type]
                floor=None,
                interval="model",
                name="X",
            )
        except QscaleError as error:
            raise ValueError(str(error)) from error
        self.columns_ = law.columns
        return self

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Predict the median of a new row, shape (n,), in the target's unit.

        A column that is zero gives the limit of its power: zero or infinity.

        Parameters
        ----------
        X
            Frame or array as in `fit`.
        """
        check_is_fitted(self)
        frame = self._frame(X, None, reset=False)[0]
        with np.errstate(divide="ignore"):
            return self.fit_.center(frame)

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:  # noqa: N803
        """Predict central intervals for new rows of new clusters, shape (n, 2).

        Parameters
        ----------
        X
            Frame or array as in `fit`.
        level
            Probability of the interval.
        """
        check_is_fitted(self)
        frame = self._frame(X, None, reset=False)[0]
        edges = np.array([0.5 - level / 2, 0.5 + level / 2])
        return self.fit_.quantiles(frame, edges).T

    def __sklearn_tags__(self) -> Tags:
        """Say that the target must be positive under a logarithm, and the columns of a power."""
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = not (
            isinstance(self.law, Law) and self.law.link == "identity"
        )
        tags.input_tags.positive_only = self.law == "power"
        return tags

    def _frame(self, X: Any, y: Any, *, reset: bool) -> tuple[pd.DataFrame, Any]:  # noqa: N803
        """Check the inputs and name the columns that the law reads."""
        named = None if self.law in tuple(_EACH) else self._named().columns
        if isinstance(X, pd.DataFrame) and named is not None:
            if missing := [column for column in named if column not in X.columns]:
                raise ValueError(
                    f"X must have the columns {', '.join(named)}. Got no {missing[0]} instead."
                )
            X = X[list(named)]  # noqa: N806
        elif isinstance(X, pd.DataFrame) and self.cluster in X.columns:
            X = X.drop(columns=self.cluster)  # noqa: N806
        if reset:
            values, y = validate_data(
                self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2
            )
        else:
            values = validate_data(self, X, reset=False, dtype=np.float64)
        if self.law == "power":
            check_non_negative(values, "LawRegressor of this law")
        names = named or getattr(self, "feature_names_in_", None)
        if names is None:
            names = tuple(f"x{i}" for i in range(values.shape[1]))
        if len(names) != values.shape[1]:
            raise ValueError(
                f"X must have {len(names)} columns, {', '.join(names)}. "
                f"Got {values.shape[1]} instead."
            )
        return pd.DataFrame(values, columns=list(names)), y

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: a fit as its JSON and a law as its spec, which have no code."""
        state = dict(super().__getstate__())
        if "fit_" in state:
            state["fit_"] = self.fit_.to_json()
        if isinstance(self.law, Law):
            state["law"] = self.law.spec()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the fit and the law."""
        if "fit_" in state:
            state = state | {"fit_": from_json(state["fit_"])}
        if isinstance(state["law"], dict):
            state = state | {"law": from_spec(state["law"])}
        super().__setstate__(state)

    def _named(self) -> Law:
        """Return the law that is not made from the columns of X."""
        try:
            return self.law if isinstance(self.law, Law) else get(self.law)
        except QscaleError as error:
            raise ValueError(str(error)) from error

    def _law(self, frame: pd.DataFrame) -> Law:
        """Return the law, made from the columns where it is one factor for each."""
        if self.law not in tuple(_EACH):
            return self._named()
        each = _EACH[str(self.law)]
        factors = [each(column, f"a_{column}") for column in frame.columns]
        return Law(f"{self.law} of each column", "y", (constant("k"), *factors))

    def _clusters(self, X: Any, rows: int) -> Any:  # noqa: N803
        """Values of the cluster column, or one for each row."""
        if self.cluster is None:
            return np.arange(rows).astype(str)
        if not isinstance(X, pd.DataFrame) or self.cluster not in X.columns:
            raise ValueError(f"X must be a frame with the column {self.cluster!r} to cluster by.")
        return X[self.cluster].to_numpy()
