"""What a transformers configuration says about serving its model exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outrider.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "context_length",
    "eos_ids",
    "form",
    "refuse_recurrent",
    "refuse_unsupported",
    "sliding_windows",
]

_EXACT_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def refuse_unsupported(config: PretrainedConfig, name: str) -> None:
    """Refuse, by name, what is no decoder, or has a cache that its length cannot roll back."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name}: {kind} is an encoder-decoder; this version serves decoder-only models"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{name}: {kind} is not a causal language model of transformers")
    text = config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _EXACT_LAYERS)
    if foreign:
        raise _not_rolled_back(name, kind, f"layers of type {', '.join(foreign)}")


def refuse_recurrent(config: PretrainedConfig, name: str) -> None:
    """Refuse what only the model's class knows to be recurrent; imports that class (seconds)."""
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        raise _not_rolled_back(name, config.model_type, "a recurrent state")


def _not_rolled_back(name: str, kind: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name}: {kind} has {what}, which cannot be rolled back exactly after a rejected draft; "
        "choose a model with attention layers only"
    )


def form(config: PretrainedConfig) -> str:
    """What sort of model this is, whatever its weights: "llama-30x576-49152"."""
    text = config.get_text_config(decoder=True)
    layers, width = (getattr(text, name, 0) for name in ("num_hidden_layers", "hidden_size"))
    return f"{config.model_type}-{layers}x{width}-{text.vocab_size}"


def context_length(config: PretrainedConfig) -> int:
    """Most tokens a sequence can hold with every position computed the same way in every pass."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # These two change all positions' angles once a pass reaches beyond the original length,
        # so cached keys would depend on how the text was cut into passes.
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            return int(original or text.max_position_embeddings)
    for attribute in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, attribute, None)
        if value:
            return int(value)
    return 2**20


def eos_ids(module: PreTrainedModel, tokenizer_eos: int | None) -> frozenset[int]:
    """End-of-text ids of the generation settings, else the configuration, else the tokenizer."""
    for source in (module.generation_config, module.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset() if tokenizer_eos is None else frozenset([tokenizer_eos])


def sliding_windows(config: PretrainedConfig) -> list[int]:
    """Per layer how many tokens, itself included, a query sees; 0 for all of them.

    Raises:
        UnsupportedModel: a layer whose attention is neither full nor sliding.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or 0
    if not getattr(text, "use_sliding_window", True):
        window = 0
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return [window] * text.num_hidden_layers
    foreign = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if foreign:
        raise UnsupportedModel(f"layers of type {', '.join(foreign)}")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
