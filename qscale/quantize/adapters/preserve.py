"""Keep what outside libraries change of the process: random states, defaults, logging, output."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.utils import logging as hf_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Run the body in silence, then put global state back, also after an exception.

    What is put back: the random states of Python, NumPy's legacy functions and torch on all
    devices; torch's default dtype, number of threads, float32 matmul precision, choice of
    deterministic algorithms and whether gradients are on; warning filters; environment variables;
    the root logger, levels and handlers of loggers that were there, and transformers' verbosity
    and progress bars.

    Loggers and modules that a library adds are left: nothing of ours looks at them.
    """
    with (
        _random_state(),
        _torch_defaults(),
        _logging(),
        _environment(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    """Put the global random states back."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - theirs to draw from
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


@contextlib.contextmanager
def _torch_defaults() -> Iterator[None]:
    """Put torch's global settings back."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Put environment variables back."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Silence logging, then put loggers back."""
    manager = logging.root.manager
    known = [entry for entry in manager.loggerDict.values() if isinstance(entry, logging.Logger)]
    loggers = [
        (logger, logger.level, logger.handlers[:], logger.propagate, logger.disabled)
        for logger in [logging.root, *known]
    ]
    disabled, verbosity = manager.disable, hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    logging.disable(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        (hf_logging.enable_progress_bar if bars else hf_logging.disable_progress_bar)()
        for logger, level, handlers, propagate, off in loggers:
            logger.setLevel(level)
            logger.handlers[:] = handlers
            logger.propagate, logger.disabled = propagate, off
        logging.disable(disabled)
