"""`outrider measure`: alpha of drafters side by side, and what passes cost."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import (
    DeviceOption,
    DrafterDtypeOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    KvMemoryOption,
    TargetOption,
    TopKOption,
    TopPOption,
    check_output,
    duration,
    load_pair,
    parsed,
)
from outrider.cli.show_measure import print_alpha, print_cost
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.drafters import Drafter
    from outrider.measure.measuring import Amounts, Measuring
    from outrider.measure.prompts import PromptItem
    from outrider.measure.unfinished import Unfinished
    from outrider.models import Model
    from outrider.pair import Pair
    from outrider.sampling import SamplingPolicy

__all__ = ["measure"]

Rows = list[dict[str, object]]

_TOKENS, _QUICK_TOKENS = 10_000, 600
_SHIPPED = "auto"
_CONTEXTS, _BATCHES = "16,256,1024", "1,4,8"
PROGRESS_S = 5.0


@app.command()
def measure(
    target: TargetOption = "default",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="A model or ngram:FILE, beside the baselines; repeatable. If none is named, the "
            "drafting model that comes with Outrider for this target, if there is one."
        ),
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option("--baselines/--no-baselines", help="Lookup, unigram, bigram, random as well."),
    ] = True,
    temperatures: Annotated[
        str, typer.Option("--temperatures", "--temperature", help="Comma-separated.")
    ] = "0,1",
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts in Spec-Bench's question.jsonl form.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Of the target's text, at each temperature. [10000]")
    ] = None,
    rounds: Annotated[
        bool | None,
        typer.Option(
            "--rounds/--no-rounds",
            help="Count real rounds of named drafters and lookup.",
            show_default="rounds",
        ),
    ] = None,
    cost_only: Annotated[bool, typer.Option("--cost-only", help="Leave out alpha.")] = False,
    no_cost: Annotated[bool, typer.Option("--no-cost", help="Leave out the cost.")] = False,
    contexts: Annotated[
        str | None, typer.Option(help="Tokens before timed positions. [16,256,1024]")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Sequences in timed passes. [1,4,8]")] = None,
    full_curve: Annotated[
        bool, typer.Option("--full-curve", help="Time passes over every n from 1 to 33.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="600 tokens; one short cost curve.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the measurement here, over what was; an interrupted call can go on."
        ),
    ] = None,
    engine: EngineOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    kv_memory: KvMemoryOption = None,
    drafter_dtype: DrafterDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how often drafts are right, and what passes cost: what `plan` needs to know."""
    if cost_only and no_cost:
        raise UsageError("--cost-only and --no-cost leave nothing to measure; pass one of them")
    if no_cost and (contexts is not None or batches is not None or full_curve):
        raise UsageError(
            "--contexts, --batches and --full-curve are about the cost; drop --no-cost"
        )
    about_alpha = (tokens, prompts, rounds, top_k or None, None if top_p == 1.0 else top_p)
    if cost_only and any(value is not None for value in about_alpha):
        raise UsageError(
            "--tokens, --prompts, --rounds, --top-k, --top-p are about alpha; drop --cost-only"
        )
    from outrider.measure.prompts import digest, read_prompts, shipped_prompts
    from outrider.measure.provenance import proposed_by, provenance, source_digest
    from outrider.measure.unfinished import Unfinished

    names = list(dict.fromkeys(drafter or []))
    if not baselines and not names:
        raise UsageError("--no-baselines leaves no drafter to measure; pass one with --drafter")
    names = names or [_SHIPPED]
    policies = _policies(parsed(temperatures, "temperatures", float), top_k, top_p)
    amounts = _amounts(tokens, contexts, batches, names, quick, full_curve, rounds is not False)
    items = shipped_prompts() if prompts is None else read_prompts(prompts)
    arguments: dict[str, object] = {
        "target": target,
        "drafters": names,
        "baselines": baselines,
        "temperatures": [policy.temperature for policy in policies],
        "top_k": top_k,
        "top_p": top_p,
        "tokens": amounts.num_tokens,
        "rounds": list(amounts.counted),
        "cost": not no_cost,
        "alpha": not cost_only,
        "positions": list(amounts.positions),
        "contexts": list(amounts.contexts),
        "batches": list(amounts.batches),
        "repeats": amounts.repeats,
        "engine": engine,
        "dtype": dtype,
        "device": device,
        "drafter_dtype": drafter_dtype,
        "kv_memory": kv_memory,
        "prompts": digest(items),
    }
    kept = None
    if out is not None:
        check_output(out)
        kept = Unfinished(out, arguments | {"source": source_digest()})
    loaded = load_pair(target, "none", engine, dtype, device, kv_memory)
    if contexts is not None:
        _check_contexts(amounts, loaded.target)
    named = _drafters(names, loaded.target, engine, dtype, device, drafter_dtype)
    if not drafter and named[_SHIPPED].model is None:
        del named[_SHIPPED]  # lookup, one of the baselines
    measuring = _prepared(loaded, named, items, policies, amounts, baselines, kept)
    measuring.expect(alpha=not cost_only, cost=not no_cost)
    rows: Rows = []
    facts: dict[str, object] = {"target": target, "alpha": rows}
    try:
        for policy in [] if cost_only else policies:
            rows += measuring.alpha_rows(policy)
            _note_missing(rows[-1], amounts.num_tokens)
        if not no_cost:
            facts["cost"] = measuring.cost()
    except BaseException:  # whatever it is, what was measured is not lost
        terminal.print_unfinished(
            rows,
            None if kept is None else (len(kept.records), kept.path),
            lambda: print_alpha(rows),
            as_json=as_json,
        )
        raise
    facts["provenance"] = provenance(arguments, proposed_by=proposed_by(named))
    if kept is not None:
        kept.finish(facts)
    if as_json:
        print(json.dumps(facts))
        return
    _print(facts, rows)


def _policies(temperatures: Sequence[float], top_k: int, top_p: float) -> list[SamplingPolicy]:
    from outrider.sampling import SamplingPolicy

    if len(set(temperatures)) < len(temperatures):
        raise UsageError(f"temperatures must differ from each other, not {list(temperatures)!r}")
    return [SamplingPolicy(temperature=t, top_k=top_k, top_p=top_p) for t in temperatures]


def _amounts(
    tokens: int | None,
    contexts: str | None,
    batches: str | None,
    names: Sequence[str],
    quick: bool,
    full_curve: bool,
    rounds: bool,
) -> Amounts:
    from outrider.measure.cost import FULL_POSITIONS, POSITIONS, QUICK_POSITIONS
    from outrider.measure.measuring import Amounts

    if tokens is not None and tokens < 1:
        raise UsageError(f"--tokens must be 1 or more, not {tokens}")
    usual = QUICK_POSITIONS if quick else POSITIONS
    return Amounts(
        num_tokens=tokens or (_QUICK_TOKENS if quick else _TOKENS),
        counted=tuple(dict.fromkeys([*names, "lookup"])) if rounds else (),
        positions=FULL_POSITIONS if full_curve else usual,
        contexts=_counts(contexts or ("256" if quick else _CONTEXTS), "contexts"),
        batches=_counts(batches or ("1" if quick else _BATCHES), "batches"),
        repeats=3 if quick else 5,
    )


def _check_contexts(amounts: Amounts, target: Model) -> None:
    from outrider.measure.cost import curve_places

    fitting = {context for context, _ in curve_places(target, amounts.contexts, (1,))}
    if missing := sorted(set(amounts.contexts) - fitting):
        raise UsageError(
            f"--contexts {missing[0]} leaves no room for timed positions in the "
            f"{target.context_length} tokens that {target.name} can read; name shorter ones"
        )


def _counts(text: str, name: str) -> tuple[int, ...]:
    values = parsed(text, name, int)
    if min(values) < 1 or len(set(values)) < len(values):
        raise UsageError(f"--{name} must be different numbers, 1 or more, not {text!r}")
    if name == "batches" and 1 not in values:
        raise UsageError(f"--batches must have 1 among them, which v(n) is told for, not {text!r}")
    return values


def _drafters(
    names: Sequence[str],
    target: Model,
    engine: str,
    dtype: str,
    device: str,
    drafter_dtype: str | None,
) -> dict[str, Drafter]:
    """The named ones; the baselines that need text come later."""
    from outrider.drafters import make_drafter
    from outrider.measure.alpha import BASELINES
    from outrider.models import check_choices

    if drafter_dtype is not None:
        check_choices(dtype=drafter_dtype)
    found: dict[str, Drafter] = {}
    for name in names:
        if name in BASELINES and name != "lookup":
            raise UsageError(f"{name} is a baseline; it is measured unless --no-baselines")
        made = make_drafter(
            name,
            target,
            engine=engine,  # type: ignore[arg-type]
            dtype=drafter_dtype or dtype,  # type: ignore[arg-type]
            device=device,
        )
        if made is None:
            raise UsageError("there is nothing to measure of --drafter none; leave it out")
        found[name] = made
    if drafter_dtype is not None and all(drafter.model is None for drafter in found.values()):
        raise UsageError("--drafter-dtype is for a drafting model, and none is named")
    return found


def _prepared(
    pair: Pair,
    named: Mapping[str, Drafter],
    items: Sequence[PromptItem],
    policies: Sequence[SamplingPolicy],
    amounts: Amounts,
    baselines: bool,
    kept: Unfinished | None,
) -> Measuring:
    from outrider.measure.measuring import Measuring
    from outrider.measure.texts import encoded

    measuring = Measuring(
        pair.target,
        named,
        encoded(pair, items),
        policies,
        amounts,
        baselines=baselines,
        kept=kept,
        progress=_Progress(),
    )
    if measuring.num_kept:
        terminal.err.print(
            f"going on after {measuring.num_kept} pieces that are measured", style="dim"
        )
    return measuring


class _Progress:
    """A line every few seconds, with the time left."""

    def __init__(self) -> None:
        self._begun = self._told = time.perf_counter()

    def __call__(self, what: str, made: float, left: float) -> None:
        now = time.perf_counter()
        if now - self._told < PROGRESS_S:
            return
        self._told = now
        left_s = (now - self._begun) * left / made if made else 0.0
        terminal.err.print(
            what + (f"; about {duration(left_s)} left" if left_s >= 1.0 else ""), style="dim"
        )


def _note_missing(row: Mapping[str, object], wanted: int) -> None:
    have = row["num_tokens"]
    assert isinstance(have, int)
    if have < 0.95 * wanted:
        terminal.err.print(
            f"note: {row['policy']}: the texts of all prompts have {have} of {wanted} tokens; "
            "more prompts (--prompts) give more",
            style="dim",
        )


def _print(facts: Mapping[str, object], rows: Rows) -> None:
    if rows:
        print_alpha(rows)
    cost = facts.get("cost")
    if isinstance(cost, dict):
        if rows:
            terminal.out.print()
        print_cost(cost)
