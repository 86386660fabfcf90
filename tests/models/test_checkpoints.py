"""Model references and what lies behind them: folders, `.gguf` files, tokenizers, vocabularies."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from outrider.decoding import Engine
from outrider.drafters import make_drafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import ModelNotFound, OutriderError, UnsupportedModel, VocabularyMismatch
from outrider.models import Feed, Model, Prompt, check_same_tokenizer, load_model
from outrider.models import checkpoints as checkpoints_module
from outrider.models.catalog import available_models
from outrider.models.causal import CausalModel
from outrider.models.checkpoints import cache_folder, clear_cache, find_checkpoint
from outrider.pair import Pair
from outrider.requests import Request
from outrider.sampling import SamplingPolicy

WORDS = "the quick brown fox jumps over the lazy dog, again and again; that is the end of it"
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}the dog{% endif %}"
)
V = 100  # tokens of the tokenizer


def byte_level(*, swapped: tuple[int, int] | None = None) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of V tokens; with `swapped`, two ids have changed places."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=V,
        special_tokens=[END],
        initial_alphabet=[chr(c) for c in range(33, 80)],
        show_progress=False,
    )
    built.train_from_iterator([WORDS] * 3, trainer)
    assert built.get_vocab_size() == V
    if swapped is None:
        return built
    facts = json.loads(built.to_str())
    known = facts["model"]["vocab"]
    first, second = (next(s for s, i in known.items() if i == token) for token in swapped)
    known[first], known[second] = known[second], known[first]
    return tokenizers.Tokenizer.from_str(json.dumps(facts))


def llama(*, vocab_size: int = V, seed: int = 0, **words: object) -> hf.LlamaForCausalLM:
    """A tiny model whose weights are large enough for a varied text."""
    config = hf.LlamaConfig(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | words
    )
    torch.manual_seed(seed)
    module = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    return module


def save(
    folder: Path,
    module: hf.PreTrainedModel,
    tokenizer: tokenizers.Tokenizer | None = None,
    *,
    chat_template: str | None = None,
    eos_token: str | None = END,
) -> str:
    """A model folder as transformers writes it; returns its reference."""
    module.save_pretrained(folder)
    if tokenizer is not None:
        wrapped = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token)
        wrapped.chat_template = chat_template
        wrapped.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A whole model folder with a tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return save(folder, llama(), byte_level(), chat_template=TEMPLATE)


@pytest.fixture
def own_folder(reference: str, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(reference, tmp_path / "damaged"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for imported models."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def load(reference: str | Path, **options: str) -> Model:
    return load_model(str(reference), **({"dtype": "float32", "device": "cpu"} | options))


def tokens_of(target: Model, drafter: Model | None = None, *, gamma: int = 5) -> list[int]:
    """30 greedy tokens after the same few words."""
    proposer = None if drafter is None else ModelDrafter(drafter, target_vocab_size=V_OF(target))
    request = Request(list(range(40, 60)), max_new_tokens=30, gamma=gamma, ignore_eos=True)
    return Engine(target, proposer).generate([request])[0].token_ids


def V_OF(model: Model) -> int:
    return model.vocab_size


def assert_one_line(error: BaseException, *parts: str) -> None:
    message = str(error)
    assert message
    assert "\n" not in message
    for part in parts:
        assert part in message
