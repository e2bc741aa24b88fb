"""Write a file so that readers see the old one or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qscale.errors import QscaleError

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_place(path: Path) -> None:
    """Raise before any work if no file can be put there.

    Raises
    ------
    QscaleError
        If it is a folder or a device, or its folder cannot be written to.
    """
    if path.exists() and not path.is_file():
        raise QscaleError(f"{path}: is not a file that can be replaced; choose another path.")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise QscaleError(
            f"{path}: cannot be written, {folder} is not a folder that you can write to; "
            "choose another path."
        )


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a partial file in the same folder that takes the place of ``path`` on success.

    Raises
    ------
    QscaleError
        If the file cannot be written.
    """
    path, partial = Path(path), None
    check_place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The suffix is kept: writers choose format and compression by it.
        handle, name = tempfile.mkstemp(prefix=".", suffix=f".{path.name}", dir=path.parent)
        os.close(handle)
        partial = Path(name)
        yield partial
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise QscaleError(f"{path}: cannot be written ({reason}).") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write text as UTF-8, all or nothing."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")
