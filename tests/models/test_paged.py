"""The openvino engine on tiny random models of many architectures.

The yardstick is a plain forward pass of an identical transformers module, over the whole text at
once and without any cache. Texts cross three blocks, and are longer than every sliding window.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from models.families import (
    CONTEXT,
    FAMILIES,
    WINDOW,
    Config,
    V,
    assert_close,
    build,
    feed_in_pieces,
    feed_side_by_side,
    logits_of,
    plain,
    small,
    text,
)
from outrider.decoding import Engine
from outrider.drafters import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import CacheFull, GenerationError, UnsupportedModel, UsageError
from outrider.models import Feed, Prompt, conversion, load_model, paged
from outrider.models import graph as graph_module
from outrider.models.architecture import context_length
from outrider.models.blocks import BlockTable
from outrider.models.cache import MANIFEST, clear_cache
from outrider.models.causal import CausalModel
from outrider.models.conversion import convert
from outrider.models.graph import Graph
from outrider.models.paged import PagedModel, check, computes_bfloat16
from outrider.requests import Request, Result
from outrider.sampling import SamplingPolicy

BLOCK = 32
LENGTH = 3 * BLOCK + 14  # of the texts here: three blocks and a part of the fourth
MEMORY = 2**22  # bytes for keys and values: some hundred blocks of these models
SAMPLED = SamplingPolicy(temperature=1.0)

CONVERTED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma3",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "gptj",
    "cohere",
    "olmo2",
    "falcon",
    "stablelm",
]
NOT_CONVERTED = {
    "gemma2": "gemma2 has no attention that OpenVINO recognises",
    "mixtral": "mixtral does not convert",
    "bloom": "bloom has no attention that OpenVINO recognises",
    "gpt_neo": "gpt_neo has no attention that OpenVINO recognises",
    "gpt_oss": "gpt_oss has no attention that OpenVINO recognises",
    "falcon_alibi": "falcon does not convert",
    "llama4_chunked": "llama4_text has layers of type chunked_attention",
    "llama4_scaled": "llama4_text has layers of type chunked_attention",
}
each_family = pytest.mark.parametrize("family", CONVERTED)


class OneThread(paged.ov.Core):  # type: ignore[misc]
    """Two threads wait for each other longer than these models compute."""

    def compile_model(self, model: object, device: str, config: dict[str, str]) -> object:
        return super().compile_model(model, device, config | {"INFERENCE_NUM_THREADS": "1"})


def one_thread(wanted: Graph, **options: object) -> PagedModel:
    """The engine, quick also where other tests run beside this one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paged.ov, "Core", OneThread)
        return PagedModel(wanted, **options)  # type: ignore[arg-type]


@cache
def graph(family: str) -> Graph:
    return convert(build(FAMILIES[family].config()))


def paged_model(family: str, *, num_blocks: int | None = None, **changes: object) -> PagedModel:
    """A fresh engine with a memory of its own."""
    options: dict[str, object] = {
        "name": f"tiny {family}",
        "dtype": "float32",
        "context_length": CONTEXT,
        "kv_memory": MEMORY,
    }
    if num_blocks is not None:
        options["kv_memory"] = num_blocks * bytes_per_block(served(family))
    model = one_thread(graph(family), **(options | changes))
    assert num_blocks is None or model.pool.num_blocks == num_blocks
    return model


SHARED: list[PagedModel] = []
"""Models that more than one test runs."""


@cache
def served(family: str) -> PagedModel:
    SHARED.append(paged_model(family))
    return SHARED[-1]


@cache
def near() -> PagedModel:
    """A llama with disturbed weights: it agrees with the llama of the table now and then."""
    made = convert(disturbed())
    options = {"dtype": "float32", "context_length": CONTEXT, "kv_memory": MEMORY}
    SHARED.append(one_thread(made, name="near", **options))
    return SHARED[-1]


def disturbed() -> hf.PreTrainedModel:
    module = build(FAMILIES["llama"].config())
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * weight.std(correction=0) * 0.05)
    return module


@cache
def on_torch(which: str) -> CausalModel:
    module = build(FAMILIES["llama"].config()) if which == "llama" else disturbed()
    return CausalModel(module, name=f"{which} on torch")


@pytest.fixture(autouse=True)
def integrity() -> Iterator[None]:
    """No test leaves a block lost, shared without being counted, or held by a live sequence."""
    yield
    for model in SHARED:
        model.pool.check_integrity()
        for table in list(model.pool._live):
            table.close()
        model.pool.clear()
        assert model.pool.num_free == model.pool.num_blocks


def bytes_per_block(model: PagedModel) -> int:
    return sum(cache[0].nbytes for cache in model._caches)


def start(model: PagedModel, ids: Sequence[int]) -> BlockTable:
    """A sequence that shares nothing, so that everything is really fed."""
    table = model.start(Prompt(ids))
    table.rollback(0)
    return table


class Meter:
    """Notes how many tokens every pass of a model takes in."""

    def __init__(self, model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []
        run = model._pass

        def counted(pieces: Sequence[paged._Piece]) -> Tensor:
            self.passes.append(sum(len(piece.tokens) for piece in pieces))
            return run(pieces)

        monkeypatch.setattr(model, "_pass", counted)

    @property
    def tokens(self) -> int:
        return sum(self.passes)


# --- Logits by way of the cache ---


@each_family
@pytest.mark.parametrize(
    "sizes", [(LENGTH,), (1, 31, 1, 31, 33, 13), (33, 63, 1, 13)], ids=["whole", "on", "over"]
)
def test_logits_do_not_depend_on_the_pieces_a_text_is_fed_in(
    family: str, sizes: tuple[int, ...]
) -> None:
    """The pieces end at, before and behind the borders of blocks."""
    ids = text(LENGTH)
    assert_close(feed_in_pieces(served(family), ids, sizes), logits_of(plain(family), ids))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "falcon"])
def test_logits_of_a_text_fed_token_by_token_are_those_of_a_plain_pass(family: str) -> None:
    ids = text(LENGTH)
    found = feed_in_pieces(served(family), ids, [1] * LENGTH)
    assert_close(found, logits_of(plain(family), ids))


@each_family
def test_wrong_tokens_leave_no_trace_after_a_rollback(family: str) -> None:
    model, ids = served(family), text(LENGTH)
    sequence, rows, at = start(model, ids), [], 0
    for i, size in enumerate((5, 26, 9, 24, 12, 34)):
        model.score([Feed(sequence, text(1 + 13 * i, seed=i), 1)])
        sequence.rollback(at)
        rows.append(model.score([Feed(sequence, ids[at : at + size], size)]))
        at += size
    assert_close(torch.cat(rows), logits_of(plain(family), ids))


@each_family
def test_each_row_of_a_ragged_batch_is_what_its_sequence_gives_alone(family: str) -> None:
    """Three sequences; in every pass other sizes, and one time only two of them."""
    model = served(family)
    texts = [text(LENGTH, seed=1), text(70, seed=2), text(41, seed=3)]
    passes = ((60, 9, 1), (1, 35, 24), (30, 0, 1), (19, 26, 15))
    found = feed_side_by_side(model, texts, passes)
    for rows, ids in zip(found, texts, strict=True):
        assert_close(rows, logits_of(plain(family), ids))


@each_family
def test_only_the_last_keep_rows_come_back_for_each_feed(family: str) -> None:
    model = served(family)
    texts, keeps = [text(77, seed=7), text(12, seed=8), text(35, seed=9)], (33, 1, 35)
    feeds = [Feed(start(model, ids), ids, n) for ids, n in zip(texts, keeps, strict=True)]
    wanted = [logits_of(plain(family), ids)[-n:] for ids, n in zip(texts, keeps, strict=True)]
    assert_close(model.score(feeds), torch.cat(wanted))
    assert [feed.sequence.length for feed in feeds] == [77, 12, 35]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("chunk", [7, 32])
def test_a_feed_longer_than_one_pass_gives_the_same_rows(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, meter = served(family), Meter(served(family), monkeypatch)
    monkeypatch.setattr(paged, "_CHUNK", chunk)
    texts = [text(LENGTH, seed=1), text(3, seed=2), text(65, seed=3)]
    for keeps in ((1, 1, 1), (LENGTH, 3, 65), (chunk, 2, chunk + 1)):
        feeds = [Feed(start(model, ids), ids, n) for ids, n in zip(texts, keeps, strict=True)]
        wanted = [logits_of(plain(family), ids)[-n:] for ids, n in zip(texts, keeps, strict=True)]
        meter.passes.clear()
        assert_close(model.score(feeds), torch.cat(wanted))
        assert meter.tokens == sum(map(len, texts))
        assert max(meter.passes) <= 3 * chunk


@pytest.mark.parametrize("family", ["llama", "mistral", "falcon"])
def test_forked_sequences_go_separate_ways(family: str) -> None:
    model, ids = served(family), text(50)
    first = start(model, ids)
    model.score([Feed(first, ids, 1)])
    second, third = first.fork(), first.fork()
    texts = [[*ids, *text(30, seed=seed)] for seed in (4, 5)] + [[*ids[:40], *text(20, seed=6)]]
    third.rollback(40)
    feeds = [Feed(first, texts[0][50:], 30), Feed(second, texts[1][50:], 30)]
    found = model.score([*feeds, Feed(third, texts[2][40:], 20)])
    wanted = [
        logits_of(plain(family), ids)[-n:] for ids, n in zip(texts, (30, 30, 20), strict=True)
    ]
    assert_close(found, torch.cat(wanted))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "cohere"])
def test_what_is_taken_over_from_another_sequence_gives_the_same_logits(family: str) -> None:
    model, ids = served(family), text(LENGTH)
    first = model.start(Prompt(ids))
    model.score([Feed(first, ids[first.length :], 1)])
    for length in (1, 31, 32, 33, 64, 80):
        other = [*ids[:length], *text(20, seed=length)]
        second = model.start(Prompt(other))
        assert second.length >= length
        found = model.score([Feed(second, other[second.length :], 10)])
        assert_close(found, logits_of(plain(family), other)[-10:])
        second.close()


def test_every_sliding_window_of_these_tests_is_shorter_than_their_texts() -> None:
    """Otherwise the windows would prove nothing."""
    first, second = text(LENGTH), text(LENGTH)
    second[0] = (first[0] + 1) % V
    for family, is_blind in (("mistral", True), ("phi3", True), ("llama", False)):
        rows = [
            feed_in_pieces(served(family), ids, [LENGTH])[2 * WINDOW :] for ids in (first, second)
        ]
        assert torch.equal(*rows) == is_blind


def test_keys_and_values_have_the_precision_that_is_computed_in() -> None:
    model = served("llama")
    assert {cache.dtype for cache in model._caches} == {np.dtype(np.float32)}
    # layers * (keys and values) * heads * tokens * head size * 4 bytes
    assert bytes_per_block(model) == 2 * 2 * 2 * BLOCK * 8 * 4
    half = paged_model("llama", dtype="bfloat16")
    assert {cache.itemsize for cache in half._caches} == {2 if computes_bfloat16() else 4}


def test_a_failed_pass_leaves_every_sequence_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = served("llama"), text(40)
    first, second = start(model, ids), start(model, ids)
    model.score([Feed(first, ids[:20], 1)])
    with monkeypatch.context() as patched:
        patched.setattr(model, "_pass", lambda pieces: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.score([Feed(first, text(50, seed=1), 1), Feed(second, ids, 1)])
    assert (first.length, second.length) == (20, 0)
    found = model.score([Feed(first, ids[20:], 20)])
    assert_close(found, logits_of(plain("llama"), ids)[20:])


LONG_ROPE = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 70,
}
DYNAMIC_ROPE = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    "config",
    [
        small(
            hf.Phi3Config,
            max_position_embeddings=280,
            original_max_position_embeddings=70,
            rope_parameters=LONG_ROPE,
        ),
        small(hf.LlamaConfig, max_position_embeddings=70, rope_parameters=DYNAMIC_ROPE),
    ],
    ids=["longrope", "dynamic"],
)
def test_scaled_positions_are_exact_up_to_the_last_token_of_the_context(config: Config) -> None:
    assert context_length(config()) == 70
    model = one_thread(
        convert(build(config())), name="x", dtype="float32", context_length=70, kv_memory=MEMORY
    )
    ids = text(70)
    found = feed_in_pieces(model, ids, [30, 1, 25, 13, 1])
    assert_close(found, logits_of(build(config()), ids))


# --- What does not convert, and what converts into another model ---


@pytest.mark.parametrize("family", NOT_CONVERTED)
def test_a_model_that_does_not_convert_is_refused_in_one_line(family: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        convert(build(FAMILIES[family].config()))
    assert str(caught.value).startswith(NOT_CONVERTED[family])
    assert "\n" not in str(caught.value)


def test_a_failed_conversion_leaves_the_logging_as_it_was() -> None:
    root = logging.getLogger()
    before = root.level, list(root.filters), list(root.handlers)
    with pytest.raises(UnsupportedModel):
        convert(build(FAMILIES["mixtral"].config()))
    assert (root.level, root.filters, root.handlers) == before


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_graph_of_the_same_model_passes_the_check(family: str) -> None:
    check(graph(family), build(FAMILIES[family].config()))


def test_a_graph_of_other_weights_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="llama converts, but its logits come out different"):
        check(graph("llama"), build(FAMILIES["llama"].config(), seed=1))


def test_two_swapped_weights_are_noticed() -> None:
    module = build(FAMILIES["llama"].config())
    first, second = (layer.self_attn.k_proj for layer in module.model.layers)
    first.weight, second.weight = second.weight, first.weight
    with pytest.raises(UnsupportedModel, match="logits come out different"):
        check(graph("llama"), module)


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("mistral", [0, 0]),
        ("mistral", [WINDOW, 0]),
        ("mistral", [WINDOW + 1, WINDOW]),
        ("gemma3", [0, WINDOW]),
        ("llama", [0, 79]),
    ],
)
def test_a_wrong_window_is_noticed(family: str, windows: list[int]) -> None:
    with pytest.raises(UnsupportedModel, match="logits come out different"):
        check(replace(graph(family), windows=windows), build(FAMILIES[family].config()))


def test_logits_that_are_no_numbers_are_refused() -> None:
    module = build(FAMILIES["llama"].config())
    with torch.no_grad():
        module.lm_head.weight[5, 5] = float("nan")
    with pytest.raises(UnsupportedModel, match="logits come out different"):
        check(graph("llama"), module)


@pytest.mark.parametrize(
    "broken", ["a block table that is off by one", "a rollback that is none", "a lost neighbour"]
)
def test_an_engine_that_loses_its_place_is_noticed(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PagedModel._pass

    def wrong(model: PagedModel, pieces: Sequence[paged._Piece]) -> Tensor:
        if broken == "a rollback that is none":
            pieces = [piece._replace(past=max(piece.past - 1, 0)) for piece in pieces]
        elif broken == "a lost neighbour":
            pieces = [piece._replace(table=pieces[-1].table) for piece in pieces]
        else:
            for piece in pieces:
                if piece.past:
                    piece.table.blocks.reverse()
        return run(model, pieces)

    monkeypatch.setattr(PagedModel, "_pass", wrong)
    with pytest.raises(UnsupportedModel, match="logits come out different"):
        check(graph("llama"), build(FAMILIES["llama"].config()))


# --- Loading, and what is kept on disk ---


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own; the folder of its graphs."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


def saved(family: str, folder: Path, *, seed: int = 0) -> str:
    build(FAMILIES[family].config(), seed=seed).save_pretrained(folder)
    return str(folder)


def load(reference: str, **options: object) -> PagedModel:
    options = {"engine": "openvino", "dtype": "float32", "kv_memory": MEMORY} | options
    return load_model(reference, **options)  # type: ignore[arg-type, return-value]


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A model folder."""
    return saved("llama", tmp_path / "tiny llama")


class Loaded(NamedTuple):
    """What a loaded model is made from, where a test does not run it."""

    graph: Graph
    dtype: str


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts conversions, which are skipped: all models give the llama of the table."""
    counted: Counter[str] = Counter()

    def convert(module: hf.PreTrainedModel) -> Graph:
        counted["convert"] += 1
        return graph("llama")

    def check(made: Graph, module: hf.PreTrainedModel) -> None:
        counted["check"] += 1

    def model(made: Graph, *, dtype: str, **options: object) -> Loaded:
        assert len(made.decoder.inputs) > 3
        return Loaded(made, dtype)

    monkeypatch.setattr(conversion, "convert", convert)
    monkeypatch.setattr(paged, "check", check)
    monkeypatch.setattr(paged, "PagedModel", model)
    return counted


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir()) if folder.exists() else []


def test_a_folder_is_converted_once_and_is_the_same_model_ever_after(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reference, ids = saved("mistral", tmp_path / "windows"), text(LENGTH)
    capfd.readouterr()
    for attempt in range(2):
        model = load(reference)
        assert isinstance(model, PagedModel)
        assert (model.name, model.engine, model.dtype) == (reference, "openvino", "float32")
        assert (model.vocab_size, model.context_length) == (V, CONTEXT)
        assert (model.tokenizer, model.eos_ids) == (None, frozenset())
        assert_close(feed_in_pieces(model, ids, [70, 40]), logits_of(plain("mistral"), ids))
        notes = capfd.readouterr().err.splitlines()
        assert len(notes) == (1 if attempt == 0 else 0)
        assert all(note.startswith(f"converting {reference} for this CPU") for note in notes)
        monkeypatch.setattr(conversion, "convert", lambda module: 1 / 0)
        monkeypatch.setattr(graph_module, "load_weights", lambda *arguments: 1 / 0)
    assert len(names(kept)) == 1


def test_end_tokens_are_kept_with_the_graph(
    kept: Path, llama: str, conversions: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = replace(graph("llama"), eos_ids=frozenset({3, 7}))
    monkeypatch.setattr(conversion, "convert", lambda module: ends)
    for _ in range(2):
        assert load(llama).graph.eos_ids == frozenset({3, 7})  # type: ignore[attr-defined]


def cut_the_weights_short(folder: Path) -> None:
    file = folder / "decoder.bin"
    file.write_bytes(file.read_bytes()[:-100])


def remove_the_graph(folder: Path) -> None:
    (folder / "decoder.xml").unlink()


def remove_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def write_garbage_into_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{[")


def write_a_list_into_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


def put_a_file_in_its_place(folder: Path) -> None:
    for item in folder.iterdir():
        item.unlink()
    folder.rmdir()
    folder.write_text("")


def forget_the_windows(folder: Path) -> None:
    """As an older Outrider may have written it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({"sizes": manifest["sizes"]}))


@pytest.mark.parametrize(
    "damage",
    [
        cut_the_weights_short,
        remove_the_graph,
        remove_the_manifest,
        write_garbage_into_the_manifest,
        write_a_list_into_the_manifest,
        put_a_file_in_its_place,
        forget_the_windows,
    ],
)
def test_a_damaged_graph_is_made_again(
    damage: Callable[[Path], None], kept: Path, llama: str, conversions: Counter[str]
) -> None:
    load(llama)
    [name] = names(kept)
    damage(kept / name)
    load(llama)
    assert conversions["convert"] == conversions["check"] == 2
    assert names(kept) == [name]
    load(llama)
    assert conversions["convert"] == 2


def test_another_precision_is_another_graph(
    kept: Path, llama: str, conversions: Counter[str]
) -> None:
    for dtype in ("float32", "bfloat16", "float32", "bfloat16"):
        assert load(llama, dtype=dtype).dtype == dtype
    assert conversions["convert"] == 2
    assert len(names(kept)) == 2


def test_other_weights_in_the_same_folder_are_another_graph(
    kept: Path, llama: str, conversions: Counter[str]
) -> None:
    load(llama)
    saved("llama", Path(llama), seed=1)
    load(llama)
    assert conversions["convert"] == 2


def test_one_weight_that_was_changed_in_place_is_another_graph(
    kept: Path, llama: str, conversions: Counter[str]
) -> None:
    load(llama)
    file = Path(llama) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    load(llama)
    assert conversions["convert"] == 2


@pytest.mark.parametrize("library", ["transformers", "torch", "openvino"])
def test_another_version_of_a_library_is_another_graph(
    library: str,
    kept: Path,
    llama: str,
    conversions: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(llama)
    if library == "openvino":
        monkeypatch.setattr(graph_module.ov, "get_version", lambda: "1.2.3")
    else:
        monkeypatch.setattr(getattr(graph_module, library), "__version__", "1.2.3")
    load(llama)
    load(llama)
    assert conversions["convert"] == 2


@pytest.mark.parametrize("stage", ["convert", "check", "save"])
def test_an_interrupted_conversion_leaves_nothing_behind(
    stage: str,
    kept: Path,
    llama: str,
    conversions: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if stage == "save":
            patched.setattr(graph_module.ov, "save_model", interrupt)
        else:
            patched.setattr({"convert": conversion, "check": paged}[stage], stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(llama)
    assert names(kept) == []
    load(llama)
    assert len(names(kept)) == 1


def test_a_cache_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, llama: str, conversions: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="OUTRIDER_CACHE") as caught:
        load(llama)
    assert "\n" not in str(caught.value)
    assert conversions["convert"] == 0


def test_a_full_disk_is_an_error_in_one_line(
    kept: Path, llama: str, conversions: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")  # what OpenVINO says then

    monkeypatch.setattr(graph_module.ov, "save_model", full)
    with pytest.raises(UsageError, match="OUTRIDER_CACHE"):
        load(llama)


def test_clearing_the_cache_removes_graphs_and_models_and_says_how_much(
    kept: Path, llama: str, conversions: Counter[str]
) -> None:
    load(llama)
    (kept.parent / "models" / "imported").mkdir(parents=True)
    (kept.parent / "models" / "imported" / "weights").write_bytes(b"x" * 1000)
    (kept.parent / "notes.txt").write_text("the user's own")
    size = sum(item.stat().st_size for item in kept.rglob("*") if item.is_file())
    assert clear_cache() == size + 1000
    assert names(kept.parent) == ["notes.txt"]
    assert clear_cache() == 0
    load(llama)
    assert conversions["convert"] == 2


def test_a_model_that_does_not_convert_runs_on_torch_and_one_line_says_why(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reference = saved("bloom", tmp_path / "bloom")
    capfd.readouterr()
    notice = f"{reference} runs on torch, not openvino: bloom has no attention"
    for attempt in range(2):
        model = load_model(reference, dtype="float32", device="cpu")
        assert (model.engine, model.name) == ("torch", reference)
        out, err = capfd.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("converting ")]
        assert out == ""
        assert len(lines) == 1
        assert lines[0].startswith(notice)
        assert (len(err.splitlines()) == 1) or attempt == 0
        monkeypatch.setattr(conversion, "convert", lambda module: 1 / 0)
        monkeypatch.setattr(graph_module, "load_weights", lambda *arguments: 1 / 0)
    assert names(kept) == [name for name in names(kept) if name.endswith(".unsupported")]


def test_a_model_that_does_not_convert_is_an_error_if_openvino_was_asked_for(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = saved("bloom", tmp_path / "bloom")
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="bloom has no attention") as caught:
            load_model(reference, engine="openvino", dtype="float32")
        assert "\n" not in str(caught.value)
        monkeypatch.setattr(graph_module, "load_weights", lambda *arguments: 1 / 0)
    clear_cache()
    with pytest.raises(ZeroDivisionError):  # now it is tried again
        load_model(reference, engine="openvino", dtype="float32")


def test_a_model_that_converts_into_another_one_is_refused_and_that_is_remembered(
    kept: Path, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def wrong(module: hf.PreTrainedModel) -> Graph:
        calls.append(module)
        return replace(graph("llama"), windows=[5, 0])

    monkeypatch.setattr(conversion, "convert", wrong)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="logits come out different"):
            load(llama)
    assert len(calls) == 1
    assert [name for name in names(kept) if not name.endswith(".unsupported")] == []


def test_chunked_attention_is_refused_before_anything_is_read(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = saved("llama4_chunked", tmp_path / "chunked")
    monkeypatch.setattr(graph_module, "load_weights", lambda *arguments: 1 / 0)
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        load(reference)


@pytest.mark.parametrize("setting", [{"kv_memory": 2**20}, {"dtype": "int8"}])
def test_a_setting_of_this_engine_is_refused_where_the_model_runs_on_torch(
    setting: dict[str, object], kept: Path, tmp_path: Path
) -> None:
    reference = saved("llama4_chunked", tmp_path / "chunked")
    with pytest.raises(UsageError, match="needs the openvino engine"):
        load_model(reference, device="cpu", **setting)  # type: ignore[arg-type]


def rounded(weight: Tensor, axis: int) -> Tensor:
    """A weight in 8 bits: per output 256 values from its least to its largest, 0 among them."""
    low, high = (
        weight.amin(axis, keepdim=True).clamp(max=0),
        weight.amax(axis, keepdim=True).clamp(min=0),
    )
    step = (high - low) / 255
    zero = (-low / step).round()
    return ((weight / step).round() + zero).clamp(0, 255).sub(zero).mul(step)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_int8_logits_are_those_of_the_model_with_rounded_weights(
    family: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights are rounded alike everywhere; products are in bfloat16 where the processor has it.
    monkeypatch.setattr(paged, "computes_bfloat16", lambda: False)
    ids = text(40)
    model = load(saved(family, tmp_path / family), dtype="int8")
    assert model.dtype == "int8"
    found = feed_in_pieces(model, ids, [30, 10])
    module = build(FAMILIES[family].config())
    exact = logits_of(module, ids)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, (torch.nn.Linear, torch.nn.Embedding)):
                part.weight.copy_(rounded(part.weight, 1))
            elif type(part).__name__ == "Conv1D":  # [in, out]
                part.weight.copy_(rounded(part.weight, 0))
    wanted = logits_of(module, ids)
    if family != "gpt2":  # whose embeddings of positions stay as they are
        assert (found - wanted).abs().max() < 2e-3 * wanted.abs().max()
    assert (found - wanted).norm() < 0.2 * (exact - wanted).norm()


def test_int8_weights_of_a_wrong_graph_are_refused_too(
    kept: Path, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(graph("llama"), decoder=graph("llama").decoder.clone(), windows=[5, 0])
    monkeypatch.setattr(conversion, "convert", lambda module: wrong)
    with pytest.raises(UnsupportedModel, match="logits come out different"):
        load(llama, dtype="int8")


# --- Memory ---


@pytest.mark.parametrize("memory", [0, 1, 8191, -1])
def test_a_memory_without_room_for_one_block_is_refused_with_the_numbers(memory: int) -> None:
    assert bytes_per_block(served("llama")) == 8192 * 1
    with pytest.raises(UsageError, match=f"at least 32 tokens .* 8192 bytes; got {memory}"):
        paged_model("llama", kv_memory=memory)


def test_the_memory_is_filled_with_whole_blocks() -> None:
    model = paged_model("llama", kv_memory=3 * 8192 + 8191)
    assert model.pool.num_blocks == 3
    assert model.kv_bytes_per_token == 8192 / 32


def test_without_a_number_there_is_room_for_one_sequence_of_full_length_at_least() -> None:
    model = paged_model("llama", kv_memory=None, context_length=2**20)
    assert model.pool.num_blocks * BLOCK >= min(2**20, paged._free_memory() // 2 // 8192 * BLOCK)


def test_a_request_for_which_there_is_no_room_fails_with_the_numbers() -> None:
    model = paged_model("llama", num_blocks=3)
    with pytest.raises(CacheFull, match="room for 32 tokens is needed and 0 are free"):
        Engine(model).generate([Request(text(90), max_new_tokens=20)])
    model.pool.check_integrity()
    [result] = Engine(model).generate([Request(text(90), max_new_tokens=7)])  # to the last slot
    assert len(result.token_ids) == 7


@pytest.mark.parametrize("num_blocks", [3, 6])
def test_requests_that_do_not_fit_together_give_what_each_gives_alone(num_blocks: int) -> None:
    model = paged_model("llama", num_blocks=num_blocks)
    requests = [
        Request(text(30 + 9 * i, seed=i), SAMPLED, 30, gamma=i, rule="coupled", seed=i)
        for i in range(5)
    ]
    drafter = ModelDrafter(paged_model("llama", num_blocks=num_blocks), target_vocab_size=V)
    together = Engine(model, drafter, prefill_chunk=40).generate(requests)
    for request, result in zip(requests, together, strict=True):
        [alone] = Engine(served("llama")).generate([replace(request, gamma=0)])
        assert result.token_ids == alone.token_ids
    model.pool.check_integrity()
    assert not model.pool._live
    model.pool.clear()
    assert model.pool.num_free == num_blocks


def test_only_the_request_that_is_too_long_fails() -> None:
    model = paged_model("llama", num_blocks=3)
    requests = [Request(text(20, seed=i), max_new_tokens=30, gamma=0) for i in range(3)]
    requests.insert(1, Request(text(120, seed=9), max_new_tokens=5))
    with pytest.raises(GenerationError, match="1 of 4 requests failed") as caught:
        Engine(model).generate(requests)
    results = caught.value.results
    assert isinstance(results[1].error, CacheFull)
    for i in (0, 2, 3):
        [alone] = Engine(served("llama")).generate([requests[i]])
        assert results[i].token_ids == alone.token_ids
    assert not model.pool._live


# --- The prompt's beginning is read once ---


def test_a_prompt_that_was_read_before_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged_model("llama")
    meter, request = Meter(model, monkeypatch), Request(text(LENGTH), max_new_tokens=20, gamma=0)
    [cold] = Engine(model).generate([request])
    assert meter.passes == [LENGTH, *[1] * 19]
    meter.passes.clear()
    [warm] = Engine(model).generate([request])
    assert meter.passes == [1] * 20
    assert warm.token_ids == cold.token_ids == plain_greedy("llama", tuple(request.prompt), 20)


def test_a_chat_turn_goes_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model, history = paged_model("llama"), text(50)
    drafter = ModelDrafter(paged_model("llama"), target_vocab_size=V)
    meter = Meter(model, monkeypatch)
    for turn in range(3):
        request = Request(history, SAMPLED, 20, gamma=4, seed=turn)
        meter.passes.clear()
        [warm] = Engine(model, drafter).generate([request])
        # The last token of the last turn was never fed; 7 are the user's new ones.
        assert meter.passes[0] == (50 if turn == 0 else 1 + 7) + 4
        [cold] = Engine(
            served("llama"), ModelDrafter(served("llama"), target_vocab_size=V)
        ).generate([request])
        assert warm.token_ids == cold.token_ids
        history = [*history, *warm.token_ids, *text(7, seed=turn + 1)]


def test_samples_of_one_prompt_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged_model("llama")
    meter = Meter(model, monkeypatch)
    requests = [Request(text(LENGTH), SAMPLED, 12, gamma=0, seed=seed) for seed in range(4)]
    results = Engine(model).generate(requests)
    assert meter.tokens == (LENGTH + 11) + 3 * 12
    assert len({tuple(result.token_ids) for result in results}) == 4
    for request, result in zip(requests, results, strict=True):
        [alone] = Engine(served("llama")).generate([request])
        assert result.token_ids == alone.token_ids
    model.pool.check_integrity()


def test_a_shared_beginning_is_read_once_also_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shared = paged_model("mistral"), text(150)
    meter = Meter(model, monkeypatch)
    requests = [Request([*shared, *text(10, seed=i)], SAMPLED, 8, seed=i) for i in range(3)]
    results = Engine(model, prefill_chunk=40).generate(requests)
    decoding = sum(len(result.token_ids) - 1 for result in results)
    assert meter.tokens - decoding <= 150 + 3 * 10 + 2 * 32
    for request, result in zip(requests, results, strict=True):
        [alone] = Engine(served("mistral")).generate([request])
        assert result.token_ids == alone.token_ids


# --- The whole loop ---


@cache
def plain_greedy(family: str, prompt: tuple[int, ...], num_new: int) -> list[int]:
    """Tokens that are each the argmax of a plain forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(num_new):
        ids.append(int(logits_of(plain(family), ids)[-1].argmax()))
    return ids[len(prompt) :]


NUM_NEW = 56
PROMPT = tuple(text(11, seed=20))
REPEATING = tuple(text(3, seed=21) * 6)


def drafter_of(kind: str) -> Drafter:
    if kind == "lookup":
        return LookupDrafter()
    return ModelDrafter(near() if kind == "near" else served("llama"), target_vocab_size=V)


@pytest.mark.parametrize("drafting", ["near", "itself", "lookup"])
def test_greedy_text_is_plain_greedy_text_for_every_gamma(drafting: str) -> None:
    """The texts cross two borders of blocks."""
    prompt, gammas = REPEATING if drafting == "lookup" else PROMPT, (0, 1, 2, 5, 20, 64)
    requests = [Request(prompt, max_new_tokens=NUM_NEW, gamma=gamma) for gamma in gammas]
    results = Engine(served("llama"), drafter_of(drafting)).generate(requests)
    texts = {gamma: r.token_ids for gamma, r in zip(gammas, results, strict=True)}
    assert texts == dict.fromkeys(gammas, plain_greedy("llama", prompt, NUM_NEW))
    drafted = [result.stats.drafted for result in results]
    assert drafted[0] == 0 < min(drafted[1:])


@pytest.mark.parametrize("family", ["mistral", "gpt2", "gemma3", "falcon"])
def test_greedy_text_with_prompt_lookup_is_plain_greedy_text(family: str) -> None:
    for gamma in (3, 40):
        request = Request(REPEATING, max_new_tokens=40, gamma=gamma)
        [result] = Engine(served(family), LookupDrafter()).generate([request])
        assert result.token_ids == plain_greedy(family, REPEATING, 40)


@pytest.mark.parametrize("drafting", ["near", "itself", "lookup"])
def test_coupled_text_is_that_of_plain_decoding_for_every_gamma(drafting: str) -> None:
    request = Request(REPEATING, SAMPLED, NUM_NEW, gamma=0, rule="coupled", seed=3)
    [wanted] = Engine(served("llama")).generate([request])
    gammas = (1, 2, 5, 20) if drafting == "near" else (1, 2, 5, 20, 64)
    requests = [replace(request, gamma=gamma) for gamma in gammas]
    for result in Engine(served("llama"), drafter_of(drafting)).generate(requests):
        assert result.token_ids == wanted.token_ids


def test_the_drafters_of_these_tests_are_neither_always_right_nor_always_wrong() -> None:
    """Otherwise the identities above would not cover acceptance and rejection."""
    for drafting in ("near", "lookup"):
        request = Request(REPEATING, max_new_tokens=NUM_NEW)
        [result] = Engine(served("llama"), drafter_of(drafting)).generate([request])
        assert 0 < result.stats.accepted < result.stats.examined
    [result] = Engine(served("llama"), drafter_of("itself")).generate([request])
    assert result.stats.alpha_hat == 1.0


def test_mixed_requests_side_by_side_give_what_each_gives_alone() -> None:
    target, drafter = served("llama"), drafter_of("near")
    policies = (SamplingPolicy(), SAMPLED, SamplingPolicy(temperature=0.8, top_p=0.9))
    rules = ("block", "rejection", "coupled")
    requests = [
        Request(
            text(5 + 13 * i, seed=i), policies[i % 3], 8 + 5 * i, gamma=i, rule=rules[i % 3], seed=i
        )
        for i in range(6)
    ]
    alone = [Engine(target, drafter).generate([request])[0] for request in requests]
    for max_batch, chunk in ((6, 256), (4, 30)):
        engine = Engine(target, drafter, max_batch=max_batch, prefill_chunk=chunk)
        together = engine.generate(requests)
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
        assert [r.trace for r in together] == [r.trace for r in alone]


@pytest.mark.parametrize(
    ("target", "drafting"), [("torch", "openvino"), ("openvino", "torch"), ("openvino", "openvino")]
)
def test_target_and_drafter_may_run_on_different_engines(target: str, drafting: str) -> None:
    model = on_torch("llama") if target == "torch" else served("llama")
    drafter = on_torch("near") if drafting == "torch" else near()
    for gamma in (1, 5):
        request = Request(PROMPT, max_new_tokens=40, gamma=gamma)
        [result] = Engine(model, ModelDrafter(drafter, target_vocab_size=V)).generate([request])
        assert result.token_ids == plain_greedy("llama", PROMPT, NUM_NEW)[:40]
        assert result.stats.accepted > 0


def test_sampled_text_with_a_seed_is_that_of_the_torch_engine() -> None:
    request = Request(PROMPT, SAMPLED, 40, gamma=4, rule="block", seed=5)
    results = [
        Engine(model, ModelDrafter(drafting, target_vocab_size=V)).generate([request])[0]
        for model, drafting in ((served("llama"), near()), (on_torch("llama"), on_torch("near")))
    ]
    assert results[0].trace == results[1].trace


@pytest.mark.parametrize("limit", [1, 21, 22, 53, 54, 65])
def test_exactly_the_asked_number_of_tokens_is_returned_at_the_borders_of_blocks(
    limit: int,
) -> None:
    """The prompt has 11 tokens, so that 21 and 53 more fill blocks."""
    requests = [Request(PROMPT, max_new_tokens=limit, gamma=gamma) for gamma in (0, 4, 64)]
    for result in Engine(served("llama"), drafter_of("itself")).generate(requests):
        assert result.token_ids == plain_greedy("llama", PROMPT, 65)[:limit]
        assert result.finish_reason == "length"


@pytest.mark.parametrize("context", [32, 33])
def test_a_text_fills_the_context_and_no_more(
    context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = served("llama")
    monkeypatch.setattr(target, "context_length", context)
    requests = [Request(PROMPT, max_new_tokens=500, gamma=gamma) for gamma in (0, 3, 30)]
    for result in Engine(target, drafter_of("near")).generate(requests):
        assert result.token_ids == plain_greedy("llama", PROMPT, NUM_NEW)[: context - 11]
        assert result.finish_reason == "length"


def test_decoding_goes_on_without_drafts_where_the_drafters_context_ends() -> None:
    short = paged_model("llama", context_length=33)
    request = Request(PROMPT, max_new_tokens=40, gamma=5)
    [result] = Engine(served("llama"), ModelDrafter(short, target_vocab_size=V)).generate([request])
    assert result.token_ids == plain_greedy("llama", PROMPT, NUM_NEW)[:40]
    assert 0 < result.stats.drafted < 33


def test_decoding_goes_on_with_fewer_drafts_where_the_drafters_memory_ends() -> None:
    tiny = ModelDrafter(paged_model("llama", num_blocks=2), target_vocab_size=V)
    requests = [Request(text(11 + i, seed=20), max_new_tokens=60, gamma=5) for i in range(2)]
    results = Engine(served("llama"), tiny).generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == plain_greedy("llama", tuple(request.prompt), 60)
        assert 0 < result.stats.drafted < 60
    tiny.model.pool.check_integrity()  # type: ignore[attr-defined]
    assert not tiny.model.pool._live  # type: ignore[attr-defined]


def test_the_text_ends_at_an_end_token_wherever_it_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = served("llama"), drafter_of("itself")
    free = plain_greedy("llama", PROMPT, NUM_NEW)
    for index in [*range(7), 21]:
        first = free.index(free[index])
        monkeypatch.setattr(target, "eos_ids", frozenset({free[index]}))
        requests = [Request(PROMPT, max_new_tokens=32, gamma=gamma) for gamma in (0, 5, 31)]
        for result in Engine(target, drafter).generate(requests):
            assert result.token_ids == free[: first + 1]
            assert result.finish_reason == "eos"
        request = replace(requests[1], ignore_eos=True)
        assert Engine(target, drafter).generate([request])[0].token_ids == free[:32]


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_a_request_that_was_cancelled_at_any_stage_changes_nothing_for_the_next(
    num_steps: int,
) -> None:
    """At 25 tokens a round the prompt of 60 is read in three; then the drafts come."""
    model, prompt = paged_model("llama"), text(60, seed=3)
    drafting = paged_model("llama")
    engine = Engine(model, ModelDrafter(drafting, target_vocab_size=V), prefill_chunk=25)
    number = engine.add(Request(prompt, SAMPLED, 30, gamma=4, seed=8))
    for _ in range(num_steps):
        engine.step()
    cancelled = engine.cancel(number)
    assert (cancelled is None) == (num_steps == 0)
    assert not engine.has_work
    assert not model.pool._live
    assert not drafting.pool._live
    model.pool.check_integrity()
    [again] = engine.generate([Request(prompt, max_new_tokens=20, gamma=4)])
    assert again.token_ids == plain_greedy("llama", tuple(prompt), 20)
    sequence = model.start(Prompt(prompt))
    rest = prompt[sequence.length :]
    assert_close(model.score([Feed(sequence, rest, 1)]), logits_of(plain("llama"), prompt)[-1:])


def test_one_engine_serves_one_request_after_another_without_a_trace() -> None:
    model = paged_model("mistral", num_blocks=12)
    engine = Engine(model, LookupDrafter(), prefill_chunk=50)

    def run(request: Request, on: Engine) -> Result:
        return on.generate([request])[0]

    for i in range(8):
        shared = text(20 + 10 * (i % 4), seed=i % 2)
        request = Request([*shared, *text(5, seed=i)], SAMPLED, 30, gamma=i % 7, seed=i)
        fresh = Engine(served("mistral"), LookupDrafter())
        served("mistral").pool.clear()
        assert run(request, engine).trace == run(request, fresh).trace
        model.pool.check_integrity()
