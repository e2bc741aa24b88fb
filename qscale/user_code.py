"""Functions from a user's Python file, for laws and quantizers of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

NAMED = re.compile(r"(?P<path>.+\.py)(:(?P<name>[^:/\\]*))?")
"""How a function is named: ``FILE.py:FUNCTION``."""


def load(path: str | Path, error: type[QscaleError] = QscaleError) -> ModuleType:
    """Run a Python file and return it as a module.

    Parameters
    ----------
    path
        The file.
    error
        What is raised, here and below.

    Raises
    ------
    QscaleError
        If it is missing or cannot be run.
    """
    file_hash(path, error)
    wanted = importlib.util.spec_from_file_location(f"qscale_user_{Path(path).stem}", path)
    if wanted is None or wanted.loader is None:
        raise error(f"{path}: not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(wanted)
    try:
        wanted.loader.exec_module(module)
    except SyntaxError as cause:
        raise error(f"{path}: line {cause.lineno}: {cause.msg}.") from cause
    except (Exception, SystemExit) as cause:  # whatever the user's file raises
        raise error(f"{path}: raised {type(cause).__name__}: {cause}") from cause
    return module


def find(
    module: ModuleType, path: str | Path, name: str, error: type[QscaleError] = QscaleError
) -> Callable[..., Any]:
    """Return a function of a loaded file.

    Raises
    ------
    QscaleError
        If there is none of that name.
    """
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            k
            for k, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        raise error(f"{path}: no function {name!r}. Functions are: {', '.join(own) or 'none'}.")
    return found


def file_hash(path: str | Path, error: type[QscaleError] = QscaleError) -> str:
    """Return the SHA-256 of a file.

    Raises
    ------
    QscaleError
        If it cannot be read.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}); check the path.") from cause
