"""Checkpoint folders and a text that several test modules measure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

# Tests run side by side, one core each; torch's own threads would get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from pathlib import Path

collect_ignore_glob = ["fixtures/*.py"]  # scripts that made the fixtures, with what they need


def _trained(architecture: str, factory: pytest.TempPathFactory) -> Path:
    from tests import checkpoints  # noqa: PLC0415 - modelling tests do not load torch

    model = checkpoints.build_model(architecture)
    checkpoints.train(model)
    return checkpoints.save(model, factory.mktemp(architecture))


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained tiny model, one architecture after the other; do not change it."""
    return _trained(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def trained_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained tiny Llama with training metadata; do not change it."""
    folder = _trained("llama", tmp_path_factory)
    (folder / "qscale.toml").write_text('[training]\nrun = "one"\ntokens = 400000\nlr = 1e-2\n')
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 3,900 bytes that the trained models have not seen."""
    from tests.checkpoints import babble  # noqa: PLC0415

    path = tmp_path_factory.mktemp("text") / "babble.txt"
    path.write_text(babble(1000, seed=3))
    return path
