"""The model seam: a next-token law with a cache per sequence, and how to get one.

Target and drafting model are used through the same three calls. A batch is a list of sequences of
different lengths; there is no other path for a batch of one.

*Catch-up*: a caller feeds whatever is not cached yet. After a round every cache holds a prefix of
the committed tokens, and at least the last of them is always missing, so there is always something
to feed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast, get_args

from outrider.errors import UnsupportedModel, UsageError, VocabularyMismatch
from outrider.text import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CachedSequence",
    "Dtype",
    "Engine",
    "Feed",
    "Model",
    "Prompt",
    "check_choices",
    "check_same_tokenizer",
    "load_model",
]

Engine = Literal["auto", "openvino", "torch"]
Dtype = Literal["auto", "float32", "bfloat16", "int8"]


class Prompt(NamedTuple):
    """What a sequence starts from.

    Attributes:
        ids: token ids of the decoder, at least one.
        encoder_ids: token ids of the encoder, for encoder-decoder models.
    """

    ids: Sequence[int]
    encoder_ids: Sequence[int] | None = None


class CachedSequence(Protocol):
    """One sequence's place in a model's cache."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values are cached."""
        ...

    def rollback(self, length: int) -> None:
        """Forget all tokens after the first `length`. O(1): nothing is copied."""
        ...

    def close(self) -> None:
        """Give the memory back. The sequence must not be used again; closing twice is harmless."""
        ...


class Feed(NamedTuple):
    """Tokens for one sequence, and for how many of the last of them logits are wanted."""

    sequence: CachedSequence
    tokens: Sequence[int]
    keep: int


class Model(Protocol):
    """A causal law over token ids.

    Attributes:
        name: how the user called it.
        engine: what runs it, e.g. "torch".
        dtype: the precision of weights and cache, e.g. "float32".
        vocab_size: V, the width of a row of logits (may exceed the tokenizer's vocabulary).
        context_length: most tokens a sequence can hold.
        tokenizer: None for a model that only knows ids.
        eos_ids: ids that end a text.
        shares_prefixes: whether `start` takes over what other sequences have cached of the same
            beginning.
    """

    name: str
    engine: str
    dtype: str
    vocab_size: int
    context_length: int
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    shares_prefixes: bool

    def start(self, prompt: Prompt) -> CachedSequence:
        """A sequence for `prompt`, which is not fed yet; the caller feeds what is not cached.

        Most engines begin empty. Where `shares_prefixes`, a beginning may be cached already, but
        never the whole prompt.
        """
        ...

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits after the last `keep` tokens of every feed, in one pass over a ragged batch.

        The fed tokens are appended to their sequences' caches. Returns when the device is done.

            two feeds, keep 1 and 3 -> [4, V]: one row of the first, three of the second

        Args:
            feeds: at least one; every sequence at most once, with at least one token, and `keep`
                from 1 to len(tokens).

        Returns:
            [sum of keep, V] in float32 (float64 from a float64 model).
        """
        ...

    def room(self, sequence: CachedSequence) -> int:
        """Most tokens that could be fed to this sequence if no other one is fed."""
        ...

    def forget(self) -> None:
        """Give up what ended sequences have left in the cache."""
        ...


def load_model(
    reference: str,
    *,
    engine: Engine = "auto",
    dtype: Dtype = "auto",
    device: str = "auto",
    kv_memory: int | None = None,
) -> Model:
    """The model a reference names.

    Args:
        reference: "default" (the target Outrider is set up with), a folder or a `.gguf` file, a hub
            id, or `toy:NAME`.
        engine: "openvino" (CPU), "torch" (CPU, CUDA, MPS), or "auto": on a CPU "openvino" where it
            supports the model, with one line on stderr where it does not, else "torch".
        dtype: precision of weights and cache; "auto" is bfloat16 where the hardware computes in it,
            else float32. "int8" (openvino only) rounds the weights to 8 bits: another target.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        kv_memory: bytes for keys and values (openvino only); None chooses.

    Raises:
        ModelNotFound: nothing is found under `reference`.
        UnsupportedModel: the model cannot be served exactly, or not by `engine`.
        UsageError: an unknown engine, dtype or device, or a setting the engine does not have.
    """
    check_choices(engine, dtype, device)
    if reference.startswith("toy:"):
        if engine == "openvino" or kv_memory is not None:
            raise UsageError(
                f"{reference} has an engine of its own; leave out engine and kv_memory"
            )
        from outrider.models.toy import load_toy

        return cast(Model, load_toy(reference, dtype=dtype, device=device))
    refusal = ""
    engine = _choose_engine(engine, device)
    if engine != "torch":
        try:
            from outrider.models.graph import NotConverted
            from outrider.models.paged import load_paged

            return _trimmed(load_paged(reference, dtype=dtype, kv_memory=kv_memory), reference)
        except NotConverted as error:
            refusal = str(error)
            if engine == "openvino":
                raise UnsupportedModel(
                    f"{reference} does not run on openvino: {refusal}; use engine torch"
                ) from error
    if dtype == "int8" or kv_memory is not None:
        setting = "dtype int8" if dtype == "int8" else "kv_memory"
        raise UsageError(f"{setting} needs the openvino engine; {reference} runs on torch here")
    from outrider.models.causal import load_causal

    model = _trimmed(load_causal(reference, dtype=dtype, device=device), reference)
    if refusal:
        print(f"{reference} runs on torch, not openvino: {refusal}", file=sys.stderr)
    return model


def _trimmed(model: object, reference: str) -> Model:
    """The model, or where its folder says that it knows few of its target's ids, that one."""
    from outrider.models.trimmed import TrimmedModel, read_vocabulary

    vocabulary = read_vocabulary(Path(reference).expanduser())
    whole = cast(Model, model)
    return whole if vocabulary is None else TrimmedModel(whole, vocabulary)


def check_choices(engine: str = "auto", dtype: str = "auto", device: str = "auto") -> None:
    """Refuse an unknown engine or dtype, or an engine that does not run there; UsageError."""
    if engine not in get_args(Engine):
        raise UsageError(f"engine must be one of {', '.join(get_args(Engine))}, not {engine!r}")
    if dtype not in get_args(Dtype):
        raise UsageError(f"dtype must be one of {', '.join(get_args(Dtype))}, not {dtype!r}")
    if engine == "openvino" and device not in ("auto", "cpu"):
        raise UsageError(f"engine openvino runs on the CPU; with device {device!r} use torch")


def _choose_engine(engine: Engine, device: str) -> Engine:
    """ "auto" stays where openvino is worth a try; else the one engine that can be meant."""
    if engine != "auto":
        return engine
    if device == "auto":
        import torch

        on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    else:
        on_cpu = device == "cpu"
    return "auto" if on_cpu and importlib.util.find_spec("openvino") is not None else "torch"


def check_same_tokenizer(target: Model, drafter: Model) -> None:
    """Refuse a drafting model whose ids mean something else than the target's.

    Ids beyond the shorter vocabulary do not matter: logits rows are often padded, and ids that only
    one of the two knows are never drafted or simply have no mass in q.

    Raises:
        VocabularyMismatch: names the first id on which the two disagree.
    """
    from outrider.models.trimmed import TrimmedModel

    if isinstance(drafter, TrimmedModel):
        drafter.check_tokenizer(target)
        return
    if target.tokenizer is None or drafter.tokenizer is None:
        return
    ours, theirs = target.tokenizer.vocabulary(), drafter.tokenizer.vocabulary()
    for token, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            raise VocabularyMismatch(
                f"target and drafter must share a tokenizer: token {token} is {our!r} in "
                f"{target.name} and {their!r} in {drafter.name}; pass a drafter made for this "
                "tokenizer, or --drafter lookup"
            )
