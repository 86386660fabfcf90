"""Drafters that come with Outrider, and the tool that puts them there."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider.drafters import registry
from outrider.drafters.registry import shipped_drafter
from outrider.models import Model, load_model
from outrider.models.trimmed import TrimmedModel, Vocabulary, tokenizer_digest
from outrider.training.distillation import save_drafter

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
KEPT = torch.arange(0, 512)
BENCH = {
    "rows": [
        {
            "task": "chat",
            "temperature": 0.0,
            "alpha_hat": 0.5,
            "tokens_per_call": 2.0,
            "speedup": 1.5,
        },
        {
            "task": "qa",
            "temperature": 0.0,
            "alpha_hat": None,
            "tokens_per_call": 1.0,
            "speedup": 1.0,
        },
    ],
    "provenance": {"arguments": {"top_p": 0.9}},
}


@pytest.fixture(scope="module")
def default() -> Model:
    return load_model("default")


@pytest.fixture
def drafter(tmp_path: Path, default: Model) -> Path:
    """A folder as `outrider distill` leaves it, of a model that knows nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(KEPT),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,
    )
    folder = tmp_path / "made"
    folder.mkdir()
    read_as = torch.arange(default.vocab_size) % len(KEPT)
    vocabulary = Vocabulary(KEPT, read_as, tokenizer_digest(default.tokenizer))
    save_drafter(LlamaForCausalLM(config), vocabulary, folder)
    (folder / "README.md").write_text("# A drafter for default\n\nProposes what default checks.\n")
    (folder / "provenance.json").write_text("{}\n")
    return folder


def ship(monkeypatch: pytest.MonkeyPatch, *arguments: str, most_mb: float | None = None) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "ship_drafter.py"))
    if most_mb is not None:
        tool["main"].__globals__["MOST_MB"] = most_mb
    monkeypatch.setattr(sys, "argv", ["ship_drafter.py", *arguments])
    tool["main"]()


def test_a_shipped_drafter_is_found_for_its_target_and_draws_its_own_ids(
    drafter: Path, default: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "drafters")
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(BENCH))
    assert shipped_drafter(default) is None
    ship(monkeypatch, str(drafter), "little", "--bench", str(bench), "--called", "SmolLM2")
    found = shipped_drafter(default)
    assert found == tmp_path / "drafters" / "little"
    assert [item.name for item in (tmp_path / "drafters").iterdir() if item.is_dir()] == ["little"]
    card = (found / "README.md").read_text()
    assert card.startswith("# A drafter for SmolLM2\n")
    assert "Licence: Apache-2.0" in card
    assert "| chat | 0 | 0.9 | 0.50 | 2.00 | 1.50 |" in card
    assert "| qa | 0 | 0.9 | - | 1.00 | 1.00 |" in card
    assert (found / "provenance.json").is_file()
    model = load_model(str(found))
    assert isinstance(model, TrimmedModel)
    assert model.vocab_size == default.vocab_size


def test_one_that_is_too_large_is_refused_and_what_was_shipped_stays(
    drafter: Path, default: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "drafters")
    ship(monkeypatch, str(drafter), "little")
    before = sorted(path.name for path in (tmp_path / "drafters" / "little").iterdir())
    with pytest.raises(AssertionError, match=r"at most 0\.01 are shipped"):
        ship(monkeypatch, str(drafter), "little", most_mb=0.01)
    assert shipped_drafter(default) == tmp_path / "drafters" / "little"
    assert sorted(path.name for path in (tmp_path / "drafters" / "little").iterdir()) == before


def test_the_default_target_has_a_drafter_that_saves_passes(default: Model) -> None:
    found = shipped_drafter(default)
    assert found is not None
    pair = outrider.load("default")
    assert found.name in pair.drafter.name
    chat = [{"role": "user", "content": "How do I keep a houseplant alive?"}]
    answer = pair.generate(chat, max_new_tokens=96)
    plain = pair.generate(chat, max_new_tokens=96, gamma=0)
    # In bfloat16 a near tie may fall the other way behind some tokens; not at once.
    assert answer.token_ids[:8] == plain.token_ids[:8]
    assert answer.stats.tokens_per_call > 1.3
    sampled = pair.generate(chat, max_new_tokens=96, temperature=1.0, seed=1)
    assert sampled.stats.tokens_per_call > 1.15


def test_what_is_shipped_is_small_and_says_what_it_is() -> None:
    index = json.loads((registry.FOLDER / registry.INDEX).read_text())
    folders = [item for item in registry.FOLDER.iterdir() if item.is_dir()]
    assert sorted(index.values()) == sorted(folder.name for folder in folders)
    for folder in folders:
        size = sum(file.stat().st_size for file in folder.rglob("*"))
        assert size <= 16_000_000
        card = (folder / "README.md").read_text(encoding="utf-8")
        for word in ("Data:", "Recipe:", "Licence:", "alpha", "temperature", "speed-up"):
            assert word in card, word
        facts = json.loads((folder / "provenance.json").read_text())
        assert facts["arguments"]["tokens"] >= 1_000_000


def turns(file: Path) -> set[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return {" ".join(turn.lower().split()) for line in lines for turn in json.loads(line)["turns"]}


def runs(turns: set[str], num_words: int = 14) -> set[tuple[str, ...]]:
    """Every run of so many words."""
    split = [turn.split() for turn in turns]
    return {
        tuple(words[i : i + num_words])
        for words in split
        for i in range(len(words) - num_words + 1)
    }


def test_shipped_drafters_are_not_taught_what_they_are_measured_on() -> None:
    taught = turns(ROOT / "tools" / "lesson_prompts.jsonl")
    measured = turns(ROOT / "src" / "outrider" / "data" / "prompts.jsonl")
    assert len(taught) > 800
    assert len(measured) > 50
    assert not taught & measured
    # Nor nearly so: no more words in a row than an instruction has.
    assert not runs(taught) & runs(measured)
