"""Order of the suite: tests that run real models go first, so that nobody waits for them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest file first; the order inside a file stays."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)
