"""The drafter seam: what proposes tokens, and how to get one.

Contract. A drafter returns every token it drew, together with the law q it drew it from. It may
stop after a token, by whatever it knows then; it may never drop a token it has drawn, and never
report another q than the one drawn from (None stands for a point mass). Everything else it does
moves the speed only, never the law of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.draft_length import GoOn
from outrider.errors import UsageError, VocabularyMismatch
from outrider.models import Dtype, Engine, Model, check_same_tokenizer, load_model
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

__all__ = ["LOOKUP_FIRST", "Drafter", "make_drafter", "names_model"]


LOOKUP_FIRST = "lookup+"
"""Before a model's reference: copies where the text repeats itself, else that model."""


class Drafter(Protocol):
    """A source of drafts for any number of requests at once.

    A request is known by its `History` object, which grows by the emitted tokens between rounds.

    Attributes:
        name: how the user called it.
        model: whose passes draw tokens (`Draft.steps` of them); None if nothing runs.
    """

    name: str

    @property
    def model(self) -> Model | None:
        """See above."""
        ...

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        """A draft of at most `gammas[i]` tokens after each of `sequences`; may be empty.

        Args:
            sequences: committed tokens of each request.
            gammas: most tokens to draft, at least 1.
            policies: how each request samples; the drafter's laws go through the same.
            noise: the round's draws for each request (`noise[i].draft`).
            go_on: of each request, asked before every draw; none to draft as many as `gammas` says.
        """
        ...

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None:
        """Learn how the last proposals fared. The accepted tokens are in `sequences` by now."""
        ...

    def release(self, sequence: History) -> None:
        """Forget a request that has ended; unknown ones are ignored."""
        ...


def names_model(reference: str) -> bool:
    """Whether a drafter's reference names a model, rather than a drafter that is none."""
    return reference.removeprefix(LOOKUP_FIRST) not in (
        "none",
        "lookup",
    ) and not reference.startswith("ngram:")


def make_drafter(
    reference: str,
    target: Model,
    *,
    engine: Engine = "auto",
    dtype: Dtype = "auto",
    device: str = "auto",
) -> Drafter | None:
    """The drafter a reference names, checked against its target; None for "none".

    Args:
        reference: "auto" (the drafter that comes with Outrider for this target, behind lookup; for
            other targets, lookup alone), "none", "lookup", "ngram:FILE", a model reference (see
            `load_model`), or "lookup+" and a model reference: copies where the text repeats itself,
            else the model.
        target: the model that it will draft for.
        engine, dtype, device: for a drafting model.

    Raises:
        ModelNotFound: nothing is found under `reference`.
        VocabularyMismatch: its token ids are not the target's.
    """
    if reference == "auto":
        from outrider.drafters.registry import shipped_drafter

        shipped = shipped_drafter(target)
        reference = "lookup" if shipped is None else f"{LOOKUP_FIRST}{shipped}"
        # What a drafter's weights are rounded to moves its speed, never the law of the output.
        if shipped is not None and dtype == "auto" and target.engine == "openvino":
            dtype = "int8"
    if reference == "none":
        return None
    if reference == "lookup":
        from outrider.drafters.lookup import LookupDrafter

        return LookupDrafter()
    kind, _, rest = reference.partition(":")
    if kind == "ngram":
        from outrider.drafters.ngram import NgramDrafter, load_ngrams

        if not rest:
            raise UsageError("ngram needs a file: ngram:FILE (make one with `outrider fit`)")
        table = load_ngrams(rest, target.tokenizer)
        if table.vocab_size > target.vocab_size:
            raise VocabularyMismatch(
                f"{rest} was counted over {table.vocab_size} token ids, but {target.name} has only "
                f"{target.vocab_size}; fit a table with this target"
            )
        return NgramDrafter(table)
    from outrider.drafters.lookup_first import LookupFirst
    from outrider.drafters.model import ModelDrafter

    name = reference.removeprefix(LOOKUP_FIRST)
    model = load_model(name, engine=engine, dtype=dtype, device=device)
    check_same_tokenizer(target, model)
    drafter = ModelDrafter(model, target_vocab_size=target.vocab_size)
    return drafter if name == reference else LookupFirst(drafter)
