"""Drafters that come with Outrider: which target gets which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.drafters import make_drafter, registry
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.registry import shipped_drafter, target_fingerprint
from outrider.models.toy import ByteTokenizer, ToyModel, hashed_law

LAW = hashed_law(257, seed=1)


class Known(ToyModel):
    form = "toy-1x1-257"


def known(*, tokenizer: ByteTokenizer | None) -> ToyModel:
    return Known(LAW, 257, tokenizer=tokenizer)


class Other(ByteTokenizer):
    def vocabulary(self) -> list[str | None]:
        return [*super().vocabulary()[:-1], "<stop>"]


def test_a_target_is_known_by_form_and_tokenizer() -> None:
    one = target_fingerprint(known(tokenizer=ByteTokenizer()))
    assert one.startswith("toy-1x1-257-")
    assert target_fingerprint(known(tokenizer=ByteTokenizer())) == one
    assert target_fingerprint(known(tokenizer=Other())) not in ("", one)
    assert target_fingerprint(known(tokenizer=None)) == ""
    assert target_fingerprint(ToyModel(LAW, 257, tokenizer=ByteTokenizer())) == ""


def test_auto_is_the_shipped_drafter_behind_lookup_or_lookup_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    target = known(tokenizer=ByteTokenizer())
    assert shipped_drafter(target) is None
    assert isinstance(make_drafter("auto", target), LookupDrafter)
    (tmp_path / "index.json").write_text(json.dumps({target_fingerprint(target): "made-for-it"}))
    assert shipped_drafter(target) == tmp_path / "made-for-it"
    assert shipped_drafter(known(tokenizer=Other())) is None

    asked: list[tuple[str, object]] = []

    def load(reference: str, **settings: object) -> ToyModel:
        asked.append((reference, settings["dtype"]))
        return ToyModel(LAW, 257)

    monkeypatch.setattr("outrider.drafters.load_model", load)
    drafter = make_drafter("auto", target)
    assert isinstance(drafter, LookupFirst)
    assert asked == [(str(tmp_path / "made-for-it"), "auto")]  # a toy runs on no openvino
    monkeypatch.setattr(target, "engine", "openvino")
    make_drafter("auto", target)
    make_drafter("auto", target, dtype="float32")  # said by the user
    assert [dtype for _, dtype in asked] == ["auto", "int8", "float32"]


def test_the_index_names_folders_that_are_there() -> None:
    index = registry.FOLDER / "index.json"
    if index.is_file():
        for name in json.loads(index.read_text()).values():
            assert (registry.FOLDER / name / "config.json").is_file()
