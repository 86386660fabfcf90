"""Copying where the text repeats itself, a drafting model everywhere else."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.draft_length import GoOn
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.models import Model
from outrider.randomness import RoundNoise
from outrider.sampling import History, SamplingPolicy
from outrider.verification import Draft, Verdict

__all__ = ["LookupFirst"]

_MIN_MATCH = 4
"""Shorter matches are accepted less often than what a model of the target's own text proposes."""


class LookupFirst:
    """Drafts a round by a match in the text, if there is a long one, or else by a model.

    Which of the two is settled before the first token of a draft is drawn, by the tokens that stand
    already. So every draft comes from one law: a point mass on each copied token, or the model's q.

    Args:
        lookup: asked first.
        model_drafter: asked where the first one drafts nothing.
    """

    def __init__(self, model_drafter: ModelDrafter, lookup: LookupDrafter | None = None) -> None:
        self._lookup = lookup or LookupDrafter(min_match=_MIN_MATCH)
        self._model_drafter = model_drafter
        self.name = f"lookup+{model_drafter.name}"

    @property
    def model(self) -> Model:
        """The drafting model."""
        return self._model_drafter.model

    def propose(
        self,
        sequences: Sequence[History],
        gammas: Sequence[int],
        policies: Sequence[SamplingPolicy],
        noise: Sequence[RoundNoise],
        go_on: Sequence[GoOn] = (),
    ) -> list[Draft]:
        """Copies for some of the sequences, the model's drafts for the others in one batch."""
        drafts = self._lookup.propose(sequences, gammas, policies, noise, go_on)
        left = [i for i, draft in enumerate(drafts) if not draft.tokens]
        if left:
            drawn = self._model_drafter.propose(
                [sequences[i] for i in left],
                [gammas[i] for i in left],
                [policies[i] for i in left],
                [noise[i] for i in left],
                [go_on[i] for i in left] if go_on else (),
            )
            for i, draft in zip(left, drawn, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, sequences: Sequence[History], verdicts: Sequence[Verdict]) -> None:
        """Both see what stands now."""
        self._lookup.observe(sequences, verdicts)
        self._model_drafter.observe(sequences, verdicts)

    def release(self, sequence: History) -> None:
        """Both forget the request."""
        self._lookup.release(sequence)
        self._model_drafter.release(sequence)
