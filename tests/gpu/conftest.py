"""Tests here need a GPU and skip without one."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "jit: backends that compile kernels for many seconds on first use")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
