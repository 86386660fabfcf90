"""Checkpoints in one byte a weight: what comes back, and that it comes back once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.families import FAMILIES, build
from outrider.errors import UnsupportedModel
from outrider.models import load_model
from outrider.models.compact import fold, is_compact, unfolded


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """An ordinary folder, and its compact form."""
    ordinary, compact = tmp_path / "ordinary", tmp_path / "compact"
    build(FAMILIES["llama"].config()).save_pretrained(ordinary)
    fold(ordinary, compact)
    return ordinary, compact


def test_it_takes_a_byte_a_weight_and_gives_nearly_the_same_weights(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    ordinary, compact = pair
    assert is_compact(compact)
    assert not is_compact(ordinary)
    told: list[str] = []
    folder = unfolded(compact, told.append)
    assert unfolded(compact, told.append) == folder
    assert len(told) == 1
    before, after = (load_file(path / "model.safetensors") for path in (ordinary, folder))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if weight.dim() == 1:
            assert torch.equal(after[name], weight)
            continue
        step = weight.abs().amax(1, keepdim=True) / 127
        assert bool(((after[name] - weight).abs() <= 0.501 * step).all())
    num_weights = sum(weight.numel() for weight in before.values())
    size = (compact / "weights.int8.safetensors").stat().st_size
    assert num_weights < size < 1.5 * num_weights  # these rows are short, and each has a scale


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_both_engines_load_it(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    _, compact = pair
    model = load_model(str(compact), engine=engine, dtype="float32")  # type: ignore[arg-type]
    assert (model.engine, model.vocab_size) == (engine, 101)


def test_a_damaged_one_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    _, compact = pair
    (compact / "weights.int8.safetensors").write_bytes(b"no")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        unfolded(compact, lambda line: None)
