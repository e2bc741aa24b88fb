"""The package's modules as attributes, loaded when they are first asked for."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

import qscale


def test_modules_are_attributes_that_load_when_asked_for() -> None:
    code = (
        "import sys, qscale\n"
        "assert [m for m in sys.modules if m.startswith('qscale')] == ['qscale']\n"
        "assert 'published_ptq' in qscale.datasets.names()\n"
        "assert qscale.load.load_fitted and qscale.fit.fit\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_that_is_listed_is_there() -> None:
    assert {"fit", "load", "datasets", "laws", "__version__"} <= set(dir(qscale))
    assert all(find_spec(f"qscale.{name}") for name in qscale._MODULES)
    with pytest.raises(AttributeError, match="module 'qscale' has no attribute 'fits'"):
        _ = qscale.fits
