"""One server for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Running, serving


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def running(shared: Running) -> Iterator[Running]:
    """The shared server; after the test nothing may be held."""
    yield shared
    shared.wait_idle()
