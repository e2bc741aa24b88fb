"""Methods of a result that live in a room above it, such as the figures of a fit.

Estimation stays apart from plotting: a result's class names where its figures are drawn, and that
module, matplotlib with it, is loaded when a figure is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any


class Accessor:
    """A class attribute that gives each instance its methods from another module.

    Parameters
    ----------
    module, name
        Where the class of the methods is; it is called with the instance.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        """Return the methods for an instance, and their class for a class."""
        found = getattr(importlib.import_module(self.module), self.name)
        return found if instance is None else found(instance)
