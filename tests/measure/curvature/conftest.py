"""Tiny models for tests of curvature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.dense import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.measure.conftest import Tiny


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, build: Callable[[str], Tiny]) -> Tiny:
    """One model of each architecture; tests must leave it as it is."""
    return build(request.param)


@pytest.fixture
def llama(build: Callable[[str], Tiny]) -> Tiny:
    """A Llama that the test may change."""
    return build("llama")


@pytest.fixture
def eager(tiny: Tiny) -> Iterator[Tiny]:
    before = tiny.model.config._attn_implementation
    tiny.model.set_attn_implementation("eager")
    yield tiny
    tiny.model.set_attn_implementation(before)
