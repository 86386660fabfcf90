"""The default target, speculation on and off: the same text on real prompts."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from outrider import Drafter, Model, Pair, Result
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter, fit_ngrams
from outrider.models import Feed, Prompt
from outrider.models.causal import CausalModel
from real.prompts import PROMPTS

pytestmark = pytest.mark.real

NUM_TOKENS = 16
SETTINGS = {
    "greedy": {"temperature": 0.0, "rule": "block"},
    "coupled": {"temperature": 1.0, "top_p": 0.95, "rule": "coupled", "seed": 7},
}


@pytest.fixture(scope="module")
def plain(target: Model) -> dict[str, list[Result]]:
    pair = Pair(target)
    return {
        name: pair.generate(list(PROMPTS.values()), max_new_tokens=NUM_TOKENS, **settings)
        for name, settings in SETTINGS.items()
    }


@pytest.fixture(params=["lookup", "ngram", "model"])
def drafter(
    request: pytest.FixtureRequest, target: Model, small: Model, plain: dict[str, list[Result]]
) -> Drafter:
    if request.param == "lookup":
        return LookupDrafter()
    if request.param == "ngram":
        # Counted on half of the answers, so that some drafts are right and some are wrong.
        texts = [result.token_ids for result in plain["greedy"][::2]]
        return NgramDrafter(fit_ngrams(texts, order=3, vocab_size=target.vocab_size))
    return ModelDrafter(small, target_vocab_size=target.vocab_size)


@pytest.mark.parametrize("settings", SETTINGS)
def test_ids_equal_plain_decoding_on_every_prompt(
    target: Model, drafter: Drafter, plain: dict[str, list[Result]], settings: str
) -> None:
    assert len(PROMPTS) >= 20
    pair = Pair(target, drafter)
    results = pair.generate(
        list(PROMPTS.values()), max_new_tokens=NUM_TOKENS, gamma=4, **SETTINGS[settings]
    )
    assert sum(result.stats.accepted for result in results) > 0
    assert sum(len(item.drafted) - item.accepted for r in results for item in r.trace) > 0
    for name, ours, theirs in zip(PROMPTS, results, plain[settings], strict=True):
        assert ours.token_ids == theirs.token_ids, name
        assert ours.text == theirs.text, name
        assert ours.finish_reason == theirs.finish_reason, name


def test_a_prompt_alone_gives_what_it_gives_in_a_batch(
    target: Model, plain: dict[str, list[Result]]
) -> None:
    pair = Pair(target, LookupDrafter())
    for name in ("chat", "fix code", "unicode"):
        alone = pair.generate(PROMPTS[name], max_new_tokens=NUM_TOKENS, gamma=4)
        assert alone.token_ids == plain["greedy"][list(PROMPTS).index(name)].token_ids


def test_greedy_ids_are_those_of_transformers_generate(
    module: PreTrainedModel, plain: dict[str, list[Result]]
) -> None:
    for name in ("haiku", "json edit"):
        result = plain["greedy"][list(PROMPTS).index(name)]
        ids = torch.tensor([result.prompt_ids])
        whole = module.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS)
        assert whole[0, len(result.prompt_ids) :].tolist() == result.token_ids


def test_logits_are_those_of_the_torch_engine(target: Model, module: PreTrainedModel) -> None:
    reference = CausalModel(module, name="torch")
    assert target.tokenizer is not None
    ids = target.tokenizer.encode(PROMPTS["unicode"])[:100]
    rows = [
        model.score([Feed(model.start(Prompt(ids)), ids, len(ids))])
        for model in (target, reference)
    ]
    assert float((rows[0] - rows[1]).norm() / rows[1].norm()) < 1e-5


def test_a_real_stream_is_whole_characters_and_adds_up(target: Model) -> None:
    pair = Pair(target, LookupDrafter())
    events = list(pair.stream(PROMPTS["unicode"], max_new_tokens=NUM_TOKENS))
    result = events[-1].result
    assert result is not None
    assert "".join(event.text for event in events) == result.text
    assert not any("\ufffd" in event.text for event in events[:-1])
    ids = [token for token in result.token_ids if token not in target.eos_ids]
    assert target.tokenizer is not None
    assert result.text == target.tokenizer.decode(ids)


def test_repeated_text_is_drafted_well_by_lookup(target: Model) -> None:
    result = Pair(target, LookupDrafter()).generate(PROMPTS["repeat"], max_new_tokens=40)
    assert result.stats.tokens_per_call is not None
    assert result.stats.tokens_per_call > 1.8
