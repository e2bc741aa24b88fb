"""What a fitted law and a fitted regression share: estimates, predictions, display."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from qscale.fit.options import check_level
from qscale.fit.prediction import predict

if TYPE_CHECKING:
    import pandas as pd

    from qscale.fit.summary import Summary


class Results(ABC):
    """Parameters under the names that statsmodels gives them, and predictions as a table."""

    __slots__ = ()

    @abstractmethod
    def parameters(self, level: float = 0.9) -> pd.DataFrame:
        """Return ``estimate``, ``se``, ``low`` and ``high`` by parameter."""

    @abstractmethod
    def summary(self, level: float = 0.9) -> Summary:
        """Return a table to print."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the law or model."""

    @property
    def params(self) -> pd.Series:
        """Estimates by parameter, see `parameters`."""
        return self.parameters()["estimate"]

    @property
    def bse(self) -> pd.Series:
        """Standard errors by parameter, see `parameters`."""
        return self.parameters()["se"]

    def conf_int(self, alpha: float = 0.1) -> pd.DataFrame:
        """Intervals of probability ``1 - alpha``: ``low`` and ``high`` by parameter."""
        check_level(alpha, "alpha")
        return self.parameters(1 - alpha)[["low", "high"]]

    def predict(self, frame: pd.DataFrame, **options: Any) -> pd.DataFrame:
        """Predict described rows with intervals, see `qscale.fit.prediction.predict`."""
        return predict(self, frame, **options)  # type: ignore[arg-type]  # it is a Fitted too

    def __repr__(self) -> str:
        """Return what it is in one line."""
        facts = [" ".join(f) for f in self.summary().facts if f[0] not in ("data", "set aside")]
        return f"<{type(self).__name__} of {self.name}: {', '.join(facts[:4])}>"

    def __str__(self) -> str:
        """Return the summary as text."""
        return str(self.summary())

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return self.summary()._repr_html_()
