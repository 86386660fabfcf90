"""The command line: every flag, every way to ask wrongly, and what goes to which stream."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
from rich.console import Console

from outrider import cli, pair
from outrider.cli import terminal
from outrider.cli.generate import generate as generate_command
from outrider.decoding import Engine
from outrider.errors import NumericalError
from outrider.measure import comparison
from outrider.pair import Pair, load
from outrider.requests import Event

TOYS = ("--target", "toy:target", "--drafter", "toy:near")
SEED = ("--seed", "5")
SAMPLED = (*SEED, "--temperature", "1")
PROMPT = "Why is the sky blue?"
Json = dict[str, object]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def facts(self) -> Json:
        """The JSON object on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


class Run(Protocol):
    def __call__(self, *arguments: str, stdin: bytes | None = None) -> Outcome: ...


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`outrider ARGUMENTS` in this process, with the console of a pipe."""
    for name, to_stderr in (("out", False), ("err", True)):
        console = Console(
            highlight=False, markup=False, soft_wrap=True, stderr=to_stderr, color_system=None
        )
        monkeypatch.setattr(terminal, name, console)

    def call(*arguments: str, stdin: bytes | None = None) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        if stdin is not None:
            # Like the interpreter's own stdin in the C and POSIX locales.
            wrapped = io.TextIOWrapper(io.BytesIO(stdin), "utf-8", errors="surrogateescape")
            monkeypatch.setattr(sys, "stdin", wrapped)
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return Outcome(leaving.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def generate(run: Run) -> Callable[..., Json]:
    """The JSON object of `outrider generate` with the toys; a later flag replaces an earlier."""

    def call(*arguments: str, prompt: str = PROMPT) -> Json:
        fixed = ("--max-new-tokens", "60", *SEED, "--json")
        outcome = run("generate", prompt, *TOYS, *fixed, *arguments)
        assert outcome.code == 0, outcome.err
        return outcome.facts

    return call


def answer(prompt: str, **settings: object) -> str:
    """The toys' text, asked for from Python."""
    return load("toy:target", "toy:near").generate(prompt, **settings).text


# --- What comes out ---


def test_the_last_line_of_json_output_is_one_object_with_every_result(run: Run) -> None:
    outcome = run("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "20", "--json")
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 1
    expected = {"text", "token_ids", "finish_reason", "seed", "num_prompt_tokens", "stats"}
    assert set(outcome.facts) == expected


def test_json_statistics_hold_every_counter_and_ratio(generate: Callable[..., Json]) -> None:
    counters = {"rounds", "target_passes", "drafter_steps", "drafted", "examined", "accepted"}
    ratios = {"alpha_hat", "accepted_fraction", "tokens_per_call", "ms_per_token", "wall_s"}
    names = {"engine", "dtype", "rule", "drafter", "emitted", "num_tokens", "prefill_passes"}
    assert set(generate()["stats"]) == counters | ratios | names


def test_json_statistics_add_up(generate: Callable[..., Json]) -> None:
    facts = generate("--trace", "--max-new-tokens", "40")
    stats, trace = facts["stats"], facts["trace"]
    assert stats["rounds"] == stats["target_passes"] == len(trace)
    assert stats["emitted"] == stats["accepted"] + stats["rounds"]
    assert stats["drafted"] == stats["drafter_steps"] == sum(len(r["drafted"]) for r in trace)
    assert stats["accepted"] == sum(r["accepted"] for r in trace)
    assert stats["alpha_hat"] == stats["accepted"] / stats["examined"]
    assert stats["tokens_per_call"] == stats["emitted"] / stats["target_passes"]
    assert stats["ms_per_token"] == pytest.approx(1e3 * stats["wall_s"] / stats["num_tokens"])
    assert [token for r in trace for token in r["emitted"]] == facts["token_ids"]
    assert stats["num_tokens"] == len(facts["token_ids"]) == 40


def test_json_output_is_the_same_result_as_from_python(generate: Callable[..., Json]) -> None:
    result = load("toy:target", "toy:near").generate(PROMPT, max_new_tokens=60, seed=5)
    facts = generate()
    assert facts["text"] == result.text
    assert facts["token_ids"] == result.token_ids
    assert facts["finish_reason"] == result.finish_reason == "length"


@pytest.mark.parametrize("settings", [SEED, SAMPLED])
def test_streamed_whole_and_json_text_are_the_same(run: Run, settings: tuple[str, ...]) -> None:
    arguments = ("generate", PROMPT, *TOYS, *settings, "--max-new-tokens", "50")
    streamed, whole = run(*arguments, "--stream"), run(*arguments, "--no-stream")
    text = run(*arguments, "--json").facts["text"]
    assert len(text) > 20
    assert streamed.out == whole.out == text + "\n"


def test_streaming_is_the_default_for_people_and_off_with_json(run: Run) -> None:
    arguments = ("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "9")
    assert run(*arguments).out == run(*arguments, "--stream").out
    assert len(run(*arguments, "--json").out.splitlines()) == 1


def test_streamed_text_is_written_as_it_is_decided(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    events = Engine.stream

    def watched(engine: Engine, request: object) -> object:
        for event in events(engine, request):
            yield event
            seen.append(sys.stdout.getvalue())

    monkeypatch.setattr(Engine, "stream", watched)
    outcome = run("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "30")
    assert len(set(seen)) > 3
    assert all(outcome.out.startswith(text) for text in seen)


def test_notes_for_people_go_to_stderr_and_are_one_line(run: Run) -> None:
    outcome = run("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "9")
    [note] = outcome.err.splitlines()
    for part in ("9 tokens", "alpha_hat", "toy float64", "rule block", "seed 5"):
        assert part in note


def test_json_output_has_no_notes_beside_it(run: Run) -> None:
    assert run("generate", PROMPT, *TOYS, "--max-new-tokens", "9", "--json").err == ""


def test_a_fresh_seed_is_reported_and_repeats_the_text(run: Run) -> None:
    arguments = ("generate", PROMPT, *TOYS, "--temperature", "1", "--json")
    first = run(*arguments).facts
    again = run(*arguments, "--seed", str(first["seed"])).facts
    assert again["token_ids"] == first["token_ids"]


# --- Where the prompt comes from ---


def test_a_dash_reads_the_prompt_from_stdin(run: Run) -> None:
    arguments = (*TOYS, *SEED, "--max-new-tokens", "9", "--json", "--raw")
    piped = run("generate", "-", *arguments, stdin="Grüße\n".encode()).facts
    assert piped["num_prompt_tokens"] == len("Grüße\n".encode())
    assert piped["token_ids"] == run("generate", "Grüße\n", *arguments).facts["token_ids"]


def test_an_at_sign_reads_the_prompt_from_a_file(
    generate: Callable[..., Json], tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße\n")
    read = generate("--raw", prompt=f"@{tmp_path / 'prompt.txt'}")
    assert read["num_prompt_tokens"] == len("Grüße\n".encode())
    assert read["token_ids"] == generate("--raw", prompt="Grüße\n")["token_ids"]
    assert read["token_ids"] != generate("--raw", prompt="Grüße")["token_ids"]


def test_a_tilde_in_a_prompt_file_is_the_home_folder(
    generate: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("from home")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert generate("--raw", prompt="@~/prompt.txt")["num_prompt_tokens"] == len("from home")


def test_two_at_signs_are_one_at_sign(generate: Callable[..., Json]) -> None:
    assert generate("--raw", prompt="@@home")["num_prompt_tokens"] == len("@home")


# --- Every flag of `generate` changes something ---


def greedy_again(base: Json, changed: Json) -> bool:
    """The flag leaves only the likeliest token, so the text is the greedy one."""
    return changed["token_ids"] == base["token_ids"]


def repeats(facts: Json) -> int:
    return len(facts["token_ids"]) - len(set(facts["token_ids"]))


FLAGS: dict[str, list[tuple[tuple[str, ...], Callable[[Json, Json], bool]]]] = {
    "target": [(("--target", "toy:far"), lambda a, b: a["token_ids"] != b["token_ids"])],
    "drafter": [
        (
            ("--drafter", "toy:far"),
            lambda a, b: (
                b["stats"]["drafter"] == "toy:far"
                and b["stats"]["accepted"] < a["stats"]["accepted"]
            ),
        ),
        (("--drafter", "toy:far"), greedy_again),
        (("--drafter", "none"), lambda a, b: b["stats"]["drafted"] == 0),
        (("--drafter", "none"), greedy_again),
        (("--drafter", "lookup"), lambda a, b: b["stats"]["drafter"] == "lookup"),
        (("--drafter", "lookup"), lambda a, b: b["stats"]["drafter_steps"] == 0),
    ],
    "gamma": [
        (
            ("--gamma", "2", "--trace"),
            lambda a, b: max(len(r["drafted"]) for r in b["trace"]) == 2,
        ),
        (
            ("--trace",),  # as many as pay off: not the same number in every round
            lambda a, b: len({len(r["drafted"]) for r in b["trace"][:-5]}) > 1,
        ),
        (("--gamma", "0"), lambda a, b: b["stats"]["target_passes"] == 60),
        (("--gamma", "9"), greedy_again),
    ],
    "rule": [
        (("--rule", "rejection"), lambda a, b: b["stats"]["rule"] == "rejection"),
        (("--rule", "coupled"), lambda a, b: b["stats"]["rule"] == "coupled"),
        ((), lambda a, b: b["stats"]["rule"] == "block"),
    ],
    "temperature": [
        (("--temperature", "1"), lambda a, b: a["token_ids"] != b["token_ids"]),
        (("--temperature", "1e-6"), greedy_again),
    ],
    "top_k": [(("--temperature", "1", "--top-k", "1"), greedy_again)],
    "top_p": [(("--temperature", "1", "--top-p", "1e-9"), greedy_again)],
    "min_p": [(("--temperature", "1", "--min-p", "1"), greedy_again)],
    "typical_p": [
        (
            ("--temperature", "1", "--typical-p", "0.01", "--logprobs", "0"),
            # At most one or two tokens are left at each place.
            lambda a, b: all(entry["logprob"] > -1 for entry in b["logprobs"]),
        ),
    ],
    "repetition_penalty": [
        (("--repetition-penalty", "1e6"), lambda a, b: repeats(b) == 0 < repeats(a))
    ],
    "presence_penalty": [
        (("--presence-penalty", "1e6"), lambda a, b: repeats(b) == 0 < repeats(a))
    ],
    "frequency_penalty": [
        (("--frequency-penalty", "1e6"), lambda a, b: repeats(b) == 0 < repeats(a)),
        (("--frequency-penalty", "-1e6"), lambda a, b: len(set(b["token_ids"])) == 1),
    ],
    "logit_bias": [
        (("--logit-bias", "65=1000"), lambda a, b: b["text"] == "A" * 60),
        (
            ("--logit-bias", "65=1000", "--logit-bias", "66=2000"),
            lambda a, b: b["text"] == "B" * 60,
        ),
    ],
    "min_new_tokens": [
        (("--logit-bias", "256=1000"), lambda a, b: b["token_ids"] == [256]),
        (
            ("--logit-bias", "256=1000", "--min-new-tokens", "7"),
            lambda a, b: b["token_ids"].index(256) == 7 and b["finish_reason"] == "eos",
        ),
    ],
    "max_new_tokens": [
        (("--max-new-tokens", "7"), lambda a, b: b["token_ids"] == a["token_ids"][:7])
    ],
    "seed": [
        (("--temperature", "1", "--seed", "6"), lambda a, b: b["seed"] == 6),
        (("--seed", "18446744073709551615"), lambda a, b: b["seed"] == 2**64 - 1),
    ],
    "stop": [
        (
            ("--logit-bias", "65=1000", "--stop", "AAA"),
            lambda a, b: (b["text"], b["finish_reason"]) == ("", "stop"),
        ),
        (
            ("--logit-bias", "65=1000", "--stop", "B", "--stop", "AA"),
            lambda a, b: len(b["token_ids"]) == 2,
        ),
    ],
    "system": [
        (
            ("--system", "Be kind."),
            lambda a, b: (
                b["num_prompt_tokens"] - a["num_prompt_tokens"] == len("system: Be kind.\n")
            ),
        )
    ],
    "raw": [(("--raw",), lambda a, b: b["num_prompt_tokens"] == len(PROMPT))],
    "trace": [(("--trace",), lambda a, b: "trace" in b and "trace" not in a)],
    "logprobs": [
        (("--logprobs", "0"), lambda a, b: [len(e["top"]) for e in b["logprobs"]] == [0] * 60),
        (("--logprobs", "3"), lambda a, b: [len(e["top"]) for e in b["logprobs"]] == [3] * 60),
    ],
    "compare": [(("--compare",), lambda a, b: b["compare"]["agrees"] is True)],
    "as_json": [(("--json",), greedy_again)],
}
# Tests of their own:
ELSEWHERE = {
    *("prompt", "stream", "engine", "dtype", "device"),
    *("drafter_dtype", "kv_memory", "with_transformers"),
}


@pytest.fixture(scope="module")
def usual() -> Json:
    """The result without any of the flags, filled in by the first test that needs it."""
    return {}


def test_every_parameter_of_generate_is_tried_here() -> None:
    assert set(inspect.signature(generate_command).parameters) == set(FLAGS) | ELSEWHERE


@pytest.mark.parametrize(
    ("flags", "shows"),
    [case for cases in FLAGS.values() for case in cases],
    ids=[f"{name}-{i}" for name, cases in FLAGS.items() for i in range(len(cases))],
)
def test_each_flag_of_generate_changes_what_it_should(
    flags: tuple[str, ...],
    shows: Callable[[Json, Json], bool],
    generate: Callable[..., Json],
    usual: Json,
) -> None:
    if not usual:
        usual.update(generate())
    changed = generate(*flags)
    assert shows(usual, changed), changed


def test_the_same_seed_gives_the_same_sampled_text_and_another_seed_another(
    generate: Callable[..., Json],
) -> None:
    texts = [generate("--temperature", "1", "--seed", seed)["token_ids"] for seed in "112"]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_text_before_it(run: Run) -> None:
    text = answer(PROMPT, max_new_tokens=60)
    stop = next(c for c in text[5:] if c.isascii() and c.isprintable())
    arguments = ("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "60", "--stop", stop)
    assert run(*arguments).out == text[: text.index(stop)] + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny real model with another tokenizer than the toys', and a law of all it has read."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    place = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    wrapped.save_pretrained(place)
    config = hf.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    module = hf.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    module.save_pretrained(place)
    return str(place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_flag_is_the_dtype_a_model_runs_in(dtype: str, run: Run, folder: str) -> None:
    arguments = ("--dtype", dtype, "--engine", "torch", "--device", "cpu", "--json")
    outcome = run("generate", "hello", "--target", folder, "--max-new-tokens", "3", *arguments)
    assert outcome.facts["stats"]["dtype"] == dtype
    assert outcome.facts["stats"]["engine"] == "torch"


@pytest.mark.parametrize(("engine", "runs_on"), [("auto", "openvino"), ("openvino", "openvino")])
def test_the_cpu_engine_is_openvino(engine: str, runs_on: str, run: Run, folder: str) -> None:
    arguments = ("--target", folder, "--max-new-tokens", "3", "--engine", engine, "--json")
    assert run("generate", "hello", *arguments).facts["stats"]["engine"] == runs_on


def test_memory_for_keys_and_values_is_a_limit(run: Run, folder: str) -> None:
    arguments = ("--target", folder, "--max-new-tokens", "60", "--dtype", "float32")
    outcome = run("generate", "hello", *arguments, "--kv-memory", "0.00002")
    assert outcome.code == 2
    assert outcome.out  # what was decided before the memory was full
    assert "--kv-memory" in outcome.err.splitlines()[-1]
    assert run("generate", "hello", *arguments, "--kv-memory", "0.01").code == 0
    for wrong in ("0", "-1", "nan"):
        assert_refused(run("generate", "hello", *arguments, "--kv-memory", wrong), "GiB")


@pytest.mark.parametrize(
    "flags", [("--engine", "torch"), ("--target", "toy:target", "--drafter", "toy:near")]
)
def test_memory_for_keys_and_values_needs_the_engine_that_has_it(
    flags: tuple[str, ...], run: Run, folder: str
) -> None:
    arguments = ("--target", folder, "--kv-memory", "1", *flags)
    assert_refused(run("generate", "hello", *arguments), "kv_memory")


def test_a_drafter_of_another_dtype_changes_the_drafts_and_not_the_text(
    run: Run, folder: str
) -> None:
    arguments = (
        "--target",
        folder,
        "--drafter",
        folder,
        "--max-new-tokens",
        "60",
        "--json",
        "--gamma",
        "5",
    )
    same = run("generate", "hello", *arguments).facts
    other = run("generate", "hello", *arguments, "--drafter-dtype", "int8").facts
    assert same["token_ids"] == other["token_ids"]
    assert same["stats"]["dtype"] == other["stats"]["dtype"]
    assert same["stats"]["accepted"] == same["stats"]["drafted"]
    assert 0 < other["stats"]["accepted"] < other["stats"]["drafted"]


def test_a_dtype_for_a_drafter_that_is_no_model_is_refused(run: Run) -> None:
    arguments = ("--target", "toy:target", "--drafter", "lookup", "--drafter-dtype", "int8")
    assert_refused(run("generate", PROMPT, *arguments), "lookup")
    assert_refused(run("generate", PROMPT, *TOYS, "--drafter-dtype", "warp"), "warp")


def test_the_openvino_engine_is_for_the_cpu(run: Run, folder: str) -> None:
    arguments = ("--target", folder, "--engine", "openvino", "--device", "cuda")
    assert_refused(run("generate", "hello", *arguments), "CPU")


# --- Traces, log-probabilities, comparison ---


def test_a_trace_without_colour_marks_rejections_and_corrections_with_brackets(run: Run) -> None:
    # One printable letter wins everywhere, and the drafter is sure of another.
    arguments = ("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "40", "--trace")
    printed = run(*arguments).out.splitlines()
    rounds = run(*arguments, "--json").facts["trace"]
    assert printed[0].split() == ["round", "accepted", "[-rejected-]", "[+correction+]"]
    assert len(printed) == 1 + len(rounds)
    for number, (line, item) in enumerate(zip(printed[1:], rounds, strict=True), start=1):
        assert line.split()[0] == str(number)
        assert ("[-" in line) == (item["accepted"] < len(item["drafted"]))
        assert "[+" in line
    assert any("[-" in line for line in printed[1:])


def test_a_trace_without_colour_shows_the_text_of_each_fate(run: Run) -> None:
    biased = ("--logit-bias", "65=1000")
    outcome = run(
        "generate", PROMPT, *TOYS, *biased, "--gamma", "5", "--max-new-tokens", "9", "--trace"
    )
    assert outcome.out.splitlines()[1:] == ["1 AAAAA[+A+]", "2 AA[+A+]"]


def test_a_trace_in_colour_has_green_red_and_blue_and_no_brackets(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    coloured = Console(
        highlight=False, markup=False, soft_wrap=True, force_terminal=True, color_system="standard"
    )
    monkeypatch.setattr(terminal, "out", coloured)
    out = run("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "40", "--trace").out
    for colour in ("32", "9;31", "34"):  # green, struck-out red, blue; all of them may be dim
        assert re.search(rf"\x1b\[[\d;]*{colour}m", out)
    assert "[-" not in out
    assert "[+" not in out


def test_a_trace_takes_the_place_of_the_text(run: Run) -> None:
    biased = ("--logit-bias", "65=1000")
    for mode in ((), ("--stream",), ("--no-stream",)):
        out = run("generate", PROMPT, *TOYS, *biased, "--max-new-tokens", "9", "--trace", *mode).out
        assert out.count("A") == 9


def test_log_probabilities_are_one_table_row_a_token(run: Run) -> None:
    arguments = ("generate", PROMPT, *TOYS, *SEED, "--max-new-tokens", "6", "--logprobs", "2")
    out = run(*arguments).out
    facts = run(*arguments, "--json").facts
    header, *rows = out.removeprefix(facts["text"] + "\n").splitlines()
    assert header.split() == ["token", "logprob", "raw", "likeliest"]
    assert len(rows) == 6
    for row, entry in zip(rows, facts["logprobs"], strict=True):
        assert f"{entry['raw_logprob']:.3f}" in row
        assert all(f"{top['raw_logprob']:.2f}" in row for top in entry["top"])


def test_log_probabilities_belong_to_the_tokens(generate: Callable[..., Json]) -> None:
    facts = generate("--logprobs", "2", "--temperature", "1")
    assert [entry["token_id"] for entry in facts["logprobs"]] == facts["token_ids"]
    for entry in facts["logprobs"]:
        assert entry["logprob"] == pytest.approx(entry["raw_logprob"], abs=1e-9)


def test_an_impossible_token_has_no_number_in_json(generate: Callable[..., Json]) -> None:
    """Greedy laws are one-hot: the runner-up has probability 0, which JSON cannot write."""
    [entry, *_] = generate("--logprobs", "2")["logprobs"]
    assert [top["logprob"] for top in entry["top"]] == [0.0, None]


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        (SEED, "the same text, token for token (30 tokens)"),
        ((*SAMPLED, "--rule", "coupled"), "the same text, token for token (30 tokens)"),
        (SAMPLED, "two draws from the same law"),
    ],
)
def test_a_comparison_says_whether_the_texts_agree(
    settings: tuple[str, ...], verdict: str, run: Run
) -> None:
    outcome = run("generate", PROMPT, *TOYS, *settings, "--max-new-tokens", "30", "--compare")
    assert outcome.code == 0
    assert verdict in outcome.out
    assert "speed-up" in outcome.out
    assert [line.split()[0] for line in outcome.out.splitlines()[-4:-2]] == ["plain", "speculative"]
    assert len(outcome.err.splitlines()) == 3  # progress


def test_a_comparison_in_json_holds_both_results_and_every_turn(
    generate: Callable[..., Json],
) -> None:
    facts = generate("--compare")
    compared = facts["compare"]
    assert compared["must_agree"] is True
    assert compared["plain"]["token_ids"] == facts["token_ids"]
    assert compared["plain"]["stats"]["drafted"] == 0 < facts["stats"]["drafted"]
    assert len(compared["speedups"]) == 3
    assert sorted(compared["speedups"])[1] == compared["speedup"] > 0


def test_transformers_can_be_timed_beside_it(run: Run, folder: str) -> None:
    arguments = ("--target", folder, "--max-new-tokens", "9", "--compare", "--with-transformers")
    outcome = run("generate", "hello", *arguments, "--json")
    times = outcome.facts["compare"]["transformers_ms_per_token"]
    assert len(times) == 3
    assert min(times) > 0
    assert "transformers" in run("generate", "hello", *arguments).out
    assert_refused(run("generate", "hello", *arguments, "--min-p", "0.1"), "min")


def test_a_comparison_shows_log_probabilities_too(run: Run) -> None:
    arguments = (*TOYS, "--max-new-tokens", "5", "--compare", "--logprobs", "2")
    assert "likeliest" in run("generate", PROMPT, *arguments).out


def test_a_comparison_shows_the_text_unchanged(run: Run) -> None:
    arguments = (*TOYS, "--max-new-tokens", "5", "--logit-bias", "9=1000", "--compare")
    assert run("generate", PROMPT, *arguments).out.startswith("\t" * 5 + "\n")


@pytest.mark.parametrize("mode", [(), ("--json",)])
def test_a_comparison_whose_texts_differ_and_must_not_has_exit_code_1(
    mode: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = comparison.compare_with_plain

    def with_a_fault(*args: object, **kwargs: object) -> comparison.Comparison:
        compared = really(*args, **kwargs)
        compared.plain.token_ids[3] += 1
        return compared

    monkeypatch.setattr(comparison, "compare_with_plain", with_a_fault)
    outcome = run("generate", PROMPT, *TOYS, "--max-new-tokens", "9", "--compare", *mode)
    assert outcome.code == 1
    assert "differ" in outcome.err.splitlines()[-1]


# --- chat ---


def chat(run: Run, lines: str, *arguments: str) -> Outcome:
    fixed = (*TOYS, "--max-new-tokens", "12", *SEED)
    return run("chat", *fixed, *arguments, stdin=lines.encode())


@pytest.fixture
def real(folder: str) -> tuple[str, ...]:
    """Flags for a model whose answer depends on the whole conversation."""
    return ("--target", folder, "--drafter", "lookup", "--dtype", "float32", "--device", "cpu")


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_a_chat_remembers_what_was_said(
    system: str | None, run: Run, folder: str, real: tuple[str, ...]
) -> None:
    pair = load(folder, dtype="float32", device="cpu")
    said = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    for line in ("Grüße", "more"):
        said.append({"role": "user", "content": line})
        texts.append(pair.generate(said, max_new_tokens=12).text)
        said.append({"role": "assistant", "content": texts[-1]})
    flags = () if system is None else ("--system", system)
    outcome = chat(run, "Grüße\nmore\n", *real, *flags)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"{texts[0]}\n\n{texts[1]}\n\n"
    assert texts[1] != pair.generate("more", max_new_tokens=12).text


def test_the_system_flag_of_chat_changes_its_answers(run: Run, real: tuple[str, ...]) -> None:
    outcomes = [chat(run, "hello\n", *real), chat(run, "hello\n", *real, "--system", "Be kind.")]
    assert outcomes[0].out != outcomes[1].out


def test_an_empty_line_ends_a_chat(run: Run) -> None:
    assert chat(run, "hi\n\nmore\n").out == chat(run, "hi\n").out


def test_a_chat_with_nothing_to_say_ends_at_once(run: Run) -> None:
    assert chat(run, "") == Outcome(0, "", "")


@pytest.mark.parametrize(
    "flags",
    [
        ("--target", "toy:far"),
        ("--temperature", "1"),
        ("--temperature", "1", "--seed", "9"),
        ("--temperature", "1", "--top-k", "3"),
        ("--temperature", "1", "--top-p", "0.3"),
        ("--temperature", "1", "--min-p", "0.5"),
        ("--temperature", "1", "--typical-p", "0.2"),
        ("--temperature", "1", "--rule", "coupled"),
        ("--temperature", "1", "--rule", "rejection"),
        ("--temperature", "1", "--gamma", "1"),
        ("--temperature", "1", "--drafter", "toy:far"),
        ("--repetition-penalty", "1e6", "--gamma", "0"),
        ("--presence-penalty", "1e6"),
        ("--frequency-penalty", "-1e6"),
        ("--max-new-tokens", "3"),
    ],
)
def test_each_flag_of_chat_does_what_it_does_in_generate(flags: tuple[str, ...], run: Run) -> None:
    longer = ("--max-new-tokens", "40")
    answered = chat(run, "hello\n", *longer, *flags)
    settings = (*TOYS, *SEED, *longer)
    assert answered.out == run("generate", "hello", *settings, *flags).out + "\n"
    # The drafter, gamma and the rule leave a greedy text as it is, and move a sampled one.
    usual = ("--temperature", "1") if "--temperature" in flags and len(flags) > 2 else ()
    assert answered.out != chat(run, "hello\n", *longer, *usual).out


def test_an_error_in_a_chat_is_one_line_and_the_chat_goes_on(run: Run) -> None:
    outcome = chat(run, "x" * 5000 + "\nhello\n")
    assert outcome.code == 0
    assert outcome.out == chat(run, "hello\n").out
    [line] = outcome.err.splitlines()
    assert line.startswith("error: the prompt has 50")


def test_an_interrupted_answer_is_remembered_as_far_as_it_came(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def interrupted(pair: Pair, prompt: object, **settings: object) -> object:
        asked.append(prompt)
        yield Event(0, "half an an", [], None)
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Pair, "stream", interrupted)
    assert chat(run, "hello\nmore\n").code == 0
    assert asked[1][1] == {"role": "assistant", "content": "half an an"}


# --- models and fit ---


@pytest.fixture
def no_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_models_lists_what_is_here_for_people(run: Run, no_imports: Path) -> None:
    outcome = run("models")
    assert outcome.code == 0
    first_words = [line.split()[0] for line in outcome.out.splitlines() if line.strip()]
    for reference in ("reference", "default", "toy:target", "toy:near", "toy:far"):
        assert reference in first_words


def test_models_lists_what_is_here_in_json(run: Run, no_imports: Path) -> None:
    outcome = run("models", "--json")
    [line] = outcome.out.splitlines()
    entries = json.loads(line)["models"]
    assert [entry["reference"] for entry in entries] == [
        "default",
        "toy:target",
        "toy:near",
        "toy:far",
    ]
    assert set(entries[0]) == {
        "reference",
        "kind",
        "where",
        "state",
        "can",
        "context_length",
        "size_bytes",
    }


def test_models_can_prepare_a_model_and_says_when_there_is_none(run: Run, no_imports: Path) -> None:
    assert run("models", "--prepare", "toy:near", "--json").code == 0
    assert run("models", "--prepare", "toy:no-such", "--json").code == 2


def test_models_can_clear_the_cache(run: Run, no_imports: Path) -> None:
    (no_imports / "models" / "old").mkdir(parents=True)
    (no_imports / "models" / "old" / "weights").write_bytes(bytes(3_000_000))
    outcome = run("models", "--clear-cache", "--json")
    assert outcome.err.startswith("freed 3 MB")
    assert not (no_imports / "models").exists()


def fitted(run: Run, place: Path, *arguments: str) -> Json:
    outcome = run("fit", str(place), "--target", "toy:target", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    return outcome.facts


def test_a_table_fitted_from_text_drafts_that_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("AB" * 50)
    table = tmp_path / "table.npz"
    facts = fitted(run, table, "--text", str(tmp_path / "text"))
    assert (facts["file"], facts["order"], facts["num_tokens"]) == (str(table), 4, 100)
    assert facts["size_bytes"] == table.stat().st_size
    drafted = run(
        "generate",
        "ABA",
        *("--raw", "--target", "toy:target", "--drafter", f"ngram:{table}"),
        *("--logit-bias", "65=1000", "--max-new-tokens", "4", "--trace", "--json"),
    ).facts
    assert drafted["stats"]["drafter"] == "ngram (order 4)"
    assert drafted["trace"][0]["drafted"] == list(b"BAB")


def test_texts_are_counted_together(run: Run, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 30)
    texts = ("--text", str(tmp_path / "a"), "--text", str(tmp_path / "b"))
    assert fitted(run, tmp_path / "table", *texts)["num_tokens"] == 60


def test_the_order_flag_is_the_order_of_the_table(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a fox and a dog")
    facts = fitted(run, tmp_path / "t", "--text", str(tmp_path / "text"), "--order", "2")
    assert facts["order"] == 2
    assert facts["num_contexts"] == 1 + len(set("a fox and a do"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    (tmp_path / "prompts").write_text("one\n\ntwo words\n")
    return str(tmp_path / "prompts")


def test_a_table_is_fitted_from_the_targets_answers_to_each_line(
    run: Run, prompts: str, tmp_path: Path
) -> None:
    facts = fitted(run, tmp_path / "t", "--prompts", prompts, "--max-new-tokens", "10")
    chat_words = 2 * len("user: \nassistant:")
    assert facts["num_tokens"] == chat_words + len("one") + len("two words") + 2 * 10
    drafted = run(
        "generate",
        "one",
        *("--target", "toy:target", "--drafter", f"ngram:{tmp_path / 't'}"),
        *("--max-new-tokens", "10", "--json"),
    ).facts
    assert drafted["stats"]["alpha_hat"] == 1.0


def test_sampling_flags_change_a_table_fitted_from_answers(
    run: Run, prompts: str, tmp_path: Path
) -> None:
    def table(*arguments: str) -> bytes:
        fitted(run, tmp_path / "t", "--prompts", prompts, "--max-new-tokens", "20", *arguments)
        import numpy as np

        with np.load(tmp_path / "t") as arrays:
            return b"".join(arrays[name].tobytes() for name in sorted(arrays))

    greedy, first = table(), table("--temperature", "1", "--seed", "1")
    assert len({greedy, first, table("--temperature", "1", "--seed", "2")}) == 3
    assert table("--temperature", "1", "--seed", "1") == first
    assert table("--target", "toy:far") != greedy


def test_without_json_fit_says_how_to_use_the_table(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a fox and a dog")
    table = tmp_path / "table"
    outcome = run("fit", str(table), "--target", "toy:target", "--text", str(tmp_path / "text"))
    assert f"--drafter ngram:{table}" in outcome.out


# --- Asking wrongly ---


def assert_refused(outcome: Outcome, *parts: str) -> None:
    """Exit code 2, nothing on stdout, and one clear line on stderr.

    Beside it at most the note that a model is converted, in whichever test uses it first.
    """
    assert outcome.code == 2
    assert outcome.out == ""
    [line] = [line for line in outcome.err.splitlines() if not line.startswith("converting ")]
    assert line.startswith("error: ")
    assert len(line) > len("error: ") + 10
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--target", "/no/such/model"), "'/no/such/model'"),
        (("--target", "toy:nonsense"), "'nonsense'"),
        (("--target", __file__), "neither"),
        (("--target", str(Path(__file__).parent)), "config.json"),
        (("--target", "missing.gguf"), "'missing.gguf'"),
        (("--drafter", "/no/such/model"), "'/no/such/model'"),
        (("--drafter", "ngram:"), "ngram:FILE"),
        (("--drafter", "ngram:/no/such/table"), "'/no/such/table'"),
        (("--drafter", f"ngram:{__file__}"), "n-gram table"),
        (("--gamma", "-1"), "gamma"),
        (("--gamma", "4096"), "4095"),
        (("--rule", "typical"), "block"),
        (("--temperature", "-0.5"), "temperature"),
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "inf"), "temperature"),
        (("--top-k", "-1"), "top_k"),
        (("--top-p", "0"), "top_p"),
        (("--top-p", "1.5"), "top_p"),
        (("--min-p", "-0.1"), "min_p"),
        (("--min-p", "1.1"), "min_p"),
        (("--typical-p", "0"), "typical_p"),
        (("--repetition-penalty", "0"), "repetition_penalty"),
        (("--presence-penalty", "nan"), "presence_penalty"),
        (("--frequency-penalty", "inf"), "frequency_penalty"),
        (("--logit-bias", "257=1"), "256"),
        (("--logit-bias", "-1=1"), "logit_bias"),
        (("--logit-bias", "42"), "ID=BIAS"),
        (("--logit-bias", "=1"), "ID=BIAS"),
        (("--logit-bias", "1="), "ID=BIAS"),
        (("--logit-bias", "the=1"), "ID=BIAS"),
        (("--logit-bias", "1=nan"), "logit_bias"),
        (("--min-new-tokens", "-1"), "min_new_tokens"),
        (("--max-new-tokens", "0"), "max_new_tokens"),
        (("--max-new-tokens", "-3"), "max_new_tokens"),
        (("--seed", "-1"), "seed"),
        (("--seed", "18446744073709551616"), "seed"),
        (("--stop", ""), "stop"),
        (("--system", "Be kind.", "--raw"), "chat format"),
        (("--engine", "warp"), "torch"),
        (("--engine", "openvino"), "engine"),
        (("--with-transformers",), "--compare"),
        (("--with-transformers", "--compare"), "toy:target"),
        (("--dtype", "float8"), "bfloat16"),
        (("--logprobs", "-1"), "logprobs"),
        (("--logprobs", "258"), "257"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else "",
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], part: str, run: Run
) -> None:
    assert_refused(run("generate", PROMPT, *TOYS, *arguments), part)


@pytest.mark.parametrize("mode", ["--json", "--compare", "--trace", "--stream", "--no-stream"])
def test_an_error_looks_the_same_in_every_mode(mode: str, run: Run) -> None:
    assert_refused(run("generate", PROMPT, *TOYS, "--gamma", "4096", mode), "gamma")


@pytest.mark.parametrize("flag", ["--engine", "--dtype", "--device"])
def test_a_wrong_value_is_refused_for_a_real_model_too(flag: str, run: Run, folder: str) -> None:
    assert_refused(run("generate", PROMPT, "--target", folder, flag, "warp"), "warp")


def test_an_empty_prompt_is_refused(run: Run) -> None:
    assert_refused(run("generate", "", *TOYS), "empty")


def test_an_empty_stdin_is_refused(run: Run) -> None:
    assert_refused(run("generate", "-", *TOYS, stdin=b""), "empty")


def test_an_empty_prompt_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert_refused(run("generate", f"@{tmp_path / 'empty'}", *TOYS), "empty")


@pytest.mark.parametrize("length", [4096, 5000])
def test_a_prompt_longer_than_the_context_is_refused(length: int, run: Run) -> None:
    outcome = run("generate", "x" * length, *TOYS, "--raw")
    assert_refused(outcome, str(length), "4096")


def test_a_prompt_that_leaves_room_for_one_token_gets_one(generate: Callable[..., Json]) -> None:
    facts = generate("--raw", prompt="x" * 4095)
    assert len(facts["token_ids"]) == 1
    assert facts["finish_reason"] == "length"


def test_a_prompt_file_that_cannot_be_read_is_refused(run: Run, tmp_path: Path) -> None:
    assert_refused(run("generate", f"@{tmp_path / 'missing'}", *TOYS), "missing")
    assert_refused(run("generate", f"@{tmp_path}", *TOYS), str(tmp_path))
    assert_refused(run("generate", "@", *TOYS))


def test_bytes_that_are_not_utf_8_on_stdin_are_refused_with_their_place(run: Run) -> None:
    outcome = run("generate", "-", *TOYS, stdin=b"abc\xffdef")
    assert_refused(outcome, "stdin", "0xff", "offset 3")


def test_bytes_that_are_not_utf_8_in_a_prompt_file_are_refused_with_their_place(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "latin").write_bytes("Grüße".encode("latin-1"))
    outcome = run("generate", f"@{tmp_path / 'latin'}", *TOYS)
    assert_refused(outcome, "latin", "0xfc", "offset 2")


def test_bytes_that_are_not_utf_8_in_the_prompt_are_refused(run: Run) -> None:
    assert_refused(run("generate", "Gr\udcfc", *TOYS), "UTF-8")


def test_a_drafter_of_another_tokenizer_is_refused_with_the_first_id_that_differs(
    run: Run, folder: str
) -> None:
    outcome = run("generate", PROMPT, "--target", "toy:target", "--drafter", folder)
    assert_refused(outcome, "token 0", "'<00>'", "--drafter lookup")


def test_a_table_of_another_tokenizer_is_refused(run: Run, folder: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a fox and a dog")
    table = tmp_path / "table"
    fitted(run, table, "--text", str(tmp_path / "text"))
    outcome = run("generate", PROMPT, "--target", folder, "--drafter", f"ngram:{table}")
    assert_refused(outcome, "tokenizer")


def test_a_damaged_table_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a fox and a dog")
    table = tmp_path / "table"
    fitted(run, table, "--text", str(tmp_path / "text"))
    whole = table.read_bytes()
    for damaged in (b"", whole[:10], whole[:-30], b"PK" + whole[9:]):
        table.write_bytes(damaged)
        assert_refused(run("generate", PROMPT, *TOYS, "--drafter", f"ngram:{table}"), str(table))


def test_a_table_with_a_flipped_byte_is_refused_or_still_the_same(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a fox and a dog, and so on: " * 9)
    table = tmp_path / "table"
    fitted(run, table, "--text", str(tmp_path / "text"))
    whole, codes = table.read_bytes(), []
    for place in range(len(whole) // 4, len(whole) - 600, 97):
        table.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        flags = ("--drafter", f"ngram:{table}", "--max-new-tokens", "3")
        outcome = run("generate", PROMPT, *TOYS, *flags)
        codes.append(outcome.code)
        if outcome.code:
            assert_refused(outcome, str(table))
    assert 2 in codes


def test_a_model_that_breaks_down_half_way_is_one_line_behind_its_text(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(engine: Engine, request: object) -> object:
        yield Event(0, "half an an", [], None)
        raise NumericalError("the model's logits are not a law")

    monkeypatch.setattr(Engine, "stream", breaking)
    outcome = run("generate", PROMPT, *TOYS)
    assert outcome == (2, "half an an", "error: the model's logits are not a law\n")


def test_ctrl_c_leaves_with_exit_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(engine: Engine, request: object) -> object:
        yield Event(0, "half an an", [], None)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    assert run("generate", PROMPT, *TOYS).code == 130


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "nothing to count"),
        (("--text", "/no/such/text"), "/no/such/text"),
        (("--prompts", "/no/such/text"), "/no/such/text"),
        (("--text", __file__, "--order", "0"), "order"),
        (("--text", __file__, "--order", "9"), "order"),
        (("--text", __file__, "--target", "toy:nonsense"), "nonsense"),
        (("--text", __file__, "--temperature", "-1"), "temperature"),
        (("--text", __file__, "--dtype", "float8"), "bfloat16"),
        (("--text", __file__, "--seed", "-1"), "seed"),
        (("--text", __file__, "--max-new-tokens", "0"), "max_new_tokens"),
        (("--text", __file__, "--temperature", "1"), "are for answers to --prompts"),
        (("--text", __file__, "--seed", "0"), "are for answers to --prompts"),
        (("--prompts", "/dev/null"), "is empty"),
    ],
)
def test_a_wrong_value_for_fit_is_one_line_and_exit_code_2_and_no_table(
    arguments: tuple[str, ...], part: str, run: Run, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    assert_refused(run("fit", str(table), "--target", "toy:target", *arguments), part)
    assert list(tmp_path.iterdir()) == []


def test_a_table_in_a_folder_that_does_not_exist_is_refused(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "missing" / "table"
    assert_refused(run("fit", str(table), "--text", __file__), "folder does not exist")


def test_a_table_that_cannot_be_written_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    arguments = ("fit", str(tmp_path / "folder"), "--target", "toy:target", "--text", __file__)
    with contextlib.suppress(OSError):
        run(*arguments)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--target", "toy:nonsense"), "nonsense"),
        (("--drafter", "toy:nonsense"), "nonsense"),
        (("--temperature", "-1"), "temperature"),
        (("--rule", "typical"), "rule"),
        (("--engine", "warp"), "engine"),
        (("--dtype", "float8"), "dtype"),
    ],
)
def test_a_wrong_value_for_chat_is_refused_before_the_first_line(
    arguments: tuple[str, ...], part: str, run: Run
) -> None:
    assert_refused(chat(run, "hello\n", *arguments), part)


def test_a_message_that_strict_stdin_cannot_read_ends_a_chat(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdin", strict)
    assert_refused(run("chat", *TOYS), "UTF-8")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("generate", PROMPT, "--no-such-flag"), "--no-such-flag"),
        (("generate", PROMPT, "--gama", "3"), "--gamma"),
        (("generate",), "prompt"),
        (("generate", "two", "prompts"), "prompts"),
        (("generate", PROMPT, "--gamma"), "--gamma"),
        (("generate", PROMPT, "--gamma", "many"), "--gamma"),
        (("generate", PROMPT, "--gamma", "2.5"), "--gamma"),
        (("generate", PROMPT, "--temperature", "warm"), "--temperature"),
        (("generate", PROMPT, "--seed", "x"), "--seed"),
        (("fit",), "output"),
        (("translate",), "translate"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_line_that_cannot_be_parsed_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], part: str, run: Run
) -> None:
    outcome = run(*arguments)
    assert_refused(outcome)
    assert part in outcome.err.lower()


def test_outrider_alone_shows_its_help_and_no_traceback(run: Run) -> None:
    outcome = run()
    assert outcome.code in (0, 2)
    assert "generate" in outcome.out + outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        (PROMPT, "--target", "m" * 300),
        (PROMPT, "--target", "~nobody-here/model"),
        ("@~nobody-here/prompt", *TOYS),
    ],
    ids=["too long", "no home", "no home for the prompt"],
)
def test_a_path_that_the_file_system_refuses_is_one_line(
    arguments: tuple[str, ...], run: Run
) -> None:
    assert_refused(run("generate", *arguments))


def test_bytes_that_are_not_utf_8_in_the_system_message_are_refused(run: Run) -> None:
    assert_refused(run("generate", PROMPT, *TOYS, "--system", "caf\udce9"), "UTF-8")


def test_bytes_that_are_not_utf_8_in_a_stop_string_are_refused(run: Run) -> None:
    outcome = run("generate", PROMPT, *TOYS, "--max-new-tokens", "3", "--stop", "caf\udce9")
    assert_refused(outcome, "UTF-8")


def test_bytes_that_are_not_utf_8_in_a_message_end_a_chat(run: Run) -> None:
    outcome = run("chat", *TOYS, "--max-new-tokens", "3", stdin=b"caf\xe9\n")
    assert_refused(outcome, "UTF-8")


def test_a_closed_stdin_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert_refused(run("generate", "-", *TOYS), "stdin")


def test_text_that_the_terminal_cannot_show_is_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert run("generate", PROMPT, *TOYS, "--max-new-tokens", "9").code in (0, 2)


@pytest.mark.parametrize("flag", ["--device", "--dtype"])
def test_a_toy_refuses_what_it_cannot_do(flag: str, run: Run) -> None:
    value = "warp" if flag == "--device" else "bfloat16"
    assert_refused(run("generate", PROMPT, *TOYS, "--max-new-tokens", "3", flag, value), value)


def test_models_refuses_an_unknown_dtype(run: Run, no_imports: Path) -> None:
    assert_refused(run("models", "--dtype", "float8"), "bfloat16")


def test_a_table_that_cannot_be_written_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    arguments = ("--target", "toy:target", "--text", __file__)
    assert_refused(run("fit", str(tmp_path / "folder"), *arguments), "folder")


# --- Help, and starting quickly ---


def test_help_lists_every_command(run: Run) -> None:
    outcome = run("--help")
    assert outcome.code == 0
    for command in ("generate", "chat", "models", "fit"):
        assert command in outcome.out


@pytest.mark.parametrize("command", ["generate", "chat", "models", "fit"])
def test_help_of_a_command_lists_its_options(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    outcome = run(command, "--help")
    assert outcome.code == 0
    function = getattr(importlib.import_module(f"outrider.cli.{command}"), command)
    names = set(inspect.signature(function).parameters)
    for name in names - {"prompt", "output", "as_json", "stream"}:
        assert f"--{name.replace('_', '-')}" in outcome.out


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


HEAVY = "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"


def test_importing_outrider_does_not_import_torch() -> None:
    done = python(f"import sys, outrider, outrider.cli; {HEAVY}")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_help_does_not_import_torch() -> None:
    code = f"""
import sys
from outrider.cli import main
sys.argv = ["outrider", "--help"]
try:
    main()
except SystemExit as leaving:
    print(leaving.code)
{HEAVY}
"""
    done = python(code)
    assert done.stdout.splitlines()[-2:] == ["0", "[]"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments", [("generate", "x"), ("chat",), ("fit", "table", "--text", __file__)]
)
def test_a_wrong_setting_is_refused_before_a_model_is_read(
    arguments: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: str) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr(pair, "load", too_late)
    assert_refused(run(*arguments, "--temperature", "-1"), "temperature")


# --- In a process of its own ---


def outrider(
    *arguments: str | bytes, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "outrider", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def test_a_process_prints_utf_8_and_one_json_line() -> None:
    arguments = (*TOYS, *SEED, "--max-new-tokens", "20", "--json")
    done = outrider("generate", "-", *arguments, stdin="Grüße".encode())
    assert (done.returncode, done.stderr) == (0, b"")
    [line] = done.stdout.decode("utf-8").splitlines()
    assert json.loads(line)["text"] == answer("Grüße", max_new_tokens=20)


@pytest.mark.skipif(os.name == "nt", reason="arguments are not bytes there")
def test_a_process_refuses_an_argument_that_is_not_utf_8() -> None:
    done = outrider("generate", b"caf\xe9", *TOYS)
    assert_refused(Outcome(done.returncode, done.stdout.decode(), done.stderr.decode()), "UTF-8")


@pytest.mark.skipif(os.name == "nt", reason="pipes break differently there")
def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "generate", PROMPT, *TOYS, "--max-new-tokens", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
