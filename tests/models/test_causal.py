"""The torch engine on tiny random models of many architectures.

The yardstick is everywhere a plain forward pass of an identical module, over the whole text at once
and without any cache. Texts are longer than every sliding window, so that a mask that is right only
near the start of a text does not pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from models.families import (
    ALTERNATING,
    FAMILIES,
    WINDOW,
    Config,
    V,
    assert_close,
    build,
    feed_in_pieces,
    feed_side_by_side,
    logits_of,
    other,
    plain,
    small,
    text,
)
from outrider.decoding import Engine
from outrider.drafters import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import ContextOverflow, UnsupportedModel
from outrider.models import Feed, Prompt
from outrider.models.architecture import refuse_unsupported
from outrider.models.causal import CausalModel, CausalSequence
from outrider.requests import Request, Result
from outrider.sampling import SamplingPolicy

GAMMAS = (1, 2, 5, 20)
NUM_NEW = 24  # tokens of a text: more than the longest draft and one
SAMPLED = SamplingPolicy(temperature=1.0)

REFUSED: dict[str, tuple[Config, str]] = {
    "mamba": (other(hf.MambaConfig, hidden_size=32, num_hidden_layers=2), "mamba has"),
    "rwkv": (other(hf.RwkvConfig, hidden_size=32, num_hidden_layers=2), "recurrent state"),
    "recurrent_gemma": (
        small(
            hf.RecurrentGemmaConfig,
            num_hidden_layers=3,
            lru_width=32,
            attention_window_size=WINDOW,
        ),
        "recurrent_gemma has",
    ),
    "jamba": (small(hf.JambaConfig, num_hidden_layers=8), "jamba has"),
    "lfm2": (small(hf.Lfm2Config, layer_types=["conv", "full_attention"]), "lfm2 has layers"),
    "t5": (
        other(hf.T5Config, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        "t5 is an encoder-decoder",
    ),
    # It takes no cache at all and silently ignores the one it is given.
    "openai-gpt": (
        other(hf.OpenAIGPTConfig, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "openai-gpt gives other logits",
    ),
}


@cache
def served(family: str) -> CausalModel:
    """An identical module behind the seam."""
    return CausalModel(build(FAMILIES[family].config()), name=f"tiny {family}")


@cache
def near(family: str) -> CausalModel:
    """The same architecture with disturbed weights: it agrees with `served` now and then."""
    module = build(FAMILIES[family].config())
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * weight.std(correction=0) * 0.05)
    return CausalModel(module, name=f"near {family}")


@cache
def stranger() -> CausalModel:
    """A model of the same vocabulary that has nothing to do with any target."""
    return CausalModel(build(small(hf.LlamaConfig)(), seed=77), name="stranger")


def drafter_of(kind: str, family: str) -> Drafter:
    if kind == "lookup":
        return LookupDrafter()
    model = stranger() if kind == "stranger" else near(family)
    return ModelDrafter(model, target_vocab_size=V)


def start(model: CausalModel, ids: Sequence[int]) -> CausalSequence:
    return model.start(Prompt(ids))


def greedy(
    target: CausalModel, drafter: Drafter | None, prompt: Sequence[int], gammas: Sequence[int]
) -> list[Result]:
    """Greedy results for each gamma, decoded side by side."""
    requests = [Request(prompt, max_new_tokens=NUM_NEW, gamma=gamma) for gamma in gammas]
    return Engine(target, drafter).generate(requests)


@cache
def plain_greedy(family: str, prompt: tuple[int, ...]) -> list[int]:
    """Tokens that are each the argmax of a plain forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(NUM_NEW):
        ids.append(int(logits_of(plain(family), ids)[-1].argmax()))
    return ids[len(prompt) :]


each_family = pytest.mark.parametrize("family", FAMILIES)
# One of each kind: full, sliding, capped and mixed attention; rotary, learned and linear positions.
CORE = ["llama", "mistral", "gemma2", "gpt2", "bloom", "gpt_oss"]
each_core_family = pytest.mark.parametrize("family", CORE)


# --- The table of what is served, how, and what is refused ---


@each_family
def test_a_family_is_served_the_way_the_table_says(family: str) -> None:
    assert served(family).is_ragged == FAMILIES[family].is_ragged


@each_family
def test_a_note_tells_when_the_sequences_of_a_batch_run_one_after_another(family: str) -> None:
    notices = served(family).notices
    assert len(notices) == (0 if FAMILIES[family].is_ragged else 1)
    assert all("one after another" in notice and f"tiny {family}" in notice for notice in notices)


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_unsupported_architecture_is_refused_by_name_in_one_line(architecture: str) -> None:
    config, reason = REFUSED[architecture]
    with pytest.raises(UnsupportedModel) as caught:
        CausalModel(build(config()), name="my model")
    assert str(caught.value).startswith("my model: ")
    assert architecture in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_no_language_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"^my model: vit is not a causal language model"):
        refuse_unsupported(hf.ViTConfig(), "my model")


def test_every_sliding_window_of_these_tests_is_shorter_than_their_texts() -> None:
    """Otherwise the windows would prove nothing."""
    first, second = text(40), text(40)
    second[0] = (first[0] + 1) % V
    # Two layers of windows see at most 2 * WINDOW tokens back, and chunks no more than that.
    rows = [logits_of(plain("mistral"), ids)[2 * WINDOW :] for ids in (first, second)]
    assert torch.equal(*rows)
    rows = [logits_of(plain("llama"), ids)[2 * WINDOW :] for ids in (first, second)]
    assert not torch.equal(*rows)


# --- Logits by way of the cache ---


@each_family
def test_logits_of_a_text_fed_token_by_token_are_those_of_a_plain_pass(family: str) -> None:
    ids = text(40)
    found = feed_in_pieces(served(family), ids, [1] * 40)
    assert_close(found, logits_of(plain(family), ids))


@each_family
@pytest.mark.parametrize("sizes", [(40,), (1, 7, 2, 11, 3, 16), (16, 3, 11, 2, 7, 1)])
def test_logits_do_not_depend_on_the_pieces_a_text_is_fed_in(
    family: str, sizes: tuple[int, ...]
) -> None:
    ids = text(40)
    assert_close(feed_in_pieces(served(family), ids, sizes), logits_of(plain(family), ids))


@each_family
def test_wrong_tokens_leave_no_trace_after_a_rollback(family: str) -> None:
    model, ids = served(family), text(40)
    sequence, rows, at = start(model, ids), [], 0
    for i, size in enumerate((5, 4, 9, 1, 12, 9)):
        model.score([Feed(sequence, text(1 + 3 * i, seed=i), 1)])
        sequence.rollback(at)
        rows.append(model.score([Feed(sequence, ids[at : at + size], size)]))
        at += size
    assert_close(torch.cat(rows), logits_of(plain(family), ids))


@each_family
def test_part_of_what_one_pass_fed_can_be_rolled_back(family: str) -> None:
    model, ids = served(family), text(30)
    sequence = start(model, ids)
    model.score([Feed(sequence, [*ids[:20], *text(9, seed=3)], 1)])
    sequence.rollback(20)
    assert_close(model.score([Feed(sequence, ids[20:], 10)]), logits_of(plain(family), ids)[20:])


@each_family
def test_a_sequence_can_be_rolled_back_to_nothing(family: str) -> None:
    model, ids = served(family), text(20)
    sequence = start(model, ids)
    model.score([Feed(sequence, text(20, seed=4), 1)])
    sequence.rollback(0)
    assert sequence.length == 0
    assert_close(model.score([Feed(sequence, ids, 20)]), logits_of(plain(family), ids))


@each_family
def test_each_row_of_a_ragged_batch_is_what_its_sequence_gives_alone(family: str) -> None:
    """Three sequences; in every pass other sizes, and one time only two of them."""
    model = served(family)
    texts = [text(40, seed=1), text(33, seed=2), text(21, seed=3)]
    passes = ((20, 9, 1), (1, 15, 4), (10, 0, 1), (9, 9, 15))
    found = feed_side_by_side(model, texts, passes)
    for rows, ids in zip(found, texts, strict=True):
        assert_close(rows, logits_of(plain(family), ids))


@each_family
def test_a_rollback_of_one_sequence_does_not_touch_its_neighbours(family: str) -> None:
    model = served(family)
    texts = [text(24, seed=5), text(24, seed=6)]
    first, second = (start(model, ids) for ids in texts)
    model.score([Feed(first, [*texts[0][:9], 1, 2, 3], 1), Feed(second, texts[1][:14], 1)])
    first.rollback(9)
    found = model.score([Feed(second, texts[1][14:], 10), Feed(first, texts[0][9:], 15)])
    wanted = [logits_of(plain(family), ids) for ids in texts]
    assert_close(found, torch.cat([wanted[1][14:], wanted[0][9:]]))


@each_family
def test_only_the_last_keep_rows_come_back_for_each_feed(family: str) -> None:
    model = served(family)
    texts, keeps = [text(17, seed=7), text(12, seed=8), text(5, seed=9)], (3, 1, 5)
    feeds = [Feed(start(model, ids), ids, n) for ids, n in zip(texts, keeps, strict=True)]
    wanted = [logits_of(plain(family), ids)[-n:] for ids, n in zip(texts, keeps, strict=True)]
    assert_close(model.score(feeds), torch.cat(wanted))
    assert [feed.sequence.length for feed in feeds] == [17, 12, 5]


@each_family
def test_buffers_grow_beyond_their_headroom_without_losing_a_column(family: str) -> None:
    model, ids = served(family), text(700)
    sequence = start(model, ids[:3])  # room for 259 tokens
    sizes = (200, 59, 1, 20, 20, 218, 1, 181)  # up to the end, past it by one, and past it again
    rows, at = [], 0
    for size in sizes:
        rows.append(model.score([Feed(sequence, ids[at : at + size], size)]))
        at += size
    assert_close(torch.cat(rows), logits_of(plain(family), ids))


@each_family
def test_a_rollback_reaches_back_over_a_growth_of_the_buffers(family: str) -> None:
    model, ids = served(family), text(280)
    sequence = start(model, ids[:3])
    model.score([Feed(sequence, [*ids[:250], *text(150, seed=10)], 1)])
    sequence.rollback(250)
    found = model.score([Feed(sequence, ids[250:], 30)])
    assert_close(found, logits_of(plain(family), ids)[250:])


# --- The whole loop ---

PROMPTS = (tuple(text(11, seed=20)), tuple(text(3, seed=21) * 6))


def assert_plain_greedy_for_every_gamma(
    family: str, drafter: Drafter, prompt: tuple[int, ...]
) -> None:
    results = greedy(served(family), drafter, prompt, GAMMAS)
    texts = {gamma: r.token_ids for gamma, r in zip(GAMMAS, results, strict=True)}
    assert texts == dict.fromkeys(GAMMAS, plain_greedy(family, prompt))


@each_family
def test_greedy_text_with_a_drafting_model_is_plain_greedy_text_for_every_gamma(
    family: str,
) -> None:
    assert_plain_greedy_for_every_gamma(family, drafter_of("near", family), PROMPTS[0])


@each_family
def test_greedy_text_with_prompt_lookup_is_plain_greedy_text_for_every_gamma(family: str) -> None:
    assert_plain_greedy_for_every_gamma(family, LookupDrafter(), PROMPTS[1])


@pytest.mark.parametrize("family", ["gemma2", "falcon"])
def test_greedy_text_with_a_drafter_that_is_never_right_is_plain_greedy_text(family: str) -> None:
    assert_plain_greedy_for_every_gamma(family, drafter_of("stranger", family), PROMPTS[1])


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_greedy_text_is_plain_greedy_text_in_a_batch_of_one(family: str, gamma: int) -> None:
    [result] = greedy(served(family), drafter_of("near", family), PROMPTS[0], [gamma])
    assert result.token_ids == plain_greedy(family, PROMPTS[0])


@pytest.mark.parametrize("drafting", ["near", "lookup"])
def test_the_drafters_of_these_tests_are_neither_always_right_nor_always_wrong(
    drafting: str,
) -> None:
    """Otherwise the identities above would not cover acceptance and rejection."""
    stats = [
        result.stats
        for family in ("llama", "gemma2", "gpt2", "falcon")
        for prompt in PROMPTS
        for result in greedy(served(family), drafter_of(drafting, family), prompt, [5])
    ]
    assert 0 < sum(s.accepted for s in stats) < sum(s.examined for s in stats)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "opt"])
def test_greedy_text_is_that_of_transformers_own_generate(family: str) -> None:
    prompt = PROMPTS[0]
    ids = plain(family).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
    )
    [result] = greedy(served(family), drafter_of("near", family), prompt, [5])
    assert result.token_ids == ids[0, len(prompt) :].tolist()


@each_family
def test_greedy_drafts_of_the_target_itself_are_accepted_whole(family: str) -> None:
    target = served(family)
    [result] = greedy(target, ModelDrafter(target, target_vocab_size=V), PROMPTS[0], [5])
    assert result.stats.alpha_hat == 1.0


@each_core_family
@pytest.mark.parametrize("rule", ["block", "rejection", "coupled"])
def test_sampled_drafts_of_the_target_itself_are_accepted_whole(family: str, rule: str) -> None:
    target = served(family)
    requests = [
        Request(PROMPTS[0], SAMPLED, max_new_tokens=NUM_NEW, gamma=gamma, rule=rule, seed=gamma)
        for gamma in (2, 7)
    ]
    drafter = ModelDrafter(target, target_vocab_size=V)
    for result in Engine(target, drafter).generate(requests):
        assert result.stats.alpha_hat == 1.0


def test_the_target_drafting_for_itself_needs_one_pass_for_each_gamma_plus_one_tokens() -> None:
    target = served("llama")
    [result] = greedy(target, ModelDrafter(target, target_vocab_size=V), PROMPTS[0], [5])
    assert result.stats.target_passes == NUM_NEW / (5 + 1)


@each_family
def test_sampled_requests_side_by_side_give_what_each_gives_alone(family: str) -> None:
    target, drafter = served(family), drafter_of("near", family)
    requests = [
        Request(text(4 + 9 * i, seed=i), SAMPLED, max_new_tokens=8, gamma=1 + 2 * i, seed=i)
        for i in range(4)
    ]
    together = Engine(target, drafter).generate(requests)
    alone = [Engine(target, drafter).generate([request])[0] for request in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert len({tuple(r.token_ids) for r in together}) == 4


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_greedy_and_sampled_requests_side_by_side_give_what_each_gives_alone(family: str) -> None:
    target, drafter = served(family), drafter_of("near", family)
    requests = [
        Request(PROMPTS[0], max_new_tokens=12, seed=1),
        Request(PROMPTS[0], SAMPLED, max_new_tokens=12, seed=2, rule="coupled"),
        Request(PROMPTS[1], max_new_tokens=5, gamma=0, seed=3),
        Request(PROMPTS[1], SAMPLED, max_new_tokens=9, gamma=3, seed=4, rule="rejection"),
    ]
    together = Engine(target, drafter).generate(requests)
    alone = [Engine(target, drafter).generate([request])[0] for request in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


# --- The context's end ---


def roped(**rope: object) -> dict[str, object]:
    return {"rope_theta": 10000.0, **rope}


def longrope(original: int) -> dict[str, object]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return roped(rope_type="longrope", original_max_position_embeddings=original, **factors)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (small(hf.LlamaConfig, max_position_embeddings=64), 64),
        (
            small(
                hf.LlamaConfig,
                max_position_embeddings=64,
                rope_parameters=roped(rope_type="linear", factor=4.0),
            ),
            64,
        ),
        (
            small(
                hf.LlamaConfig,
                max_position_embeddings=64,
                rope_parameters=roped(rope_type="dynamic", factor=4.0),
            ),
            64,
        ),
        (
            small(
                hf.Phi3Config,
                max_position_embeddings=96,
                original_max_position_embeddings=24,
                rope_parameters=longrope(24),
            ),
            24,
        ),
        (small(hf.LlamaConfig, max_position_embeddings=96, rope_parameters=longrope(24)), 24),
        (
            small(
                hf.Gemma3TextConfig,
                head_dim=8,
                sliding_window=WINDOW,
                layer_types=ALTERNATING,
                max_position_embeddings=96,
                rope_parameters={
                    "sliding_attention": roped(rope_type="default"),
                    "full_attention": longrope(24),
                },
            ),
            24,
        ),
        (other(hf.GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=48), 48),
        (other(hf.MptConfig, d_model=32, n_layers=2, n_heads=4, max_seq_len=40), 40),
    ],
    ids=["plain", "linear", "dynamic", "longrope", "longrope-llama", "by-layer", "gpt2", "mpt"],
)
def test_the_context_ends_where_positions_are_no_longer_the_same_in_every_pass(
    config: Config, expected: int
) -> None:
    assert CausalModel(build(config()), name="x").context_length == expected


def test_dynamic_rope_is_exact_up_to_the_last_token_of_its_context() -> None:
    rope = roped(rope_type="dynamic", factor=4.0)
    config = small(hf.LlamaConfig, max_position_embeddings=64, rope_parameters=rope)
    model, ids = CausalModel(build(config()), name="dynamic"), text(64)
    found = feed_in_pieces(model, ids, [30, 1, 20, 12, 1])
    assert_close(found, logits_of(build(config()), ids))


def test_longrope_is_exact_up_to_the_last_token_of_its_context() -> None:
    config = small(
        hf.Phi3Config,
        max_position_embeddings=96,
        original_max_position_embeddings=24,
        rope_parameters=longrope(24),
    )
    model, ids = CausalModel(build(config()), name="longrope"), text(24)
    found = feed_in_pieces(model, ids, [10, 1, 12, 1])
    assert_close(found, logits_of(build(config()), ids))


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_beyond_that_context_these_rope_types_really_give_other_logits(rope: str) -> None:
    """Otherwise the limit would be for nothing: a longer text changes what its start says."""
    parameters = longrope(24) if rope == "longrope" else roped(rope_type="dynamic", factor=4.0)
    limit = 24 if rope == "longrope" else 64
    config = small(hf.LlamaConfig, max_position_embeddings=64, rope_parameters=parameters)()
    ids = text(limit + 1)
    longer, shorter = logits_of(build(config), ids), logits_of(build(config), ids[:-1])
    assert float((longer[:-1] - shorter).abs().max()) > 1e-3


def test_a_prompt_that_fills_the_context_is_refused_before_a_pass() -> None:
    config = small(hf.LlamaConfig, max_position_embeddings=32)
    engine = Engine(CausalModel(build(config()), name="short"))
    with pytest.raises(ContextOverflow, match="32"):
        engine.generate([Request(text(32), max_new_tokens=1)])


@pytest.mark.parametrize("gamma", GAMMAS)
def test_decoding_up_to_the_context_end_is_plain_decoding_for_every_gamma(gamma: int) -> None:
    config = small(hf.LlamaConfig, max_position_embeddings=32)
    model = CausalModel(build(config()), name="short")
    [wanted] = Engine(model).generate([Request(text(20), gamma=0)])
    drafter = ModelDrafter(model, target_vocab_size=V)
    [result] = Engine(model, drafter).generate([Request(text(20), gamma=gamma)])
    assert result.token_ids == wanted.token_ids
    assert len(result.token_ids) == 12
    assert result.finish_reason == "length"


def test_decoding_goes_on_without_drafts_where_the_drafters_context_ends() -> None:
    config = small(hf.LlamaConfig, max_position_embeddings=25)
    drafter = ModelDrafter(CausalModel(build(config()), name="short"), target_vocab_size=V)
    prompt = PROMPTS[0]
    [result] = greedy(served("llama"), drafter, prompt, [5])
    assert result.token_ids == plain_greedy("llama", prompt)
    assert 0 < result.stats.drafted < 25


# --- Memory ---


def buffers_of(sequence: CausalSequence) -> list[Tensor]:
    return [buffer for pair in sequence._layers.values() for buffer in pair]


def addresses_of(sequence: CausalSequence) -> list[int]:
    return [buffer.data_ptr() for buffer in buffers_of(sequence)]


@each_core_family
def test_a_rollback_copies_nothing(family: str) -> None:
    model = served(family)
    sequence = start(model, text(30))
    model.score([Feed(sequence, text(30), 1)])
    addresses, contents = addresses_of(sequence), [b.clone() for b in buffers_of(sequence)]
    sequence.rollback(11)
    assert sequence.length == 11
    assert addresses_of(sequence) == addresses
    # To the bit, unused columns (whatever they hold) included.
    for buffer, before in zip(buffers_of(sequence), contents, strict=True):
        assert torch.equal(buffer.view(torch.int32), before.view(torch.int32))


@each_core_family
def test_passes_and_rollbacks_within_the_capacity_write_into_the_same_buffers(family: str) -> None:
    model = served(family)
    sequences = [start(model, text(10)), start(model, text(20))]
    model.score([Feed(sequence, text(10), 1) for sequence in sequences])
    addresses = [addresses_of(sequence) for sequence in sequences]
    for _ in range(40):
        model.score([Feed(sequence, text(6), 1) for sequence in sequences])
        for sequence in sequences:
            sequence.rollback(sequence.length - 2)
    assert [addresses_of(sequence) for sequence in sequences] == addresses
    assert [sequence.length for sequence in sequences] == [170, 170]


@torch.inference_mode()
def test_a_pass_writes_behind_the_cached_columns_and_nowhere_else() -> None:
    model = served("llama")
    sequence = start(model, text(10))
    model.score([Feed(sequence, text(10), 1)])
    for buffer in buffers_of(sequence):
        buffer[:, :, 10:] = 777.0
    before = [buffer.clone() for buffer in buffers_of(sequence)]
    model.score([Feed(sequence, text(4), 1)])
    for buffer, old in zip(buffers_of(sequence), before, strict=True):
        assert torch.equal(buffer[:, :, :10], old[:, :, :10])
        assert not bool((buffer[:, :, 10:14] == 777.0).any())
        assert torch.equal(buffer[:, :, 14:], old[:, :, 14:])


def test_a_fresh_sequence_has_room_for_its_prompt_and_256_tokens_more() -> None:
    model = served("llama")
    sequence = start(model, text(10))
    model.score([Feed(sequence, text(10), 1)])
    assert {buffer.shape[2] for buffer in buffers_of(sequence)} == {266}


def test_buffers_double_when_they_are_full_and_stop_at_the_context_end() -> None:
    model = served("llama")
    sequence, capacities = start(model, text(10)), []
    for _ in range(8):
        model.score([Feed(sequence, text(128), 1)])
        capacities.append({buffer.shape[2] for buffer in buffers_of(sequence)})
    assert capacities == [{266}, {266}, {532}, {532}, {1024}, {1024}, {1024}, {1024}]


def test_grouped_query_heads_are_cached_once() -> None:
    model = served("llama")
    sequence = start(model, text(10))
    model.score([Feed(sequence, text(10), 1)])
    assert {tuple(buffer.shape[:2]) for buffer in buffers_of(sequence)} == {(1, 2)}


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_closing_a_sequence_frees_its_buffers(family: str) -> None:
    model = served(family)
    sequence = start(model, text(10))
    model.score([Feed(sequence, text(10), 1)])
    alive = [weakref.ref(buffer) for buffer in buffers_of(sequence)]
    assert len(alive) == 4
    sequence.close()
    assert all(reference() is None for reference in alive)
    assert sequence.length == 0


def test_closing_a_sequence_twice_is_harmless() -> None:
    sequence = start(served("llama"), text(3))
    sequence.close()
    sequence.close()


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_finished_and_cancelled_requests_close_all_their_sequences(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[CausalSequence] = []
    begin = CausalModel.start

    def recorded(model: CausalModel, prompt: Prompt) -> CausalSequence:
        opened.append(begin(model, prompt))
        return opened[-1]

    monkeypatch.setattr(CausalModel, "start", recorded)
    engine = Engine(served(family), drafter_of("near", family))
    engine.generate([Request(PROMPTS[0], max_new_tokens=7, gamma=gamma) for gamma in (0, 3)])
    stream = engine.stream(Request(PROMPTS[0], gamma=3))
    next(stream)
    stream.close()
    assert len(opened) == 5  # of the target three, of the drafter two
    assert [buffers_of(sequence) for sequence in opened] == [[]] * 5


# --- The probe at load: broken modules must not pass ---


def keep_the_first_sequence(*args: object, **kwargs: object) -> tuple[Tensor, None]:
    """Attention in which every segment of the row reads the first sequence's keys."""
    module, query, key, value, mask = args
    first = [key[0][:, :, -part.shape[2] :] for part in key]
    first = [a if a.shape == b.shape else b for a, b in zip(first, key, strict=True)]
    return ROW_ATTENTION(module, query, first, value, mask, **kwargs)


def drop_the_mask(*args: object, **kwargs: object) -> tuple[Tensor, None]:
    """Attention in which every query sees every key, the later ones too."""
    module, query, key, value, mask = args
    everything = [torch.ones_like(m) if m is not None else None for m in mask.masks]
    return ROW_ATTENTION(module, query, key, value, mask._replace(masks=everything), **kwargs)


def shift_the_keys(*args: object, **kwargs: object) -> tuple[Tensor, None]:
    """Attention whose keys have slipped by one position."""
    module, query, key, value, mask = args
    return ROW_ATTENTION(module, query, [k.roll(1, 2) for k in key], value, mask, **kwargs)


def scale_the_scores(*args: object, **kwargs: object) -> tuple[Tensor, None]:
    """Attention with a scale that is 5 % too large."""
    return ROW_ATTENTION(*args, **(kwargs | {"scaling": kwargs["scaling"] * 1.05}))


def raise_an_error(*args: object, **kwargs: object) -> tuple[Tensor, None]:
    raise RuntimeError("a foreign fault")


ROW_ATTENTION = AttentionInterface._global_mapping["outrider"]
ROW_MASK = AttentionMaskInterface._global_mapping["outrider"]


@pytest.fixture
def llama() -> Iterator[hf.PreTrainedModel]:
    """A fresh module that a test may break."""
    return build(FAMILIES["llama"].config())


@pytest.mark.parametrize(
    "broken",
    [
        keep_the_first_sequence,
        drop_the_mask,
        shift_the_keys,
        scale_the_scores,
        raise_an_error,
    ],
)
def test_a_broken_shared_row_is_noticed_at_load_and_not_used(
    broken: Callable[..., object], llama: hf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "outrider", broken)
    model = CausalModel(llama, name="broken")
    assert not model.is_ragged
    assert "one after another" in model.notices[0]
    ids = text(20)
    assert_close(feed_in_pieces(model, ids, [9, 11]), logits_of(plain("llama"), ids))


def test_a_broken_row_mask_is_noticed_at_load_and_not_used(
    llama: hf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_masks(**kwargs: object) -> object:
        made = ROW_MASK(**kwargs)
        return made._replace(masks=[torch.ones_like(m) if m is not None else m for m in made.masks])

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "outrider", no_masks)
    assert not CausalModel(llama, name="broken").is_ragged


def test_positions_counted_from_the_start_of_each_pass_are_refused_at_load(
    llama: hf.PreTrainedModel,
) -> None:
    """A plain pass is right, a pass with a cache is not, with any attention."""
    rotate = llama.model.rotary_emb.forward
    llama.model.rotary_emb.forward = lambda x, position_ids: rotate(
        x, torch.arange(position_ids.shape[1])[None]
    )
    with pytest.raises(UnsupportedModel, match=r"^broken: llama gives other logits"):
        CausalModel(llama, name="broken")


def test_stock_attention_without_a_mask_is_refused_at_load(
    llama: hf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = AttentionInterface._global_mapping["sdpa"]

    def unmasked(*args: object, **kwargs: object) -> object:
        module, query, key, value, _ = args
        return stock(module, query, key, value, None, **kwargs)

    monkeypatch.setattr(type(llama), "_supports_attention_backend", False)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", unmasked)
    with pytest.raises(UnsupportedModel, match="gives other logits after a rollback"):
        CausalModel(llama, name="broken")


def test_dropout_left_on_is_refused_at_load() -> None:
    module = build(other(hf.GPT2Config, n_embd=32, n_layer=2, n_head=4)())
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        CausalModel(module.train(), name="in training")


def test_a_module_that_counts_positions_beyond_the_probes_is_noticed_at_load() -> None:
    """Within the probe's 21 positions such a model is right by accident; 8192 in the real ones."""
    config = FAMILIES["llama4_scaled"].config()
    config.floor_scale = 8192
    model = CausalModel(build(config), name="llama4")
    assert not model.is_ragged
    assert_close(logits_of(build(config), text(40)), feed_in_pieces(model, text(40), [30, 10]))


def test_a_module_can_be_wrapped_twice(llama: hf.PreTrainedModel) -> None:
    models, ids = [CausalModel(llama, name=name) for name in ("first", "second")], text(20)
    for model in models:
        assert model.is_ragged
        assert_close(feed_in_pieces(model, ids, [9, 11]), logits_of(plain("llama"), ids))
