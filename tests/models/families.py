"""Tiny random models of many architectures, and the yardstick they are held to.

The yardstick is everywhere a plain forward pass of an identical module, over the whole text at once
and without any cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import transformers as hf
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig

from outrider.models import CachedSequence, Feed, Model, Prompt

V = 101
WINDOW = 8  # of every sliding layer here: shorter than the texts
CONTEXT = 1024

Config = Callable[[], PretrainedConfig]


class Family(NamedTuple):
    """An architecture that is served.

    Attributes:
        config: of a tiny model.
        is_ragged: True where a batch is one shared row, False where its sequences run one after
            another.
    """

    config: Config
    is_ragged: bool = True


def small(kind: type[PretrainedConfig], **changes: object) -> Config:
    """A configuration in the words that most architectures share."""
    shared: dict[str, object] = {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,  # tied ones repeat the last token for ever
    }
    return lambda: kind(**(shared | changes))


def other(kind: type[PretrainedConfig], **words: object) -> Config:
    """A configuration in the architecture's own words."""
    shared: dict[str, object] = {
        "vocab_size": V,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return lambda: kind(**(shared | words))


ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2}

FAMILIES = {
    "llama": Family(small(hf.LlamaConfig)),
    "qwen2": Family(small(hf.Qwen2Config)),
    "qwen3": Family(small(hf.Qwen3Config, head_dim=16)),
    "mistral": Family(small(hf.MistralConfig, sliding_window=WINDOW)),
    "gemma": Family(small(hf.GemmaConfig, head_dim=16)),
    "gemma2": Family(
        small(
            hf.Gemma2Config,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    ),
    "gemma3": Family(
        small(hf.Gemma3TextConfig, head_dim=16, sliding_window=WINDOW, layer_types=ALTERNATING)
    ),
    "phi": Family(small(hf.PhiConfig)),
    "phi3": Family(small(hf.Phi3Config, sliding_window=WINDOW)),
    "gpt2": Family(other(hf.GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT)),
    "gpt_neox": Family(small(hf.GPTNeoXConfig)),
    "opt": Family(small(hf.OPTConfig, ffn_dim=48, word_embed_proj_dim=32)),
    "gptj": Family(
        other(hf.GPTJConfig, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=CONTEXT)
    ),
    "mixtral": Family(small(hf.MixtralConfig, num_local_experts=4, **EXPERTS)),
    "cohere": Family(small(hf.CohereConfig)),
    "olmo2": Family(small(hf.Olmo2Config)),
    "llama4_chunked": Family(
        small(
            hf.Llama4TextConfig,
            head_dim=16,
            intermediate_size_mlp=48,
            attention_chunk_size=WINDOW,
            attn_temperature_tuning=False,
            num_local_experts=2,
        )
    ),
    # Its attention counts positions by itself, from the cache's length (from 24 on it shows).
    "llama4_scaled": Family(
        small(
            hf.Llama4TextConfig,
            head_dim=16,
            intermediate_size_mlp=48,
            attention_chunk_size=CONTEXT,
            no_rope_layers=[0, 1],
            attn_temperature_tuning=True,
            floor_scale=24,
            attn_scale=1.0,
            num_local_experts=2,
        ),
        is_ragged=False,
    ),
    "falcon": Family(small(hf.FalconConfig, multi_query=True), is_ragged=False),
    "falcon_alibi": Family(small(hf.FalconConfig, alibi=True), is_ragged=False),
    "bloom": Family(other(hf.BloomConfig, hidden_size=32, n_layer=2, n_head=4), is_ragged=False),
    "stablelm": Family(small(hf.StableLmConfig), is_ragged=False),
    "gpt_neo": Family(
        other(
            hf.GPTNeoConfig,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=WINDOW,
            max_position_embeddings=CONTEXT,
        ),
        is_ragged=False,
    ),
    "gpt_oss": Family(
        small(
            hf.GptOssConfig,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            num_local_experts=4,
            **EXPERTS,
        ),
        is_ragged=False,
    ),
}


def build(config: PretrainedConfig, *, seed: int = 0) -> hf.PreTrainedModel:
    """A module with weights large enough that every token's attention shows in the logits."""
    kind = hf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else hf.AutoModelForCausalLM
    torch.manual_seed(seed)
    module = kind.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.5 / math.sqrt(weight.shape[-1]), generator=generator)
            elif "norm" not in name and "ln_" not in name:
                weight.normal_(0.0, 0.3, generator=generator)
    return module


@cache
def plain(family: str) -> hf.PreTrainedModel:
    """The module with its stock attention, never touched by Outrider."""
    return build(FAMILIES[family].config())


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(V, (length,), generator=generator).tolist()


@torch.inference_mode()
def logits_of(module: Module, ids: Sequence[int]) -> Tensor:
    """[n, V] of a plain forward pass without a cache."""
    rows: Tensor = module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return rows.float()


def fresh(model: Model, ids: Sequence[int]) -> CachedSequence:
    """A sequence that shares nothing, so that everything is really fed."""
    sequence = model.start(Prompt(ids))
    sequence.rollback(0)
    return sequence


def feed_in_pieces(model: Model, ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Logits [n, V] of all of `ids`, fed to a fresh sequence in pieces of these sizes."""
    assert sum(sizes) == len(ids)
    [rows] = feed_side_by_side(model, [ids], [[size] for size in sizes])
    return rows


def feed_side_by_side(
    model: Model, texts: Sequence[Sequence[int]], passes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits [n, V] of every text, each in a fresh sequence, fed in ragged passes.

    Args:
        passes: for every pass, how many tokens each text gets; 0 leaves it out of that pass.
    """
    sequences = [fresh(model, ids) for ids in texts]
    rows: list[list[Tensor]] = [[] for _ in texts]
    at = [0] * len(texts)
    for sizes in passes:
        active = [i for i, size in enumerate(sizes) if size]
        feeds = [Feed(sequences[i], texts[i][at[i] : at[i] + sizes[i]], sizes[i]) for i in active]
        found = model.score(feeds).split([sizes[i] for i in active])
        for i, part in zip(active, found, strict=True):
            rows[i].append(part)
            at[i] += sizes[i]
    for sequence in sequences:
        sequence.close()
    return [torch.cat(parts) for parts in rows]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    assert worst < 1e-4, f"logits differ by {worst:.1e} of the largest"
