"""A target and its drafter, ready to use from Python: prompts in, results out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypedDict, Unpack, cast, overload

from outrider.costs import Costs, kept_costs
from outrider.decoding import Engine
from outrider.drafters import Drafter, make_drafter
from outrider.errors import CacheFull, UsageError
from outrider.models import Dtype, Model, load_model
from outrider.models import Engine as EngineName
from outrider.requests import Event, Request, Result
from outrider.sampling import LogitsProcessor, SamplingPolicy
from outrider.text import Message

__all__ = ["Pair", "PromptLike", "Settings", "check_settings", "load", "pair_with"]

PromptLike = str | Sequence[Message] | Sequence[int]
"""Text, a conversation, or token ids."""

_Batch = list[str] | list[list[Message]] | list[list[int]]


class Settings(TypedDict, total=False):
    """Keyword settings of `Pair.generate` and `Pair.stream`.

    The fields of `SamplingPolicy` and `Request`, where they are explained, and
    `system`: a system message put in front of a text prompt;
    `raw`: continue a text prompt as it stands, without the model's chat format.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    banned_tokens: tuple[int, ...]
    min_new_tokens: int
    processors: tuple[LogitsProcessor, ...]
    max_new_tokens: int
    gamma: int | None
    rule: str
    seed: int | None
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    logprobs: int | None
    system: str | None
    raw: bool


_POLICY_FIELDS = {item.name for item in fields(SamplingPolicy)}
_REQUEST_FIELDS = {item.name for item in fields(Request)} - {"prompt", "policy"}


class Pair:
    """A target with its drafter.

    Args:
        target: the model whose law is kept.
        drafter: what proposes; None for plain decoding.
        max_batch: most requests decoded side by side.
        costs: of their passes, for adaptive draft lengths; see `Engine`.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        *,
        max_batch: int = 32,
        costs: Costs | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.max_batch = max_batch
        self.costs = costs

    def engine(self, *, max_batch: int | None = None) -> Engine:
        """A fresh engine over these models."""
        return Engine(
            self.target, self.drafter, max_batch=max_batch or self.max_batch, costs=self.costs
        )

    def request(self, prompt: PromptLike, **settings: Unpack[Settings]) -> Request:
        """The request that a prompt and settings make, for use with `decoding.Engine`.

        Raises:
            UsageError: an unknown setting, a value out of range, or an empty prompt.
        """
        draft = check_settings(settings)
        system, raw = settings.get("system"), settings.get("raw", False)
        request = replace(draft, prompt=self.encode(prompt, system=system, raw=raw))
        request.check(self.target)
        return request

    @overload
    def generate(self, prompt: _Batch, **settings: Unpack[Settings]) -> list[Result]: ...
    @overload
    def generate(self, prompt: PromptLike, **settings: Unpack[Settings]) -> Result: ...
    def generate(
        self, prompt: PromptLike | _Batch, **settings: Unpack[Settings]
    ) -> Result | list[Result]:
        """The result of one prompt, or of each prompt of a list decoded side by side.

        A list of strings, of conversations or of id lists is a batch; a list of messages is one
        conversation and a list of ids one prompt. `seed` counts for each prompt by itself, so a
        prompt's output does not depend on its neighbours.

        Raises:
            OutriderError: see `Engine.generate`.
        """
        is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        prompts = cast("list[PromptLike]", prompt if is_batch else [prompt])
        requests = [self.request(item, **settings) for item in prompts]
        results = self.engine().generate(requests)
        return results if is_batch else results[0]

    def stream(self, prompt: PromptLike, **settings: Unpack[Settings]) -> Iterator[Event]:
        """Events of one prompt as its tokens are decided; the last one carries the result.

        The texts of the events, joined, are the result's text. Closing the iterator early frees
        everything the request holds.
        """
        request = self.request(prompt, **settings)
        return self.engine().stream(request)

    @property
    def drafting_model(self) -> Model | None:
        """The drafter's model; None for a drafter that is none."""
        return None if self.drafter is None else self.drafter.model

    def forget(self) -> None:
        """Start cold: give up what ended requests have left in the models' caches."""
        self.target.forget()
        if self.drafting_model is not None:
            self.drafting_model.forget()

    def encode(
        self, prompt: PromptLike, *, system: str | None = None, raw: bool = False
    ) -> list[int]:
        """Token ids of a prompt; text goes through the model's chat format unless `raw`.

        Raises:
            UsageError: an empty prompt, or text for a model without a tokenizer.
        """
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return list(cast("Sequence[int]", prompt))
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UsageError(f"{self.target.name} has no tokenizer; pass token ids")
        if not isinstance(prompt, str):
            messages = list(cast("Sequence[Message]", prompt))
            if not tokenizer.has_chat_template:
                raise UsageError(f"{self.target.name} has no chat format; pass text")
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return tokenizer.encode_chat(messages)
        if not prompt:
            raise UsageError("the prompt is empty; pass some text")
        if raw or not tokenizer.has_chat_template:
            if system is not None:
                raise UsageError("a system message needs a chat format; leave out system or raw")
            return tokenizer.encode(prompt)
        return self.encode([{"role": "user", "content": prompt}], system=system)


def load(
    target: str = "default",
    drafter: str = "auto",
    *,
    engine: EngineName = "auto",
    dtype: Dtype = "auto",
    device: str = "auto",
    kv_memory: int | None = None,
    drafter_dtype: Dtype | None = None,
    max_batch: int = 32,
) -> Pair:
    """A pair, its models loaded.

    Args:
        target: "default", a folder, a `.gguf` file, a hub id, or `toy:NAME`.
        drafter: "auto", "lookup", "ngram:FILE", "none", a model reference like `target`, or
            "lookup+" and a model reference; see `drafters.make_drafter`.
        engine, dtype, device: see `load_model`.
        kv_memory: bytes for the target's keys and values; see `load_model`.
        drafter_dtype: of a drafting model; None for the target's. It changes how often drafts are
            right, and the time they take, but never the law of the output.
        max_batch: most requests decoded side by side.

    Raises:
        OutriderError: see `load_model` and `make_drafter`.
    """
    model = load_model(target, engine=engine, dtype=dtype, device=device, kv_memory=kv_memory)
    return pair_with(
        model,
        drafter,
        engine=engine,
        dtype=drafter_dtype or dtype,
        device=device,
        max_batch=max_batch,
    )


def pair_with(
    target: Model,
    drafter: str,
    *,
    engine: EngineName = "auto",
    dtype: Dtype = "auto",
    device: str = "auto",
    max_batch: int = 32,
) -> Pair:
    """A pair of a target that is loaded already and a drafter to load, and what they cost here.

    Args:
        target: may have other pairs.
        drafter: as for `load`; `engine`, `dtype` and `device` are the drafter's.

    Raises:
        OutriderError: see `make_drafter`.
    """
    proposer = make_drafter(drafter, target, engine=engine, dtype=dtype, device=device)
    pair = Pair(target, proposer, max_batch=max_batch)
    if proposer is not None and target.engine != "toy":
        from outrider.models.checkpoints import to_stderr

        # Memory too small to time passes in still decodes, by usual costs.
        with contextlib.suppress(CacheFull):
            pair.costs = kept_costs(target, pair.drafting_model, notify=to_stderr)
    return pair


def check_settings(settings: Settings) -> Request:
    """A request with these settings and no prompt yet.

    Raises:
        UsageError: an unknown setting, or a value that no model could serve.
    """
    given: dict[str, object] = dict(settings)
    unknown = sorted(set(given) - _POLICY_FIELDS - _REQUEST_FIELDS - {"system", "raw"})
    if unknown:
        known = ", ".join(sorted(Settings.__annotations__))
        raise UsageError(f"unknown setting {unknown[0]!r}; the settings are {known}")
    policy = SamplingPolicy(**_chosen(given, _POLICY_FIELDS))  # type: ignore[arg-type]
    request = Request((), policy, **_chosen(given, _REQUEST_FIELDS))  # type: ignore[arg-type]
    request.check_settings()
    return request


def _chosen(given: Mapping[str, object], names: set[str]) -> dict[str, object]:
    return {name: value for name, value in given.items() if name in names}
