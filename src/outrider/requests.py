"""What goes into decoding and what comes out: requests, results, statistics, traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

from outrider.errors import ContextOverflow, OutriderError, UsageError
from outrider.models import Model
from outrider.randomness import MAX_SEED
from outrider.sampling import SamplingPolicy
from outrider.verification import rule

__all__ = [
    "Event",
    "FinishReason",
    "Request",
    "Result",
    "Round",
    "RoundTimes",
    "Statistics",
    "TokenLogprob",
]

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt and everything that decides its output.

    Attributes:
        prompt: token ids, at least one.
        policy: how tokens are sampled.
        max_new_tokens: most tokens to emit; the context's end limits it too.
        gamma: tokens drafted in a round, as far as they fit; None drafts as many as are worth their
            time (`draft_length.Adaptive`); 0 turns speculation off.
        rule: "block", "rejection" or "coupled".
        seed: 0 to 2**64 - 1; None takes a fresh one, reported in the result.
        stop: strings that end the text; the text ends before them.
        stop_ids: token ids that end the text.
        ignore_eos: go on after the model's own end-of-text tokens.
        logprobs: None, or for every token its log-probability and the K likeliest ones.
    """

    prompt: Sequence[int]
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    max_new_tokens: int = 256
    gamma: int | None = None
    rule: str = "block"
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def check_settings(self) -> None:
        """Refuse what no target could serve; raises UsageError with what was expected."""
        rule(self.rule)
        _check_count("max_new_tokens", self.max_new_tokens, 1, None)
        if self.gamma is not None:
            _check_count("gamma", self.gamma, 0, None)
        if self.seed is not None:
            _check_count("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, 0, None)
        if isinstance(self.stop, str):
            raise UsageError("stop must be a sequence of strings, not one string")
        if any(not isinstance(stop, str) or not stop for stop in self.stop):
            raise UsageError(f"stop strings must not be empty, got {list(self.stop)!r}")

    def check(self, target: Model) -> None:
        """Refuse what `target` cannot serve, before anything is run.

        Raises:
            UsageError: a setting out of range, with what was expected.
            ContextOverflow: the prompt leaves no room for a new token.
        """
        self.check_settings()
        self.policy.check_vocabulary(target.vocab_size)
        _check_ids("prompt", self.prompt, target)
        _check_ids("stop_ids", self.stop_ids, target)
        if len(self.prompt) == 0:
            raise UsageError("the prompt is empty; pass at least one token")
        if len(self.prompt) >= target.context_length:
            raise ContextOverflow(
                f"the prompt has {len(self.prompt)} tokens; {target.name} has a context of "
                f"{target.context_length} and needs room for at least one more: shorten the prompt"
            )
        if self.gamma is not None:
            _check_count("gamma", self.gamma, 0, target.context_length - 1)
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, 0, target.vocab_size)
        if self.stop and target.tokenizer is None:
            raise UsageError(f"stop strings need a tokenizer, and {target.name} has none")


class RoundTimes(NamedTuple):
    """When a round was run and what took the time; shared by all requests of the round.

    Attributes:
        start_s: from the request's start to the round's.
        draft_s: in the drafter.
        target_s: in the target's pass; in a request's first round it reads the prompt as well.
        end_s: from the request's start to the round's end.
        num_requests: how many were in the same pass.
    """

    start_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    end_s: float = 0.0
    num_requests: int = 1


@dataclass(frozen=True)
class Round:
    """One round of one request, for the trace (Leviathan et al. 2023, Figure 1).

    Attributes:
        drafted: what the drafter proposed.
        accepted: how many of them the rule kept.
        emitted: what was added to the output: the accepted tokens and the target's own, cut short
            where the output ended.
        times: of this run; two rounds that did the same are equal whatever they took.
        steps: passes of a drafting model behind the draft; 0 where it was copied or counted.
    """

    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    times: RoundTimes = field(default=RoundTimes(), compare=False)
    steps: int = 0


class TokenLogprob(NamedTuple):
    """How likely one token was.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability under the target's processed law, the one it was drawn
            from (0 for every greedy token).
        raw_logprob: the same under the model's unprocessed logits at temperature 1.
        top: the K likeliest tokens under the processed law; where it has fewer, the likeliest
            others under the raw logits follow, with logprob -infinity. Their `top` is empty.
    """

    token_id: int
    logprob: float
    raw_logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass
class Statistics:
    """Counters of one request (DESIGN section 1 has the words).

    Attributes:
        rounds: rounds it took part in.
        target_passes: target passes that emitted for it; one per round.
        prefill_passes: target passes before those, each over a part of a long prompt.
        drafter_steps: passes of a drafting model spent on it.
        drafted, examined, accepted: tokens proposed, looked at by the rule, kept.
        emitted: accepted + rounds, before the output was cut at its end.
        wall_s: seconds from its first round to its last.
        num_tokens: tokens in the output.
        engine, dtype, rule, drafter: what produced it.
    """

    rounds: int = 0
    target_passes: int = 0
    prefill_passes: int = 0
    drafter_steps: int = 0
    drafted: int = 0
    examined: int = 0
    accepted: int = 0
    emitted: int = 0
    wall_s: float = 0.0
    num_tokens: int = 0
    engine: str = ""
    dtype: str = ""
    rule: str = ""
    drafter: str = "none"

    @property
    def alpha_hat(self) -> float | None:
        """accepted / examined: a draft token's chance to be kept once it is looked at."""
        return self.accepted / self.examined if self.examined else None

    @property
    def accepted_fraction(self) -> float | None:
        """accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_call(self) -> float | None:
        """emitted / target passes."""
        return self.emitted / self.target_passes if self.target_passes else None

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per output token, the prompt's pass included."""
        return 1e3 * self.wall_s / self.num_tokens if self.num_tokens else None

    def count(self, drafted: int, accepted: int, *, steps: int) -> None:
        """Add one round with that many passes of a drafting model."""
        self.rounds += 1
        self.target_passes += 1
        self.drafter_steps += steps
        self.drafted += drafted
        self.examined += min(accepted + 1, drafted)
        self.accepted += accepted
        self.emitted += accepted + 1

    def as_dict(self) -> dict[str, int | float | str | None]:
        """Every counter and ratio, ready for JSON."""
        return asdict(self) | {
            "alpha_hat": self.alpha_hat,
            "accepted_fraction": self.accepted_fraction,
            "tokens_per_call": self.tokens_per_call,
            "ms_per_token": self.ms_per_token,
        }


@dataclass
class Result:
    """The outcome of one request.

    Attributes:
        text: the output, without special tokens and without the stop string.
        token_ids: the output's ids; an end token that ended it is the last of them.
        finish_reason: "eos", "stop" (string or id), "length" (limit or context end), "cancelled",
            "error".
        prompt_ids: what was continued.
        seed: the seed used.
        stats: counters.
        trace: every round.
        logprobs: one entry per output token, if asked for.
        error: what went wrong, if `finish_reason` is "error".
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_ids: list[int]
    seed: int
    stats: Statistics
    trace: list[Round]
    logprobs: list[TokenLogprob] | None = None
    error: OutriderError | None = None


class Event(NamedTuple):
    """What one step did for one request.

    Attributes:
        request_id: as returned by `Engine.add`.
        text: text that can be shown now; may be empty.
        token_ids: tokens emitted in this step.
        result: the outcome, in the request's last event.
        round: the round that this step was; None where the prompt was read or the request failed.
    """

    request_id: int
    text: str
    token_ids: list[int]
    result: Result | None
    round: Round | None = None


def _check_ids(name: str, ids: Iterable[int], target: Model) -> None:
    for token in ids:
        if not 0 <= token < target.vocab_size:
            raise UsageError(
                f"{name}: token id {token} is outside the vocabulary; ids of {target.name} run "
                f"from 0 to {target.vocab_size - 1}"
            )


def _check_count(name: str, value: int, low: int, high: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        limit = f"{low} or more" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name} must be a whole number, {limit}, not {value!r}")
