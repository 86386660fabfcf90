"""Order of the suite, and a cache of its own."""

from __future__ import annotations

import pytest

from outrider.models.cache import cache_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest file first, so that nobody waits for real models; the order inside a file stays."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)


@pytest.fixture(scope="session")
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("outrider-cache"))


@pytest.fixture(scope="session")
def _real_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Begins with all that the user's holds."""
    folder = tmp_path_factory.mktemp("real-cache")
    for kept in cache_folder().glob("*/*"):
        (folder / kept.parent.name).mkdir(exist_ok=True)
        (folder / kept.parent.name / kept.name).symlink_to(kept)
    return str(folder)


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    _session_cache: str,
    _real_cache: str,
) -> None:
    """Nothing that a test converts ends up in the user's cache; real models are used from there."""
    is_real = request.node.get_closest_marker("real") is not None
    monkeypatch.setenv("OUTRIDER_CACHE", _real_cache if is_real else _session_cache)
