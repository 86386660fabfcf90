"""The one loop: requests join, rounds run, tokens come out.

A round is Algorithm 1 of Leviathan et al. 2023 for every active request at once: the drafter
proposes, one target pass scores all drafts, each request's rule decides, and what stands is
committed. Plain decoding is the same loop with empty drafts. Offline generation, streams and
servers are callers of `step`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from outrider.costs import Costs
from outrider.draft_length import draft_length
from outrider.drafters import Drafter
from outrider.errors import CacheFull, GenerationError, OutriderError, UsageError
from outrider.models import CachedSequence, Feed, Model, Prompt
from outrider.pass_width import PassWidth
from outrider.randomness import Noise, RoundNoise, fresh_seed
from outrider.requests import (
    Event,
    FinishReason,
    Request,
    Result,
    Round,
    RoundTimes,
    Statistics,
    TokenLogprob,
)
from outrider.sampling import History
from outrider.text import TextBuilder
from outrider.threads import single_threaded
from outrider.verification import Draft, Verdict, greedy, rule

__all__ = ["Engine"]

_WORTH_WAITING = 32
"""Prompt tokens worth a round's wait when another request is about to cache the same ones."""


class _Active:
    """A request on its way: its history, its cached sequence, and what it has so far."""

    def __init__(
        self, request_id: int, request: Request, target: Model, drafter: str, costs: Costs
    ) -> None:
        self.id = request_id
        self.request = request
        self.eos_ids = frozenset() if request.ignore_eos else target.eos_ids
        self.history = History(request.prompt, self.eos_ids | request.stop_ids)
        self.sequence: CachedSequence = target.start(Prompt(self.history.tokens))
        self.passed_over = False  # in a round before this one, with nothing cached
        self.seed = fresh_seed() if request.seed is None else request.seed
        self.noise = Noise(self.seed, coupled=request.rule == "coupled")
        self.rule = rule(request.rule)
        self.length = draft_length(request.gamma, costs)
        self.text = TextBuilder(target.tokenizer, request.stop)
        self.stats = Statistics(
            engine=target.engine, dtype=target.dtype, rule=request.rule, drafter=drafter
        )
        self.trace: list[Round] = []
        self.logprobs: list[TokenLogprob] | None = None if request.logprobs is None else []
        self.started = time.perf_counter()
        # The context's end is one more limit on the number of tokens.
        self.room = min(request.max_new_tokens, target.context_length - len(self.history))

    @property
    def num_emitted(self) -> int:
        return len(self.history) - self.history.prompt_length

    @property
    def draft_limit(self) -> int:
        """A round emits up to gamma + 1 tokens, and no more than there is room for."""
        return max(0, min(self.length.limit, self.room - self.num_emitted - 1))

    @property
    def is_free_of_lengths(self) -> bool:
        """Whether the text is the same whatever is drafted.

        A sampled text under the other rules is another draw from the same law when rounds begin
        elsewhere; so its draft lengths must not depend on the neighbours in the batch.
        """
        return self.request.policy.is_greedy or self.request.rule == "coupled"

    def feed(self, draft: Draft) -> Feed:
        """Whatever the target has not cached yet, and the draft; logits for each of its places."""
        unseen = self.history.tokens[self.sequence.length :]
        return Feed(self.sequence, [*unseen, *draft.tokens], len(draft.tokens) + 1)

    def part(self, num_tokens: int) -> Feed:
        """The next tokens of a prompt that is too long for one pass; their logits are not used."""
        first = self.sequence.length
        return Feed(self.sequence, self.history.tokens[first : first + num_tokens], 1)

    def restart(self, target: Model) -> None:
        """Begin again with what others have cached of the history; rounds feed the rest."""
        self.passed_over = False
        self.sequence.close()
        self.sequence = target.start(Prompt(self.history.tokens))

    def commit(self, token: int) -> FinishReason | None:
        """Append one emitted token; the reason if it ends the output."""
        self.history.tokens.append(token)
        if token in self.history.end_ids:
            return "eos" if token in self.eos_ids else "stop"
        may_stop = self.num_emitted >= self.request.policy.min_new_tokens
        if self.text.add(token, may_stop=may_stop):
            return "stop"
        return "length" if self.num_emitted >= self.room else None

    def result(self, reason: FinishReason, error: OutriderError | None = None) -> Result:
        self.stats.wall_s = time.perf_counter() - self.started
        self.stats.num_tokens = self.num_emitted
        return Result(
            text=self.text.text,
            token_ids=self.history.output,
            finish_reason=reason,
            prompt_ids=self.history.tokens[: self.history.prompt_length],
            seed=self.seed,
            stats=self.stats,
            trace=self.trace,
            logprobs=self.logprobs,
            error=error,
        )


class Engine:
    """Runs requests with different settings side by side; they join and leave between rounds.

    Args:
        target: the model whose law is kept.
        drafter: what proposes; None for plain decoding.
        max_batch: most requests in one round; further ones wait.
        prefill_chunk: most prompt tokens read in one round, so that a long prompt does not hold up
            the other requests.
        costs: of these models' passes on this machine, for adaptive draft lengths; without them a
            drafter that is no model counts as free, and a model's step as a tenth of the target's.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        *,
        max_batch: int = 32,
        prefill_chunk: int = 256,
        costs: Costs | None = None,
    ) -> None:
        if max_batch < 1:
            raise UsageError(f"max_batch must be 1 or more, not {max_batch!r}")
        if prefill_chunk < 1:
            raise UsageError(f"prefill_chunk must be 1 or more, not {prefill_chunk!r}")
        self.target = target
        self.drafter = drafter
        self.costs = costs or _usual_costs(drafter)
        self._pass_width = PassWidth(self.costs)
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[tuple[int, Request]] = deque()
        self._active: dict[int, _Active] = {}
        # Requests whose caches were given up for others; they go on when one of those has left.
        self._suspended: dict[int, _Active] = {}
        self._has_room = False
        self._ids = count()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or on its way."""
        return bool(self._waiting or self._active or self._suspended)

    def add(self, request: Request) -> int:
        """Queue a request; returns its id. Settings the target cannot serve raise at once."""
        request.check(self.target)
        request_id = next(self._ids)
        self._waiting.append((request_id, request))
        return request_id

    def cancel(self, request_id: int) -> Result | None:
        """End a request and free its caches; its result so far, or None if it had not begun."""
        self._waiting = deque(item for item in self._waiting if item[0] != request_id)
        active = self._active.get(request_id) or self._suspended.get(request_id)
        return None if active is None else self._leave(active, "cancelled")

    def step(self) -> list[Event]:
        """One round of every active request.

        Returns:
            An event for every request that took part; no text in those of a request whose prompt
            is still being read. None when there is no work.
        """
        self._admit()
        begun = time.perf_counter()
        reading, batch = self._share_out(list(self._active.values()))
        noise = [item.noise.at(len(item.history)) for item in batch]
        with single_threaded():
            drafts = self._propose(batch, noise)
        drafted = time.perf_counter()
        proposed = dict(zip(batch, drafts, strict=True))
        logits, events = self._score(proposed, reading)
        scored = time.perf_counter()
        standing = []
        first = 0
        with single_threaded():
            for item, dice in zip(batch, noise, strict=True):
                if item.id not in self._active:
                    continue
                draft = proposed[item]
                rows = logits[first : first + len(draft.tokens) + 1]
                first += len(rows)
                times = RoundTimes(
                    begun - item.started, drafted - begun, scored - drafted, 0.0, len(proposed)
                )
                event, verdict = self._settle(item, draft, rows, dice, times)
                events.append(event)
                if verdict is not None:
                    standing.append((item.history, verdict))
        for item in reading:
            if item.id in self._active:
                item.stats.prefill_passes += 1
                events.append(Event(item.id, "", [], None))
        if self.drafter is not None and standing:
            histories, verdicts = zip(*standing, strict=True)
            self.drafter.observe(histories, verdicts)
        return events

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        """Results of all requests, in order.

        Events of requests that were added before are not kept; collect those with `step`.

        Raises:
            OutriderError: the only request failed.
            GenerationError: some of several requests failed; every result is attached.
        """
        for request in requests:
            request.check(self.target)  # all of them before the first is queued
        ids = [self.add(request) for request in requests]
        results: dict[int, Result] = {}
        try:
            while not results.keys() >= set(ids):
                for event in self.step():
                    if event.result is not None:
                        results[event.request_id] = event.result
        finally:
            for request_id in ids:
                self.cancel(request_id)
        in_order = [results[request_id] for request_id in ids]
        failed = [result for result in in_order if result.error is not None]
        if failed and len(in_order) == 1 and failed[0].error is not None:
            raise failed[0].error
        if failed:
            raise GenerationError(
                f"{len(failed)} of {len(in_order)} requests failed, the first with: "
                f"{failed[0].error}",
                in_order,
            )
        return in_order

    def stream(self, request: Request) -> Iterator[Event]:
        """The events of one request as they happen; closing the iterator cancels it.

        Raises:
            OutriderError: the request failed; what was streamed before stands.
        """
        request_id = self.add(request)
        try:
            finished = False
            while not finished:
                for event in self.step():
                    if event.request_id != request_id:
                        continue
                    if event.result is not None and event.result.error is not None:
                        raise event.result.error
                    finished = event.result is not None
                    yield event
        finally:
            self.cancel(request_id)

    def _admit(self) -> None:
        """Let requests in while there is a place; those that were suspended come first."""
        if self._suspended:
            if self._active and not self._has_room:
                return
            self._has_room = False
            for item in list(self._suspended.values()):
                item.restart(self.target)
                self._active[item.id] = self._suspended.pop(item.id)
        drafter = "none" if self.drafter is None else self.drafter.name
        if not self._active:  # who is alone shall round as if it were the first
            self._pass_width = PassWidth(self.costs)
        delayed: list[tuple[int, Request]] = []
        while self._waiting and len(self._active) < self._max_batch and len(delayed) < 8:
            request_id, request = self._waiting.popleft()
            if self._is_being_read(request.prompt):
                delayed.append((request_id, request))
            else:
                self._active[request_id] = _Active(
                    request_id, request, self.target, drafter, self.costs
                )
        self._waiting.extendleft(reversed(delayed))

    def _is_being_read(self, prompt: Sequence[int]) -> bool:
        """Whether a request in the same round is about to cache more of this prompt's beginning."""
        if not self.target.shares_prefixes:
            return False
        for item in self._active.values():
            end = item.sequence.length + _WORTH_WAITING
            if item.num_emitted or end > min(len(prompt), len(item.history)):
                continue
            if list(prompt[:end]) == item.history.tokens[:end]:
                return True
        return False

    def _share_out(self, items: Sequence[_Active]) -> tuple[dict[_Active, Feed], list[_Active]]:
        """Who only reads a part of its prompt in this round, and who drafts and emits.

        Prompts get `prefill_chunk` tokens in all, first come, first served; who gets none waits,
        and takes over what others have cached of its beginning by the time it is its turn.
        """
        reading: dict[_Active, Feed] = {}
        ready: list[_Active] = []
        left = self._prefill_chunk
        for item in items:
            if left and item.passed_over:
                item.restart(self.target)
            unseen = len(item.history) - item.sequence.length
            if unseen == 1 or unseen <= left:
                ready.append(item)
                left -= unseen if unseen > 1 else 0
            elif left:
                reading[item] = item.part(left)
                left = 0
            elif self.target.shares_prefixes and not item.sequence.length:
                item.passed_over = True
        return reading, ready

    def _score(
        self, drafts: dict[_Active, Draft], reading: dict[_Active, Feed]
    ) -> tuple[Tensor, list[Event]]:
        """One target pass. Where the cache has no room for all, the latest request is suspended.

        The draft of a request that is alone is cut to what fits, as if gamma had been that small:
        the cut is fixed by what was committed before, whatever was drawn, so the law stays. Among
        several requests that would not do; their texts would depend on each other.

        Returns:
            The logits of the requests that are still active, and an event for one that failed: a
            request for which there is no room although it is alone.
        """
        feeds = {item: item.feed(draft) for item, draft in drafts.items()} | reading
        while feeds:
            try:
                return self._pass(list(feeds.values())), []
            except CacheFull as error:
                latest = max(feeds, key=lambda item: item.id)
                if len(self._active) > 1:
                    del feeds[latest]
                    self._suspend(latest)
                    continue
                if self.drafter is not None:  # it may live in the same memory
                    self.drafter.release(latest.history)
                room = self.target.room(latest.sequence)
                unseen = len(latest.history) - latest.sequence.length
                if latest not in drafts or not drafts[latest].tokens or room < unseen:
                    result = self._leave(latest, "error", error)
                    return torch.empty(0), [Event(latest.id, latest.text.finish(), [], result)]
                drafts[latest] = _shortened(drafts[latest], room - unseen)
                feeds[latest] = latest.feed(drafts[latest])
        return torch.empty(0), []

    def _pass(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits of the feeds' rows, and behind them others that nobody reads.

        Tokens are added behind the last feed where that makes the pass cheaper.
        """
        needed = sum(len(feed.tokens) for feed in feeds)
        more = self._pass_width.padding(needed)
        sequence, tokens, keep = feeds[-1]
        if more and len(tokens) + more <= self.target.room(sequence):
            wider = Feed(sequence, [*tokens, *[tokens[-1]] * more], keep + more)
            with contextlib.suppress(CacheFull):  # others need the room
                return self.target.score([*feeds[:-1], wider])
        if more:
            self._pass_width.now(needed)
        return self.target.score(feeds)

    def _suspend(self, item: _Active) -> None:
        """Give up a request's caches for others; nothing it has emitted is lost."""
        self._suspended[item.id] = self._active.pop(item.id)
        self._has_room = False
        self._close(item)

    def _close(self, item: _Active) -> None:
        item.sequence.close()
        if self.drafter is not None:
            self.drafter.release(item.history)

    def _propose(self, batch: Sequence[_Active], noise: Sequence[RoundNoise]) -> list[Draft]:
        """A draft for every request; empty for those that draft nothing in this round."""
        drafts = [Draft([]) for _ in batch]
        drafting = [i for i, item in enumerate(batch) if item.draft_limit > 0]
        if self.drafter is None or not drafting:
            return drafts
        proposed = self.drafter.propose(
            [batch[i].history for i in drafting],
            [batch[i].draft_limit for i in drafting],
            [batch[i].request.policy for i in drafting],
            [noise[i] for i in drafting],
            [
                batch[i].length.begin(
                    len(batch) if batch[i].is_free_of_lengths else 1, len(batch[i].history)
                )
                for i in drafting
            ],
        )
        for i, draft in zip(drafting, proposed, strict=True):
            self._check_draft(draft, batch[i].draft_limit)
            drafts[i] = draft
        return drafts

    def _check_draft(self, draft: Draft, limit: int) -> None:
        """Hold the drafter to its contract; a broken one must not bend the output."""
        size = self.target.vocab_size
        shape = None if draft.q is None else tuple(draft.q.shape)
        if (
            len(draft.tokens) > limit
            or any(not 0 <= token < size for token in draft.tokens)
            or (shape is not None and shape != (len(draft.tokens), size))
        ):
            raise OutriderError(
                f"the drafter broke its contract: up to {limit} tokens below {size} and q "
                f"[tokens, {size}] expected, got {draft.tokens!r} and q of shape {shape}"
            )

    def _settle(
        self,
        item: _Active,
        draft: Draft,
        logits: Tensor,
        noise: RoundNoise,
        times: RoundTimes,
    ) -> tuple[Event, Verdict | None]:
        """Verify a request's draft and commit what stands; no verdict if the request has ended."""
        policy = item.request.policy
        try:
            p = None
            if policy.is_greedy and item.logprobs is None:
                verdict = greedy(policy.choices(logits, item.history, draft.tokens), draft)
            else:
                p = policy.probs(logits, item.history, draft.tokens)
                verdict = item.rule(p, draft, noise)
        except OutriderError as error:
            return Event(item.id, item.text.finish(), [], self._leave(item, "error", error)), None

        item.stats.count(len(draft.tokens), verdict.accepted, steps=draft.steps)
        item.length.observe(len(draft.tokens), verdict.accepted)
        emitted: list[int] = []
        reason: FinishReason | None = None
        for token in (*draft.tokens[: verdict.accepted], verdict.token):
            emitted.append(token)
            reason = item.commit(token)
            if reason is not None:
                break
        times = times._replace(end_s=time.perf_counter() - item.started)
        row = Round(tuple(draft.tokens), verdict.accepted, tuple(emitted), times, draft.steps)
        item.trace.append(row)
        if item.logprobs is not None and p is not None:
            num_top = item.request.logprobs or 0
            item.logprobs.extend(_logprobs(p, logits, emitted, num_top))
        if reason is None:
            # Of the committed tokens the last was not in the feed: it is fed in the next round.
            item.sequence.rollback(len(item.history) - 1)
            return Event(item.id, item.text.take(), emitted, None, row), verdict
        shown = item.text.finish()
        if item.text.stopped:
            reason = "stop"
        return Event(item.id, shown, emitted, self._leave(item, reason), row), None

    def _leave(
        self, item: _Active, reason: FinishReason, error: OutriderError | None = None
    ) -> Result:
        """Close everything a request holds and give its result."""
        self._active.pop(item.id, None)
        self._suspended.pop(item.id, None)
        self._has_room = True
        self._close(item)
        return item.result(reason, error)


def _usual_costs(drafter: Drafter | None) -> Costs:
    """What is assumed where nothing was measured: passes bound by memory up to a few positions."""
    runs_model = drafter is not None and drafter.model is not None
    return Costs((1, 33), (1.0, 3.0), drafter_ms=0.1 if runs_model else 0.0)


def _shortened(draft: Draft, length: int) -> Draft:
    """The draft as it would have been with a gamma of `length`."""
    q = None if draft.q is None or length == 0 else draft.q[:length]
    return Draft(draft.tokens[:length], q, draft.steps)


def _logprobs(p: Tensor, logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """One entry per emitted token; row i of `p` [n, V] is the law that tokens[i] came from."""
    entries = []
    processed = p[: len(tokens)].log()
    raw = logits[: len(tokens)].to(p.dtype).log_softmax(-1)
    for law, raw_law, token in zip(processed, raw, tokens, strict=True):
        likeliest = [i for i in law.topk(num_top).indices.tolist() if law[i] > -float("inf")]
        for i in raw_law.topk(num_top).indices.tolist():
            if len(likeliest) < num_top and i not in likeliest:
                likeliest.append(i)
        top = tuple(TokenLogprob(i, float(law[i]), float(raw_law[i])) for i in likeliest)
        entries.append(TokenLogprob(token, float(law[token]), float(raw_law[token]), top))
    return entries
