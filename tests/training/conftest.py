"""A drafter made once for all who look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.tiny import apart


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter made in one go."""
    folder = tmp_path_factory.mktemp("made") / "drafter"
    assert apart(folder) == 0
    return folder
