"""qscale: measure, fit and predict how much quantization raises a language model's loss."""

from types import ModuleType as _ModuleType

__version__ = "0.1.0"

_MODULES = (
    "checkpoint",
    "columns",
    "datasets",
    "errors",
    "estimator",
    "fit",
    "laws",
    "load",
    "measure",
    "model",
    "plan",
    "predict",
    "quantize",
    "regress",
    "report",
    "select",
    "sweep",
    "table",
    "text",
    "trackers",
    "validate",
)


def __getattr__(name: str) -> _ModuleType:
    """Load a module, such as ``qscale.fit``, when it is first asked for."""
    from importlib import import_module  # noqa: PLC0415 - most programs ask for none

    if name not in _MODULES:
        raise AttributeError(f"module 'qscale' has no attribute {name!r}")
    return import_module(f"qscale.{name}")


def __dir__() -> list[str]:
    """Return what there is, modules that are not loaded yet included."""
    return sorted({*globals(), *_MODULES})
