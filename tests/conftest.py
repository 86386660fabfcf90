"""Order of the suite, and a cache of its own."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest file first, so that nobody waits for real models; the order inside a file stays."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)


@pytest.fixture(scope="session")
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("outrider-cache"))


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _session_cache: str
) -> None:
    """Nothing that a test converts ends up in the user's cache; real models are used from there."""
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("OUTRIDER_CACHE", _session_cache)
