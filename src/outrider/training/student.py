"""The drafter before it is trained: its vocabulary, its shape, and what it takes from the target.

A standard Llama-form model with tied embeddings, so every engine and every other tool can load it.
Where its width is the target's and the target is of Llama form, it begins as the target's first
layers between the target's own embeddings: it can already read, and learns to predict. (Layers from
further up expect what the ones left out would have made: with the last among them, it takes twice
as long to get as far.) Where it is narrower, its embeddings begin as the target's, projected on
their principal directions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.errors import UsageError, VocabularyMismatch
from outrider.models import Model
from outrider.models.checkpoints import find_checkpoint, load_weights
from outrider.models.trimmed import Vocabulary, read_vocabulary, tokenizer_digest

__all__ = [
    "StudentShape",
    "choose_vocabulary",
    "earlier_student",
    "make_student",
    "read_as_closest",
]

_LLAMA = "llama"
_WIDEST_OWN = 640
"""A wider student would cost more than a thirtieth of most targets that are as wide."""
_NARROW = 256


@dataclass(frozen=True)
class StudentShape:
    """Size of a drafting model.

    Attributes:
        layers: how many; 0 takes 2 at the target's own width, else 4.
        width: of the hidden states; a multiple of 64, or the target's own. 0 takes the target's own
            if the drafter can begin as its layers and that is at most 640, else 256.
        mlp: width inside the MLP; 0 takes 8/3 of the width. At the width of a Llama target it is
            the target's, since its layers are taken.
    """

    layers: int = 0
    width: int = 0
    mlp: int = 0

    def fitted(self, target: PreTrainedModel) -> StudentShape:
        """With numbers in place of zeros, but for the MLP's."""
        own = int(target.get_input_embeddings().weight.shape[1])
        begins_as_target = target.config.model_type == _LLAMA
        width = self.width or (own if begins_as_target and own <= _WIDEST_OWN else _NARROW)
        layers = self.layers or (2 if begins_as_target and width == own else 4)
        return StudentShape(layers, width, self.mlp)


def choose_vocabulary(counts: Tensor, size: int, always: Collection[int]) -> Tensor:
    """The most frequent ids and those that must not miss, rising; int64 [size].

    Args:
        counts: [V], how often each id was drawn.
        size: V', how many to keep; all of V if that is fewer.
        always: special ids.

    Raises:
        UsageError: fewer than the special ids.
    """
    always = {token for token in always if 0 <= token < len(counts)}
    if size < len(always) + 1:
        raise UsageError(
            f"a vocabulary must hold the {len(always)} special ids and more; got {size}"
        )
    ranks = counts.double().clone()
    ranks[list(always)] = torch.inf
    # Of equally rare ids the lower ones are the more usual: tokenizers number by frequency.
    order = torch.argsort(ranks, descending=True, stable=True)
    return order[:size].sort().values


def read_as_closest(embeddings: Tensor, kept: Tensor) -> Tensor:
    """Of every id the place in `kept` of the id whose embedding points most nearly the same way.

    Args:
        embeddings: [V, d] of the target.
        kept: [V'], rising.

    Returns:
        int64 [V]; a kept id is read as itself.
    """
    directions = torch.nn.functional.normalize(embeddings.float(), dim=1)
    few = directions[kept]
    closest = torch.cat([(part @ few.T).argmax(dim=1) for part in torch.split(directions, 4096)])
    closest[kept] = torch.arange(len(kept))
    return closest


def make_student(
    target: PreTrainedModel,
    kept: Tensor,
    shape: StudentShape,
    *,
    eos_ids: Collection[int],
    seed: int,
) -> LlamaForCausalLM:
    """A student in float32 for the ids in `kept`.

    Args:
        target: of whose embeddings (and layers, if they fit) it begins.
        kept: [V'], rising.
        shape: its size; zeros in it are filled in.
        eos_ids: the target's ids that end a text.
        seed: of what begins at random.
    """
    config, shape = target.config, shape.fitted(target)
    embeddings = target.get_input_embeddings().weight.detach().float()
    is_own = shape.width == embeddings.shape[1] and config.model_type == _LLAMA
    places = {int(token): place for place, token in enumerate(kept.tolist())}
    ends = sorted(places[token] for token in eos_ids if token in places)
    head = 64 if shape.width % 64 == 0 else shape.width // 4
    sizes: dict[str, object] = {
        "intermediate_size": shape.mlp or -(-shape.width * 8 // 3 // 64) * 64,
        "num_attention_heads": shape.width // head,
        "num_key_value_heads": _key_value_heads(shape.width // head),
        "head_dim": head,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    if is_own:
        if shape.mlp not in (0, config.intermediate_size):
            raise UsageError(
                f"at the target's own width its layers are taken, with an MLP of "
                f"{config.intermediate_size}; {shape.mlp} needs another width"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        sizes = {
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None),
            "rope_parameters": dict(rope) or None,
            "rms_norm_eps": config.rms_norm_eps,
            "hidden_act": config.hidden_act,
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
        }
    torch.manual_seed(seed)
    student = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(kept),
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ends or None,
            pad_token_id=None,
            **sizes,
        )
    ).float()
    with torch.no_grad():
        rows = embeddings[kept]
        if is_own:
            student.model.embed_tokens.weight.copy_(rows)
            for layer, source in zip(student.model.layers, target.model.layers, strict=False):
                layer.load_state_dict(source.state_dict())
            student.model.norm.load_state_dict(target.model.norm.state_dict())
        else:
            centred = rows - rows.mean(dim=0)
            directions = torch.linalg.svd(centred, full_matrices=False).Vh[: shape.width]
            projected = torch.zeros(len(kept), shape.width)
            projected[:, : len(directions)] = centred @ directions.T
            student.model.embed_tokens.weight.copy_(0.02 * projected / projected.std())
    return student


def earlier_student(folder: Path, target: Model) -> tuple[LlamaForCausalLM, Vocabulary]:
    """A drafter that was made for this target before, in float32, and the ids it knows.

    Raises:
        ModelNotFound, UnsupportedModel: there is no model that can be read.
        UsageError: it is not one that `outrider distill` made.
        VocabularyMismatch: it was made for another tokenizer.
    """
    student = load_weights(find_checkpoint(str(folder), torch.float32), torch.float32)
    vocabulary = read_vocabulary(folder)
    if vocabulary is None or not isinstance(student, LlamaForCausalLM):
        raise UsageError(f"{folder} holds no drafter that `outrider distill` made; name such a one")
    if student.config.vocab_size != len(vocabulary.kept):
        raise UsageError(
            f"{folder}: the model knows {student.config.vocab_size} ids, its vocabulary keeps "
            f"{len(vocabulary.kept)}"
        )
    if vocabulary.digest != tokenizer_digest(target.tokenizer) or (
        len(vocabulary.read_as) != target.vocab_size
    ):
        raise VocabularyMismatch(
            f"{folder} was made for another tokenizer than that of {target.name}; begin without it"
        )
    return student.train(), vocabulary


def _key_value_heads(num_heads: int) -> int:
    """At most half as many, and each for the same number of heads."""
    return max(n for n in range(1, max(1, num_heads // 2) + 1) if num_heads % n == 0)
