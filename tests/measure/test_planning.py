"""Plans from numbers and from measurement files."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider import theory
from outrider.errors import UsageError
from outrider.measure.candidates import candidates_from
from outrider.measure.other_engines import settings_for
from outrider.measure.planning import MAX_GAMMA, Candidate, pick, plan_for
from outrider.models.trimmed import Vocabulary, write_vocabulary

Json = dict[str, object]

MEASUREMENT: Json = {
    "target": "big",
    "alpha": [
        {
            "drafter": "small",
            "temperature": 0.0,
            "policy": "greedy",
            "alpha": 0.78,
            "low": 0.75,
            "high": 0.81,
            "num_tokens": 10000,
            "survival": [0.78, 0.66, 0.57, 0.51, 0.46, 0.42, 0.39],
        },
        {
            "drafter": "lookup",
            "temperature": 0.0,
            "policy": "greedy",
            "alpha": 0.41,
            "low": 0.33,
            "high": 0.5,
            "num_tokens": 10000,
            "survival": [0.41, 0.3, 0.25, 0.22, 0.2, 0.18, 0.17],
        },
        {
            "drafter": "small",
            "temperature": 1.0,
            "policy": "t=1",
            "alpha": 0.6,
            "low": 0.55,
            "high": 0.65,
            "num_tokens": 10000,
            "survival": [0.6, 0.4, 0.3],
        },
    ],
    "cost": {
        "c": 0.08,
        "target_ms": 41.0,
        "drafter_ms": 3.3,
        "c_hat": 0.04,
        "verify_cost": {"1": 1.0, "2": 1.05, "3": 1.1, "5": 1.22, "9": 1.6},
        "drafters": {
            "small": {"c": 0.08, "drafter_ms": 3.3, "c_hat": 0.04},
            "lookup": {"c": 0.001, "drafter_ms": 0.04, "c_hat": None},
        },
    },
}


def measured(**settings: object) -> list[Candidate]:
    found, _ = candidates_from(MEASUREMENT, **settings)  # type: ignore[arg-type]
    return found


def changed(change: Callable[[dict], None]) -> Json:
    facts = copy.deepcopy(MEASUREMENT)
    change(facts)
    return facts


# From numbers


def test_a_plan_from_numbers_is_the_papers_formulas() -> None:
    found = plan_for(Candidate(0.8, 0.05, 0.02), gamma=5).outlook
    assert found.expected_tokens == theory.expected_tokens_per_round(0.8, 5)
    assert found.walltime_factor == theory.walltime_improvement(0.8, 5, 0.05)
    assert found.operations_factor == theory.operations_factor(0.8, 5, 0.02)
    assert found.optimal_gamma == theory.best_gamma(0.8, 0.05)
    assert found.best_factor == theory.walltime_improvement(0.8, found.optimal_gamma, 0.05)
    assert found.oracle_factor == theory.oracle_improvement(0.8, 0.05)
    assert found.break_even_alpha == 0.05
    assert found.break_even_alpha_at_gamma is not None
    assert found.break_even_alpha_at_gamma > 0.05


def test_without_a_gamma_the_best_one_is_planned_with() -> None:
    found = plan_for(Candidate(0.8, 0.05, 0.05)).outlook
    assert found.gamma == found.optimal_gamma == 8
    assert found.walltime_factor == found.best_factor


def test_the_best_length_is_not_cut_where_it_is_finite() -> None:
    assert plan_for(Candidate(0.99, 0.001, 0.0)).outlook.optimal_gamma > MAX_GAMMA


@pytest.mark.parametrize(("alpha", "c"), [(0.6, 0.0), (1.0, 0.5)])
def test_the_search_ends_and_says_so_where_longer_is_always_faster(alpha: float, c: float) -> None:
    found = plan_for(Candidate(alpha, c, c))
    assert found.outlook.optimal_gamma == MAX_GAMMA
    assert found.end_of_search is not None
    assert "longer is always faster" in found.end_of_search
    assert plan_for(Candidate(alpha, c, c), max_gamma=9).outlook.optimal_gamma == 9
    assert plan_for(Candidate(0.6, 0.1, 0.1)).end_of_search is None


def test_the_oracles_gain_is_over_the_best_fixed_length() -> None:
    found = plan_for(Candidate(0.9, 0.1, 0.1)).outlook
    assert f"{found.oracle_gain:.2f}" == "0.53"


def test_an_oracle_without_limit_is_null_in_json() -> None:
    facts = plan_for(Candidate(1.0, 0.0, 0.0)).outlook.as_dict()
    assert facts["oracle_factor"] is None
    assert facts["oracle_gain"] is None


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "sentence"),
    [
        (0.8, 0.05, None, "Draft 8 tokens; expect 3.09x; below alpha 0.05 do not speculate."),
        (0.3, 0.2, None, "Draft 1 token; expect 1.08x; below alpha 0.20 do not speculate."),
        (0.6, 0.0, None, "Draft 32 tokens; expect 2.50x."),
        (0.3, 0.5, None, "Do not speculate: it pays above alpha 0.50, and alpha is 0.30."),
        (
            0.9,
            1.5,
            None,
            "Do not speculate: with c = 1.50 not even a drafter that is always right would pay.",
        ),
        (
            0.8,
            0.05,
            12,
            "Drafting 12 tokens is 2.95x. Better draft 8 tokens; expect 3.09x; "
            "below alpha 0.05 do not speculate.",
        ),
        (
            0.4,
            0.3,
            6,
            "Drafting 6 tokens is slower than plain decoding: 0.59x. Better draft 1 token; "
            "expect 1.08x; below alpha 0.30 do not speculate.",
        ),
        (
            0.8,
            0.05,
            0,
            "Plain decoding leaves time unused. Draft 8 tokens; expect 3.09x; "
            "below alpha 0.05 do not speculate.",
        ),
    ],
)
def test_the_advice_is_one_plain_sentence(
    alpha: float, c: float, gamma: int | None, sentence: str
) -> None:
    assert plan_for(Candidate(alpha, c, c), gamma=gamma).sentence == sentence


@pytest.mark.parametrize(
    ("candidate", "settings", "message"),
    [
        (Candidate(1.2, 0.1, 0.1), {}, "alpha must be in"),
        (Candidate(0.5, -0.1, 0.1), {}, "c must be a finite number"),
        (Candidate(0.5, 0.1, -0.1), {}, "c_hat must be a finite number"),
        (Candidate(0.5, 0.1, 0.1), {"gamma": -1}, "gamma must be a whole number"),
        (Candidate(0.5, 0.1, 0.1), {"max_gamma": 0}, "max_gamma must be 1 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(
    candidate: Candidate, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan_for(candidate, **settings)


# From a measurement


def test_a_measured_plan_uses_survival_and_the_measured_verify_cost() -> None:
    small = measured()[0]
    found = plan_for(small, gamma=4)
    assert found.measured is not None
    tokens = 1 + 0.78 + 0.66 + 0.57 + 0.51
    assert found.measured.expected_tokens == pytest.approx(tokens)
    assert found.measured.walltime_factor == pytest.approx(tokens / (1.22 + 4 * 0.08))
    assert found.measured.operations_factor == pytest.approx((4 * 0.04 + 5) / tokens)
    assert found.outlook is found.measured
    assert found.paper.walltime_factor == theory.walltime_improvement(0.78, 4, 0.08)


def test_a_measured_plan_counts_the_time_outside_the_models() -> None:
    def add_outside(facts: dict) -> None:
        facts["cost"]["drafters"]["small"]["outside_ms_per_position"] = 4.1

    small = candidates_from(changed(add_outside))[0][0]
    assert small.outside == pytest.approx(0.1)
    found = plan_for(small, gamma=4)
    tokens = 1 + 0.78 + 0.66 + 0.57 + 0.51
    # A plain step has one position's share of it, a round with four drafted tokens five.
    expected = tokens * 1.1 / (1.22 + 4 * 0.08 + 5 * 0.1)
    assert found.outlook.walltime_factor == pytest.approx(expected)
    assert found.paper.walltime_factor == theory.walltime_improvement(0.78, 4, 0.08)


def test_both_computations_look_at_the_length_that_is_best_as_measured() -> None:
    found = plan_for(measured()[0])
    assert found.measured is not None
    factors = [plan_for(measured()[0], gamma=gamma).outlook.walltime_factor for gamma in range(8)]
    assert found.measured.optimal_gamma == max(range(8), key=factors.__getitem__) == 6
    assert found.paper.gamma == 6


def test_alphas_interval_becomes_an_interval_of_the_factor() -> None:
    found = plan_for(measured()[0], gamma=3)
    expected = [theory.walltime_improvement(alpha, 3, 0.08) for alpha in (0.75, 0.81)]
    assert found.factor_interval == tuple(expected)
    assert plan_for(Candidate(0.5, 0.1, 0.1)).factor_interval is None


def test_the_longest_draft_measured_is_named_where_it_is_the_best() -> None:
    found = plan_for(measured(temperature=1.0)[0])
    assert found.outlook.optimal_gamma == 3
    assert found.end_of_search is not None
    assert "3 is the longest draft measured" in found.end_of_search


def test_a_draft_longer_than_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="survival must reach to gamma = 8"):
        plan_for(measured()[0], gamma=8)


def test_survival_that_falls_at_once_is_told_from_a_low_alpha() -> None:
    rare = Candidate(0.5, 0.2, 0.2, survival=(0.2, 0.0), verify_cost={1: 1.0})
    assert plan_for(rare).sentence == (
        "Do not speculate: too few drafts are accepted in a row to pay for any length."
    )


# Choosing


def test_the_fastest_drafter_is_picked_and_the_next_one_named() -> None:
    best, why = pick([plan_for(item) for item in reversed(measured())])
    assert best.candidate.drafter == "small"
    assert why == (
        "Fastest: small, 2.33x against 1.81x for lookup "
        "(alpha 0.78 at c 0.080 against alpha 0.41 at c 0.001)."
    )


def test_a_cheap_drafter_beats_a_good_one_that_is_dear() -> None:
    good, cheap = Candidate(0.8, 0.5, 0.5, "good"), Candidate(0.5, 0.01, 0.0, "cheap")
    best, _ = pick([plan_for(good), plan_for(cheap)])
    assert best.candidate.drafter == "cheap"


def test_drafters_that_are_equally_fast_go_by_their_cost() -> None:
    useless = [Candidate(0.0, c, c, name) for name, c in (("dear", 0.5), ("cheap", 0.1))]
    best, why = pick([plan_for(item) for item in useless])
    assert best.candidate.drafter == "cheap"
    assert why == "None of the 2 drafters is faster than plain decoding."


def test_intervals_that_overlap_are_told() -> None:
    first = Candidate(0.70, 0.05, 0.05, "first", 0.6, 0.8)
    second = Candidate(0.68, 0.05, 0.05, "second", 0.6, 0.8)
    _, why = pick([plan_for(first), plan_for(second)])
    assert why.endswith("Their intervals overlap: measure more tokens to be sure.")


def test_a_single_drafter_is_named_as_the_only_one() -> None:
    _, why = pick([plan_for(measured(drafter="lookup")[0])])
    assert why == "The only drafter measured: lookup."


# Reading


def test_rows_of_the_lowest_temperature_are_taken_and_the_others_named() -> None:
    found, notes = candidates_from(MEASUREMENT)
    assert [item.drafter for item in found] == ["small", "lookup"]
    assert notes == [
        "temperature 0 of 0, 1; --temperature picks another",
        "lookup: c_hat was not measured and is taken as c",
    ]


def test_a_row_carries_its_drafters_own_costs() -> None:
    small, lookup = measured(temperature=0.0)
    assert (small.c, small.c_hat, small.low, small.high) == (0.08, 0.04, 0.75, 0.81)
    assert (lookup.c, lookup.c_hat) == (0.001, 0.001)
    assert small.verify_cost == {1: 1.0, 2: 1.05, 3: 1.1, 5: 1.22, 9: 1.6}


def test_one_policy_is_taken_at_a_time() -> None:
    def add_top_p(facts: dict) -> None:
        facts["alpha"].append(facts["alpha"][0] | {"policy": "top_p=0.9", "alpha": 0.5})

    facts = changed(add_top_p)
    found, notes = candidates_from(facts)
    assert [item.alpha for item in found] == [0.78, 0.41]
    assert "policy 'greedy' of 2; --policy picks another" in notes
    found, _ = candidates_from(facts, policy="top_p=0.9")
    assert [item.alpha for item in found] == [0.5]


def test_a_drafter_without_a_cost_is_left_out_and_named() -> None:
    found, notes = candidates_from(changed(lambda facts: facts["cost"]["drafters"].pop("lookup")))
    assert [item.drafter for item in found] == ["small"]
    assert "lookup is left out: its cost was not measured" in notes


def test_the_pairs_cost_serves_where_drafters_have_none_of_their_own() -> None:
    found, notes = candidates_from(changed(lambda facts: facts["cost"].pop("drafters")))
    assert [(item.c, item.c_hat) for item in found] == [(0.08, 0.04)] * 2
    assert "one c for all drafters: the file has no cost for each of them" in notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts.update(alpha=[]), "no alpha rows; measure without --cost-only"),
        (lambda facts: facts["alpha"][1].update(alpha=1.3), r"alpha\[1\]: alpha must be a number"),
        (lambda facts: facts["alpha"][1].pop("alpha"), r"alpha\[1\]: alpha must be a number"),
        (lambda facts: facts["alpha"][1].pop("survival"), r"alpha\[1\] \(lookup at .* missing"),
        (lambda facts: facts["alpha"][1].update(survival=[2]), r"alpha\[1\]: survival must be"),
        (lambda facts: facts["alpha"][0].pop("drafter"), r"alpha\[0\]: drafter must be a string"),
        (lambda facts: facts.pop("cost"), "has no cost; measure without --no-cost"),
        (lambda facts: facts["cost"].pop("verify_cost"), "cost: verify_cost must be an object"),
        (lambda facts: facts["cost"].update(verify_cost={"2": 1.0}), "verify_cost must be an"),
        (lambda facts: facts["cost"]["verify_cost"].update({"5": -1}), r"verify_cost\['5'\] must"),
        (lambda facts: facts["cost"]["verify_cost"].update({"5": 0}), r"verify_cost\['5'\] must"),
        (lambda facts: facts["cost"]["verify_cost"].update({"x": 1}), "verify_cost has 'x'"),
        (
            lambda facts: facts["cost"]["drafters"]["small"].update(c=-0.1),
            r"cost.drafters\['small'\]: c must be",
        ),
        (
            lambda facts: facts["cost"]["drafters"]["small"].update(c_hat="much"),
            "c_hat of small must be a number",
        ),
        (
            lambda facts: facts["cost"]["drafters"]["small"].update(outside_ms_per_position=-1),
            "outside_ms_per_position of small must be",
        ),
        (
            lambda facts: (
                facts["cost"]["drafters"]["small"].update(outside_ms_per_position=1),
                facts["cost"].update(target_ms=0),
            ),
            "target_ms must be above 0",
        ),
        (lambda facts: facts["cost"].update(drafters={}), "no cost for any drafter"),
        (lambda facts: facts["cost"].pop("drafters") and facts["cost"].pop("c"), "no cost for any"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_row(
    change: Callable[[dict], None], message: str
) -> None:
    with pytest.raises(UsageError, match=f"m.json.*{message}"):
        candidates_from(changed(change), source="m.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.5}, "no row at temperature 0.5; it has 0, 1"),
        ({"policy": "t=1"}, "no row with policy 't=1' at temperature 0; it has 'greedy'"),
        ({"drafter": "huge"}, "no drafter 'huge' there; it has small, lookup"),
    ],
)
def test_rows_that_are_not_there_are_refused_with_those_that_are(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        measured(**settings)


# For other engines


def test_a_drafting_model_becomes_vllms_speculative_config() -> None:
    command = settings_for(target="org/big", drafter="org/small", gamma=6)["vllm"]
    assert command is not None
    words = shlex.split(command)
    assert words[:4] == ["vllm", "serve", "org/big", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "draft_model",
        "model": "org/small",
        "num_speculative_tokens": 6,
    }


def test_lookup_becomes_vllms_ngram_method() -> None:
    command = settings_for(target="org/big", drafter="lookup", gamma=6)["vllm"]
    assert command is not None
    assert json.loads(shlex.split(command)[4]) == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_max": 3,
    }


def test_every_setting_of_transformers_is_one_it_knows() -> None:
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    text = settings_for(target="a", drafter="b", gamma=6)["transformers"]
    assert text is not None
    settings = [line for line in text.splitlines() if "generation_config" in line]
    names = [line.split(" = ")[0].removeprefix("drafter.generation_config.") for line in settings]
    assert len(names) == 3
    assert set(names) <= set(known)
    lookup = settings_for(target="a", drafter="lookup", gamma=6)["transformers"]
    assert lookup is not None
    assert "prompt_lookup_num_tokens=6" in lookup
    assert {"prompt_lookup_num_tokens", "max_matching_ngram_size"} <= set(known)


def test_llama_cpp_takes_gguf_files_and_the_whole_draft() -> None:
    command = settings_for(target="org/big", drafter="small.gguf", gamma=6)["llama.cpp"]
    assert command == (
        "llama-server -m big.gguf -md small.gguf --spec-type draft-simple "
        "--spec-draft-n-max 6 --spec-draft-n-min 0 --spec-draft-p-min 0"
    )
    lookup = settings_for(target="org/big", drafter="lookup", gamma=6)["llama.cpp"]
    assert lookup is not None
    assert "--spec-type ngram-simple" in lookup
    assert "--spec-ngram-simple-size-m 6" in lookup


def test_names_that_only_outrider_knows_become_placeholders() -> None:
    command = settings_for(target="default", drafter="toy:near", gamma=2)["llama.cpp"]
    assert command is not None
    assert command.startswith("llama-server -m TARGET.gguf -md DRAFTER.gguf ")


def test_a_name_with_a_space_stays_one_word_of_the_command() -> None:
    command = settings_for(target="my models/big", drafter="my models/small", gamma=2)["vllm"]
    assert command is not None
    words = shlex.split(command)
    assert words[2] == "my models/big"
    assert json.loads(words[4])["model"] == "my models/small"


@pytest.mark.parametrize(
    ("drafter", "gamma"),
    [
        ("ngram:table", 4),
        ("unigram", 4),
        ("random", 4),
        ("auto", 4),
        ("lookup+org/small", 4),
        ("small", 0),
    ],
)
def test_what_has_no_counterpart_gives_no_settings(drafter: str, gamma: int) -> None:
    assert set(settings_for(target="big", drafter=drafter, gamma=gamma).values()) == {None}


def test_a_drafter_of_few_ids_serves_no_other_engine(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert settings_for(target="big", drafter=folder, gamma=4)["vllm"] is not None
    write_vocabulary(tmp_path, Vocabulary(torch.tensor([0, 2]), torch.tensor([0, 0, 1]), ""))
    assert set(settings_for(target="big", drafter=folder, gamma=4).values()) == {None}
