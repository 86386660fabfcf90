"""Any decoder-only transformers model, on CPU, CUDA or MPS (the `torch` engine).

*Cache.* Every sequence owns preallocated key and value buffers per layer; what is cached is their
first `length` columns. Rolling back is setting `length`; a pass writes behind it.

*Ragged batch.* The tokens of all feeds are laid end to end in one row of a single forward pass, so
no position is padding. Only attention looks at one sequence at a time: transformers lets us
register an attention function, and there each segment of the row meets its own sequence's keys. The
masks come from the model's own mask functions, evaluated per segment, so that full, sliding-window
and chunked attention are all served from complete buffers, where a rollback is exact.

*Proof at load.* A model is probed before the first token: logits of a fed, rolled back and batched
sequence are compared with a plain forward pass without any cache. A model on which the shared row
does not work (positions taken from the mask, attention of its own) is run one sequence at a time
with its stock attention; one on which that differs too is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    PreTrainedModel,
)
from transformers.masking_utils import causal_mask_function

from outrider.errors import UnsupportedModel
from outrider.models import CachedSequence, Dtype, Feed, Prompt
from outrider.models.architecture import (
    context_length,
    eos_ids,
    form,
    refuse_recurrent,
    refuse_unsupported,
)
from outrider.models.checkpoints import (
    find_checkpoint,
    load_config,
    load_tokenizer,
    load_weights,
)
from outrider.models.devices import choose_device, choose_dtype, synchronise
from outrider.models.probe import plain_logits, probe, probe_ids
from outrider.text import Tokenizer

__all__ = ["CausalModel", "load_causal"]

_ATTENTION = "outrider"
_HEADROOM = 256  # columns allocated beyond the prompt; buffers double when they are full


class CausalSequence:
    """Keys and values of one sequence: per layer two buffers [1, heads, capacity, head size]."""

    def __init__(self, capacity: int, limit: int) -> None:
        self._length = 0
        self._capacity = capacity
        self._limit = limit
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Tokens cached."""
        return self._length

    def rollback(self, length: int) -> None:
        """Forget all tokens after the first `length`; the buffers stay as they are."""
        assert 0 <= length <= self._length, (length, self._length)
        self._length = length

    def close(self) -> None:
        """Free the buffers."""
        self._layers.clear()
        self._length = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new columns behind the cached ones; returns views of all columns of the layer.

        Args:
            layer: index of the layer.
            keys, values: [1, heads, n, head size].
        """
        end = self._length + keys.shape[2]
        buffers = self._layers.get(layer)
        if buffers is None or buffers[0].shape[2] < end:
            if end > self._capacity:
                self._capacity = min(max(2 * self._capacity, end), max(self._limit, end))
            buffers = (self._grown(buffers, 0, keys), self._grown(buffers, 1, values))
            self._layers[layer] = buffers
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[:, :, self._length : end] = new
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count columns written by a finished pass as cached."""
        self._length += num_tokens

    def _grown(self, old: tuple[Tensor, Tensor] | None, which: int, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        buffer = like.new_empty(1, heads, self._capacity, size)
        if old is not None:
            buffer[:, :, : self._length] = old[which][:, :, : self._length]
        return buffer


class _Segment(NamedTuple):
    """One sequence's part of the shared row: columns `start` to `stop`."""

    sequence: CausalSequence
    start: int
    stop: int

    @property
    def num_new(self) -> int:
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        return self.sequence.length + self.num_new


class _RowMask(NamedTuple):
    """What attention needs beside queries and keys: for every segment a mask [n, keys], or None
    where each query may see every key up to its own position and `causal` says it all."""

    segments: Sequence[_Segment]
    masks: Sequence[Tensor | None]


class _NoSingleLength:
    """What a shared row answers when it is asked for its length.

    A model may pass it on, or add it to a number to size a mask that it then does not need. One
    that counts positions with it (a tensor plus this) fails at once, in the probe at load, and is
    run one sequence at a time.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def __add__(self, other: object) -> int:
        return self._longest + other if isinstance(other, int) else NotImplemented

    __radd__ = __add__


class _PassCache(Cache):  # type: ignore[misc]
    """The cache object of one forward pass, as transformers wants it.

    With `ragged`, keys and values come back as lists with one view per segment, for our attention
    function; without, as plain tensors of the only segment, for the model's stock attention.
    """

    def __init__(self, segments: Sequence[_Segment], *, ragged: bool) -> None:
        super().__init__(layers=[])
        self._segments = segments
        self._ragged = ragged

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[list[Tensor], list[Tensor]] | tuple[Tensor, Tensor]:
        views = [
            sequence.write(layer_idx, key_states[:, :, start:stop], value_states[:, :, start:stop])
            for sequence, start, stop in self._segments
        ]
        if not self._ragged:
            return views[0]
        return [keys for keys, _ in views], [values for _, values in views]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self._ragged:
            longest = max(segment.sequence.length for segment in self._segments)
            return _NoSingleLength(longest)  # type: ignore[return-value]
        return self._segments[0].sequence.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # transformers hands this number to the mask function as it is: the one way to tell ours
        # about the segments of this pass without global state.
        if self._ragged:
            return self._segments, 0  # type: ignore[return-value]
        return self._segments[0].num_keys, 0


def _row_mask(
    *,
    kv_length: Sequence[_Segment],
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    device: torch.device | str = "cpu",
    **unused: object,
) -> _RowMask:
    """The model's own mask function, evaluated on the positions of every segment."""
    segments = kv_length
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    masks: list[Tensor | None] = []
    for segment in segments:
        if mask_function is causal_mask_function and segment.num_new in (1, segment.num_keys):
            masks.append(None)
            continue
        keys = torch.arange(segment.num_keys, device=device)
        queries = keys[segment.sequence.length :]
        mask = mask_function(zero, zero, queries[:, None], keys[None, :])
        masks.append(mask.expand(len(queries), len(keys)))
    return _RowMask(segments, masks)


def _row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    attention_mask: _RowMask,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of a shared row: each segment's queries over its own sequence's keys.

    Args:
        query: [1, query heads, N, head size], all segments end to end.
        key, value: one [1, key heads, keys of the segment, head size] per segment.

    Returns:
        [1, N, query heads, value head size], and None for the weights.
    """
    for name in ("s_aux", "position_bias", "sinks"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    outputs = []
    for segment, mask, keys, values in zip(*attention_mask, key, value, strict=True):
        queries = query[:, :, segment.start : segment.stop]
        causal = mask is None and segment.num_new > 1
        attend = scaled_dot_product_attention if softcap is None else _capped_attention(softcap)
        output = attend(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        outputs.append(output.transpose(1, 2))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).contiguous(), None


def _capped_attention(softcap: float) -> Callable[..., Tensor]:
    """Attention whose scores are squashed to (-softcap, softcap), as Gemma 2 does it."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = query @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
        scores = softcap * torch.tanh(scores / softcap)
        if is_causal:
            attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value

    return attend


AttentionInterface.register(_ATTENTION, _row_attention)
AttentionMaskInterface.register(_ATTENTION, _row_mask)


class CausalModel:
    """A transformers causal language model behind the `Model` seam.

    Args:
        module: the model, in evaluation mode and on its device.
        name: what the user called it.
        tokenizer: None if only ids are wanted.
        eos_ids: ids that end a text.

    Raises:
        UnsupportedModel: the model cannot be rolled back exactly, or its probe fails.
    """

    engine = "torch"
    shares_prefixes = False

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        name: str,
        tokenizer: Tokenizer | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        refuse_unsupported(module.config, name)
        refuse_recurrent(module.config, name)
        self.name = name
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.device = module.device
        self.num_parameters = int(module.num_parameters())
        self.form = form(module.config)
        self.dtype = str(module.dtype).removeprefix("torch.")
        self.vocab_size = int(module.get_output_embeddings().weight.shape[0])
        self.context_length = context_length(module.config)
        self.notices: list[str] = []
        self._module = module
        accepted = inspect.signature(module.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_rows = "logits_to_keep" in accepted
        self.is_ragged = self._choose_attention()

    def start(self, prompt: Prompt) -> CausalSequence:
        """An empty sequence with room for the prompt and some tokens more."""
        capacity = min(len(prompt.ids) + _HEADROOM, self.context_length)
        return CausalSequence(capacity, self.context_length)

    def room(self, sequence: CachedSequence) -> int:
        """What the context has left."""
        return self.context_length - sequence.length

    def forget(self) -> None:
        """Nothing is left in the cache of an ended sequence."""

    @torch.inference_mode()
    def score(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits [sum of keep, V] after the last `keep` tokens of every feed; float32."""
        if self.is_ragged:
            rows = self._forward(feeds)
        else:
            rows = torch.cat([self._forward([feed]) for feed in feeds])
        for sequence, tokens, _ in feeds:
            assert isinstance(sequence, CausalSequence)
            sequence.advance(len(tokens))
        if self.device.type != "cpu":
            synchronise(self.device)
        return rows

    def _forward(self, feeds: Sequence[Feed]) -> Tensor:
        """One forward pass over the feeds laid end to end; nothing is counted as cached yet."""
        segments: list[_Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        for sequence, new, keep in feeds:
            assert isinstance(sequence, CausalSequence)
            assert 1 <= keep <= len(new), (keep, len(new))
            past, start = sequence.length, len(tokens)
            assert past + len(new) <= self.context_length, "fed past the context's end"
            tokens.extend(new)
            positions.extend(range(past, past + len(new)))
            kept.extend(range(len(tokens) - keep, len(tokens)))
            segments.append(_Segment(sequence, start, len(tokens)))
        options: dict[str, Tensor] = {}
        if self._takes_positions:
            options["position_ids"] = torch.tensor([positions], device=self.device)
        if self._takes_rows:
            options["logits_to_keep"] = torch.tensor(kept, device=self.device)
        output = self._module(
            input_ids=torch.tensor([tokens], device=self.device),
            cache=_PassCache(segments, ragged=self.is_ragged),
            use_cache=True,
            **options,
        )
        logits: Tensor = output.logits[0]
        if not self._takes_rows:
            logits = logits[kept]
        return logits.float()

    @torch.inference_mode()
    def _choose_attention(self) -> bool:
        """True for the shared row, False for one sequence at a time; refuses what neither suits."""
        count = min(16, self.context_length)
        ids = probe_ids(count, self.vocab_size)
        if self._module.config._attn_implementation == _ATTENTION:  # wrapped once before
            self._module.set_attn_implementation("sdpa" if self._module._supports_sdpa else "eager")
        expected = plain_logits(self._module, ids)

        stock = self._module.config._attn_implementation
        reason = "its attention is not open to other implementations"
        if self._takes_positions and self._module._supports_attention_backend:
            try:
                self._module.set_attn_implementation(_ATTENTION)
                self.is_ragged = True
                difference = probe(self, ids, expected)
                if difference <= self._tolerance:
                    return True
                reason = f"its logits came out different by {difference:.1e}"
            except Exception as error:  # whatever a foreign model does with our row
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._module.set_attn_implementation(stock)
        self.is_ragged = False
        try:
            difference = probe(self, ids, expected)
        except Exception as error:
            raise UnsupportedModel(
                f"{self.name}: {self._module.config.model_type} does not run with a cache that can "
                f"be rolled back ({str(error).splitlines()[0]}); choose another model"
            ) from error
        if difference > self._tolerance:
            raise UnsupportedModel(
                f"{self.name}: {self._module.config.model_type} gives other logits after a "
                f"rollback (relative difference {difference:.1e}); it cannot be served exactly"
            )
        self.notices.append(f"{self.name}: sequences of a batch run one after another ({reason})")
        return False

    @property
    def _tolerance(self) -> float:
        return 1e-3 if self._module.dtype == torch.float32 else 1e-1


def load_causal(reference: str, *, dtype: Dtype = "auto", device: str = "auto") -> CausalModel:
    """The causal model a reference names; see `models.load_model`."""
    place = choose_device(device)
    precision = choose_dtype(dtype, place)
    checkpoint = find_checkpoint(reference, precision)
    config = load_config(checkpoint)
    refuse_unsupported(config, reference)
    refuse_recurrent(config, reference)
    module = load_weights(checkpoint, precision)
    tokenizer = load_tokenizer(checkpoint)
    return CausalModel(
        module.to(place),
        name=reference,
        tokenizer=tokenizer,
        eos_ids=eos_ids(module, None if tokenizer is None else tokenizer.eos_id),
    )
