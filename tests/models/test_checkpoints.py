"""Model references and what lies behind them: folders, `.gguf` files, tokenizers, vocabularies."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers as hf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from outrider.decoding import Engine
from outrider.drafters import make_drafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import (
    ModelNotFound,
    OutriderError,
    UnsupportedModel,
    UsageError,
    VocabularyMismatch,
)
from outrider.models import Feed, Model, Prompt, check_same_tokenizer, checkpoints, load_model
from outrider.models.cache import cache_folder, clear_cache
from outrider.models.catalog import available_models
from outrider.models.checkpoints import find_checkpoint
from outrider.pair import Pair
from outrider.requests import Request, Result
from outrider.sampling import SamplingPolicy

WORDS = "the quick brown fox jumps over the lazy dog, again and again; that is the end of it"
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}the dog{% endif %}"
)
V = 100  # tokens of the tokenizer
END_ID = 0
PROMPT = list(range(40, 60))


def byte_level(*, swapped: tuple[int, int] | None = None) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of V tokens; with `swapped`, two ids have changed places."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=V,
        special_tokens=[END],
        initial_alphabet=[chr(c) for c in range(33, 80)],
        show_progress=False,
    )
    built.train_from_iterator([WORDS] * 3, trainer)
    assert built.get_vocab_size() == V
    if swapped is None:
        return built
    facts = json.loads(built.to_str())
    known = facts["model"]["vocab"]
    first, second = (next(s for s, i in known.items() if i == token) for token in swapped)
    known[first], known[second] = known[second], known[first]
    return tokenizers.Tokenizer.from_str(json.dumps(facts))


def load_vocabulary(tokenizer: tokenizers.Tokenizer) -> list[str]:
    known = tokenizer.get_vocab()
    return sorted(known, key=known.__getitem__)


def llama(*, vocab_size: int = V, seed: int = 0, **words: object) -> hf.LlamaForCausalLM:
    """A tiny model whose weights are large enough for a varied text."""
    config = hf.LlamaConfig(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | words
    )
    torch.manual_seed(seed)
    module = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    return module


def save(
    folder: Path,
    module: hf.PreTrainedModel,
    tokenizer: tokenizers.Tokenizer | None = None,
    *,
    chat_template: str | None = None,
    eos_token: str | None = END,
) -> str:
    """A model folder as transformers writes it; returns its reference."""
    module.save_pretrained(folder)
    if tokenizer is not None:
        wrapped = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token)
        wrapped.chat_template = chat_template
        wrapped.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A whole model folder with a tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return save(folder, llama(), byte_level(), chat_template=TEMPLATE)


@pytest.fixture
def own_folder(reference: str, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(reference, tmp_path / "damaged"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for imported models."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def load(reference: str | Path, **options: str) -> Model:
    """Through torch: what is read is the same for every engine."""
    settings = {"engine": "torch", "dtype": "float32", "device": "cpu"} | options
    return load_model(str(reference), **settings)


def logits_of(model: Model, ids: list[int]) -> torch.Tensor:
    return model.score([Feed(model.start(Prompt(ids)), ids, len(ids))])


def greedy(
    target: Model, drafter: Model | None = None, *, prompt: list[int] | None = None, gamma: int = 5
) -> Result:
    """22 greedy tokens, drafted by a model if there is one."""
    proposer = drafter and ModelDrafter(drafter, target_vocab_size=target.vocab_size)
    request = Request(prompt or PROMPT, max_new_tokens=22, gamma=gamma, ignore_eos=True)
    return Engine(target, proposer).generate([request])[0]


def assert_one_line(error: BaseException, *parts: str) -> None:
    message = str(error)
    assert message.strip()
    assert "\n" not in message
    for part in parts:
        assert part in message


# --- Folders ---


def test_a_folder_gives_the_model_that_was_saved_there(reference: str) -> None:
    ids = list(range(20))
    wanted = llama()(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(load(reference), ids), wanted, atol=1e-5, rtol=1e-5)


def test_a_folder_says_what_it_is(reference: str) -> None:
    model = load(reference)
    assert (model.name, model.engine, model.dtype) == (reference, "torch", "float32")
    assert (model.vocab_size, model.context_length) == (V, 256)


def test_a_folders_tokenizer_turns_text_into_ids_and_back(reference: str) -> None:
    tokenizer = load(reference).tokenizer
    text = "the lazy fox jumps  again; over AND"
    assert tokenizer.encode(text) == byte_level().encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_leaves_special_tokens_out_and_spaces_as_they_are(reference: str) -> None:
    tokenizer = load(reference).tokenizer
    dog = tokenizer.encode(" , the dog .")
    assert tokenizer.decode([END_ID, *dog, END_ID]) == " , the dog ."


def test_the_vocabulary_lists_the_string_of_every_id(reference: str) -> None:
    vocabulary = load(reference).tokenizer.vocabulary()
    assert {string: i for i, string in enumerate(vocabulary)} == byte_level().get_vocab()


def test_an_id_that_only_pads_the_vocabulary_decodes_to_nothing(tmp_path: Path) -> None:
    model = load(save(tmp_path, llama(vocab_size=V + 12), byte_level()))
    assert model.tokenizer.decode([V + 3, *model.tokenizer.encode("dog"), V + 11]) == "dog"


def test_a_folder_without_a_tokenizer_serves_ids(tmp_path: Path) -> None:
    model = load(save(tmp_path, llama()))
    assert model.tokenizer is None
    assert greedy(model).text == ""
    assert len(greedy(model).token_ids) == 22


def test_text_goes_in_and_comes_out_through_the_folders_tokenizer(reference: str) -> None:
    model = load(reference)
    result = Pair(model).generate("the quick fox", raw=True, max_new_tokens=20)
    assert result.prompt_ids == model.tokenizer.encode("the quick fox")
    assert result.text == model.tokenizer.decode(result.token_ids)


def test_a_chat_goes_through_the_folders_template(reference: str) -> None:
    tokenizer = load(reference).tokenizer
    messages = [{"role": "user", "content": "jump"}, {"role": "dog", "content": "again"}]
    assert tokenizer.has_chat_template
    assert tokenizer.encode_chat(messages) == tokenizer.encode("user jump;dog again;the dog")


def test_a_folder_without_a_template_says_so(tmp_path: Path) -> None:
    assert not load(save(tmp_path, llama(), byte_level())).tokenizer.has_chat_template


def test_the_opening_token_comes_once_in_text_and_never_twice_in_a_chat(tmp_path: Path) -> None:
    opening = byte_level()
    opening.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, END_ID)]
    )
    template = END + "{{ messages[0]['content'] }}"
    tokenizer = load(save(tmp_path, llama(), opening, chat_template=template)).tokenizer
    words = byte_level().encode("the dog").ids
    assert tokenizer.encode("the dog") == [END_ID, *words]
    assert tokenizer.encode("the dog", special=False) == words
    assert tokenizer.encode_chat([{"role": "user", "content": "the dog"}]) == [END_ID, *words]


def test_a_template_that_refuses_a_conversation_is_a_usage_error(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    model = load(save(tmp_path, llama(), byte_level(), chat_template=template))
    with pytest.raises(UsageError) as caught:
        model.tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert_one_line(caught.value, "roles must alternate")


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([3, 5], 9, END, {3, 5}),
        (7, 9, END, {7}),
        (None, 9, END, {9}),
        (None, [9, 4], END, {9, 4}),
        (None, None, END, {0}),
        (None, None, None, set()),
        (0, None, None, {0}),
    ],
)
def test_end_ids_come_from_generation_settings_then_configuration_then_tokenizer(
    tmp_path: Path,
    generation: int | list[int] | None,
    config: int | list[int] | None,
    tokenizer: str | None,
    expected: set[int],
) -> None:
    module = llama()
    module.config.eos_token_id = config
    folder = save(tmp_path, module, byte_level(), eos_token=tokenizer)
    if generation is None:
        (tmp_path / "generation_config.json").unlink()
    else:
        settings = json.dumps({"eos_token_id": generation})
        (tmp_path / "generation_config.json").write_text(settings)
    assert load(folder).eos_ids == expected


@pytest.mark.parametrize("place", [0, 3, 11])
def test_every_end_id_of_a_list_ends_the_text(tmp_path: Path, place: int) -> None:
    folder = save(tmp_path, llama(), byte_level())
    ids = greedy(load(folder)).token_ids
    unused = next(i for i in range(V) if i not in ids)
    settings = json.dumps({"eos_token_id": [unused, ids[place]]})
    (tmp_path / "generation_config.json").write_text(settings)
    model = load(folder)
    drafter = ModelDrafter(model, target_vocab_size=V)
    [result] = Engine(model, drafter).generate([Request(PROMPT, max_new_tokens=30)])
    assert result.finish_reason == "eos"
    assert result.token_ids == ids[: ids.index(ids[place]) + 1]


def test_bfloat16_is_close_to_float32_and_comes_back_in_float32(reference: str) -> None:
    model = load(reference, dtype="bfloat16")
    assert model.dtype == "bfloat16"
    found = logits_of(model, PROMPT)
    wanted = logits_of(load(reference), PROMPT)
    assert found.dtype == torch.float32
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_bfloat16_decodes_with_and_without_drafts(reference: str, gamma: int) -> None:
    model = load(reference, dtype="bfloat16")
    result = greedy(model, model, gamma=gamma)
    assert len(result.token_ids) == 22
    assert result.stats.dtype == "bfloat16"


def test_bfloat16_keeps_its_cache_in_bfloat16(reference: str) -> None:
    model = load(reference, dtype="bfloat16")
    sequence = model.start(Prompt(PROMPT))
    model.score([Feed(sequence, PROMPT, 1)])
    assert {buffer.dtype for pair in sequence._layers.values() for buffer in pair} == {
        torch.bfloat16
    }


# --- References that lead nowhere ---


def text_file(folder: Path) -> str:
    (folder / "notes.txt").write_text("not a model")
    return str(folder / "notes.txt")


def empty_file(folder: Path) -> str:
    (folder / "empty.gguf").touch()
    return str(folder / "empty.gguf")


def folder_without_configuration(folder: Path) -> str:
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize(
    "make",
    [
        text_file,
        empty_file,
        folder_without_configuration,
        lambda folder: str(folder / "missing"),
        lambda folder: str(folder / "missing.gguf"),
        lambda folder: "missing.gguf",
        lambda folder: "./missing",
        lambda folder: "~/no such folder of mine",
        lambda folder: "three/part/name",
        lambda folder: "   ",
        lambda folder: "toy:nonsense",
    ],
)
def test_a_reference_that_leads_nowhere_is_one_line_that_names_it(
    make: Callable[[Path], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = make(tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        load_model(wrong)
    assert_one_line(caught.value, wrong.removeprefix("toy:"))
    assert capfd.readouterr() == ("", "")


def test_an_empty_reference_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        load("")
    assert_one_line(caught.value)


def test_an_empty_reference_is_not_the_working_directory(
    reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reference)
    with pytest.raises(ModelNotFound):
        load("")


@pytest.mark.parametrize("wrong", ["m" * 300, "~nobody-here/model"], ids=["too long", "no home"])
def test_a_reference_that_the_file_system_refuses_is_one_line(wrong: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        load(wrong)
    assert_one_line(caught.value, wrong)


def test_an_unreachable_hub_id_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound) as caught:
        load("nobody-at-all/no-such-model")
    assert_one_line(caught.value, "'nobody-at-all/no-such-model'", ".gguf")
    assert capfd.readouterr() == ("", "")


def spoil_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def name_an_unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "nobody_built_this"}')


def remove_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_the_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])


def spoil_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def declare_another_width(folder: Path) -> None:
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"intermediate_size": 40}))


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [
        spoil_configuration,
        name_an_unknown_architecture,
        remove_the_weights,
        cut_the_weights,
        spoil_the_tokenizer,
        declare_another_width,
        drop_a_weight,
    ],
)
def test_a_damaged_folder_is_refused_in_one_line_that_names_it(
    damage: Callable[[Path], None], own_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(own_folder)
    with pytest.raises(UnsupportedModel) as caught:
        load(own_folder)
    assert_one_line(caught.value, str(own_folder))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["t5", "mamba", "jamba"])
def test_an_unsupported_architecture_is_refused_before_its_weights_are_read(
    kind: str, tmp_path: Path
) -> None:
    hf.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load(tmp_path)
    assert_one_line(caught.value, str(tmp_path), kind)


def test_reading_a_model_leaves_transformers_settings_as_they_were(reference: str) -> None:
    def settings() -> tuple[int, bool]:
        logger = logging.getLogger("transformers")
        return logger.level, hf.utils.logging.is_progress_bar_enabled()

    before = settings()
    load(reference)
    with pytest.raises(OutriderError):
        load(Path(reference) / "config.json")
    assert settings() == before


# --- .gguf files ---

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, module: hf.LlamaForCausalLM) -> Path:
    """The module and the tokenizer of this file, as llama.cpp's converter would write them."""
    config, tokenizer = module.config, json.loads(byte_level().to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    strings = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(strings)
    writer.add_token_types([kinds[string != END] for string in strings])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_eos_token_id(END_ID)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in module.state_dict().items():
        *_, kind = name.removesuffix(".weight").split(".")
        layer, short = "", name.removesuffix(".weight")
        if short.startswith("model.layers."):
            _, _, number, short = short.split(".", 3)
            layer = f"blk.{number}."
        rows = weight.float().numpy()
        if kind in heads:  # the two halves of a head interleaved
            halves = rows.reshape(heads[kind], 2, -1, rows.shape[1])
            rows = halves.swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(f"{layer}{GGUF_NAMES[short]}.weight", np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny `.gguf` file with the weights of `llama()`; not to be changed."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama())


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files imported during the test."""
    done: list[str] = []
    really = checkpoints._import_gguf

    def counted(file: Path, folder: Path, dtype: torch.dtype) -> dict[str, object]:
        done.append(file.name)
        return really(file, folder, dtype)

    monkeypatch.setattr(checkpoints, "_import_gguf", counted)
    return done


def test_a_gguf_file_gives_its_model_its_tokenizer_and_its_end_id(
    gguf_file: Path, cache: Path
) -> None:
    model = load(gguf_file)
    wanted = llama()(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(model, PROMPT), wanted, atol=1e-5, rtol=1e-5)
    assert model.tokenizer.encode("the lazy dog") == byte_level().encode("the lazy dog").ids
    assert model.tokenizer.vocabulary()[:V] == load_vocabulary(byte_level())
    assert model.eos_ids == {END_ID}
    assert model.context_length == 256


def test_a_gguf_file_is_imported_once_and_the_import_is_announced_once(
    gguf_file: Path, cache: Path, imports: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    load(gguf_file)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["reading tiny.gguf for the first time; later starts are quick"]
    load(gguf_file)
    assert capfd.readouterr() == ("", "")
    assert imports == ["tiny.gguf"]
    assert len(list(cache.iterdir())) == 1


def test_a_gguf_file_is_known_by_its_content_and_not_by_its_ending(
    gguf_file: Path, cache: Path, tmp_path: Path
) -> None:
    renamed = shutil.copy(gguf_file, tmp_path / "a model")
    assert load(renamed).vocab_size == V


def test_a_link_to_a_gguf_file_works_like_the_file(
    gguf_file: Path, cache: Path, tmp_path: Path
) -> None:
    """The hub's own cache consists of such links."""
    blob = Path(shutil.copy(gguf_file, tmp_path / "0123456789abcdef"))
    link = tmp_path / "snapshots" / "tiny.gguf"
    link.parent.mkdir()
    link.symlink_to(blob)
    assert load(link).vocab_size == V


def test_a_cache_that_cannot_be_written_is_one_line(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutriderError) as caught:
        load(gguf_file)
    assert_one_line(caught.value, str(tmp_path / "file" / "cache"))


def test_a_full_disk_is_told_from_a_file_that_cannot_be_read(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(UsageError, match="No space left on device") as caught:
        load(gguf_file)
    assert_one_line(caught.value, str(cache), "has room")
    assert not any(cache.iterdir())


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", cut),
        ("model.safetensors", Path.unlink),
        ("tokenizer.json", cut),
        ("config.json", Path.unlink),
        ("outrider.json", cut),
        ("outrider.json", Path.unlink),
    ],
)
def test_a_damaged_import_is_made_again(
    name: str,
    damage: Callable[[Path], None],
    gguf_file: Path,
    cache: Path,
    imports: list[str],
) -> None:
    before = logits_of(load(gguf_file), PROMPT)
    [folder] = cache.iterdir()
    damage(folder / name)
    assert torch.equal(logits_of(load(gguf_file), PROMPT), before)
    assert len(imports) == 2
    assert list(cache.iterdir()) == [folder]


def test_each_dtype_has_an_import_of_its_own(
    gguf_file: Path, cache: Path, imports: list[str]
) -> None:
    models = [load(gguf_file, dtype=dtype) for dtype in ("float32", "bfloat16")]
    assert [model.dtype for model in models] == ["float32", "bfloat16"]
    assert len(imports) == 2
    stored = {
        weight.dtype
        for folder in cache.iterdir()
        for weight in load_file(folder / "model.safetensors").values()
    }
    assert stored == {torch.float32, torch.bfloat16}


def test_a_file_with_other_weights_under_the_same_name_is_imported_anew(
    gguf_file: Path, cache: Path, imports: list[str], tmp_path: Path
) -> None:
    changing = Path(shutil.copy(gguf_file, tmp_path / "tiny.gguf"))
    before = logits_of(load(changing), PROMPT)
    changing.unlink()
    write_gguf(changing, llama(seed=5))
    assert changing.stat().st_size == gguf_file.stat().st_size
    after = logits_of(load(changing), PROMPT)
    assert len(imports) == 2
    assert not torch.allclose(before, after)


def test_an_import_that_breaks_off_leaves_nothing_behind(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.AutoTokenizer, "from_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(gguf_file)
    assert list(cache.iterdir()) == []
    assert load(gguf_file).vocab_size == V


def magic_only(whole: bytes) -> bytes:
    return whole[:4]


def cut_in_the_header(whole: bytes) -> bytes:
    return whole[:200]


def cut_in_the_weights(whole: bytes) -> bytes:
    return whole[:-2000]


@pytest.mark.parametrize("damage", [magic_only, cut_in_the_header, cut_in_the_weights])
def test_a_damaged_gguf_file_is_refused_in_one_line_and_leaves_nothing_behind(
    damage: Callable[[bytes], bytes],
    gguf_file: Path,
    cache: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(damage(gguf_file.read_bytes()))
    with pytest.raises(UnsupportedModel) as caught:
        load(broken)
    assert_one_line(caught.value, str(broken))
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1  # that reading began
    assert list(cache.iterdir()) == []


def test_the_notice_of_an_import_goes_where_the_caller_wants_it(
    gguf_file: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    find_checkpoint(str(gguf_file), torch.float32, notify=told.append)
    assert len(told) == 1
    assert capfd.readouterr() == ("", "")


def test_imports_can_be_listed_and_cleared(gguf_file: Path, cache: Path) -> None:
    load(gguf_file)
    [folder] = cache.iterdir()
    [entry] = [entry for entry in available_models() if entry.reference == str(folder)]
    assert (entry.kind, entry.state, entry.can) == ("llama", "ready", "text")
    assert (entry.context_length, entry.where) == (256, "imported from tiny.gguf")
    names = ("outrider.json",)
    files = [item for item in folder.iterdir() if item.name not in names]
    assert entry.size_bytes == sum(item.stat().st_size for item in files)
    size = sum(item.stat().st_size for item in folder.iterdir())
    assert clear_cache() == size
    assert not cache.exists()
    assert clear_cache() == 0
    assert str(folder) not in [entry.reference for entry in available_models()]


def test_an_import_is_a_model_folder_like_any_other(gguf_file: Path, cache: Path) -> None:
    ids = greedy(load(gguf_file)).token_ids
    [folder] = cache.iterdir()
    assert greedy(load(folder)).token_ids == ids


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OUTRIDER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/outrider"),
        ({"HOME": "/c"}, "/c/.cache/outrider"),
        ({"OUTRIDER_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/outrider"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


# --- Two models, one vocabulary ---


def test_another_tokenizer_is_refused_with_the_first_id_that_differs(
    reference: str, tmp_path: Path
) -> None:
    target = load(reference)
    other = save(tmp_path, llama(), byte_level(swapped=(71, 83)))
    with pytest.raises(VocabularyMismatch) as caught:
        make_drafter(other, target, dtype="float32", device="cpu")
    strings = load_vocabulary(byte_level())
    assert_one_line(caught.value, "token 71", repr(strings[71]), repr(strings[83]))
    assert_one_line(caught.value, reference, str(tmp_path))


def test_the_same_tokenizer_is_accepted(reference: str, tmp_path: Path) -> None:
    other = save(tmp_path, llama(seed=3), byte_level())
    drafter = make_drafter(other, load(reference), dtype="float32", device="cpu")
    assert drafter.name == other


def test_a_token_that_only_one_of_the_two_has_does_not_matter(
    reference: str, tmp_path: Path
) -> None:
    longer = byte_level()
    longer.add_special_tokens(["<|extra|>"])
    other = load(save(tmp_path, llama(vocab_size=V + 1), longer))
    check_same_tokenizer(load(reference), other)
    check_same_tokenizer(other, load(reference))


def test_models_without_a_tokenizer_are_trusted(reference: str, tmp_path: Path) -> None:
    bare = load(save(tmp_path, llama()))
    check_same_tokenizer(load(reference), bare)
    check_same_tokenizer(bare, load(reference))


def padded(
    folder: Path, vocab_size: int, *, disturbed: bool = False, loudness: float = 1.0
) -> Model:
    """The same model with 104 or more rows of weights for the tokenizer's 100 tokens.

    Args:
        folder: where it is saved.
        vocab_size: V, 104 or more.
        disturbed: whether its weights are a little off.
        loudness: a factor on the logits of the ids from 104 on.
    """
    module, narrow = llama(vocab_size=vocab_size, seed=8), llama(vocab_size=104)
    with torch.no_grad():
        for weight, original in zip(module.parameters(), narrow.parameters(), strict=True):
            weight[: len(original)] = original
        if disturbed:
            for weight in module.parameters():
                weight += 0.15 * torch.randn_like(weight) * weight.std(correction=0)
        padding = module.lm_head.weight[104:]
        padding *= loudness
    return load(save(folder, module, byte_level()))


SIZES = pytest.mark.parametrize(
    ("target_size", "drafter_size"), [(104, 112), (104, 104), (112, 104)]
)


@SIZES
def test_padded_vocabularies_of_other_sizes_leave_greedy_text_as_it_is(
    target_size: int, drafter_size: int, tmp_path: Path
) -> None:
    target = padded(tmp_path / "target", target_size, loudness=0.0)
    drafter = padded(tmp_path / "drafter", drafter_size, disturbed=True, loudness=20.0)
    check_same_tokenizer(target, drafter)
    plain = greedy(target, gamma=0).token_ids
    proposer = ModelDrafter(drafter, target_vocab_size=target_size)
    requests = [Request(PROMPT, max_new_tokens=22, gamma=gamma) for gamma in (1, 2, 5, 20)]
    results = Engine(target, proposer).generate(requests)
    assert [result.token_ids for result in results] == [plain] * 4
    assert sum(result.stats.accepted for result in results) > 0


@SIZES
def test_padded_vocabularies_of_other_sizes_leave_coupled_text_as_it_is(
    target_size: int, drafter_size: int, tmp_path: Path
) -> None:
    target = padded(tmp_path / "target", target_size, loudness=0.0)
    drafter = padded(tmp_path / "drafter", drafter_size, disturbed=True, loudness=20.0)
    policy = SamplingPolicy(temperature=1.0, top_k=40)
    request = Request(PROMPT, policy, max_new_tokens=40, rule="coupled", seed=3)
    [plain] = Engine(target).generate([request])
    proposer = ModelDrafter(drafter, target_vocab_size=target_size)
    [drafted] = Engine(target, proposer).generate([request])
    assert drafted.token_ids == plain.token_ids
    assert 0 < drafted.stats.accepted < drafted.stats.examined


def test_a_wider_drafter_with_the_targets_weights_is_always_right(tmp_path: Path) -> None:
    """Its likeliest id is often one that the target does not have; that one is never drafted."""
    target, drafter = padded(tmp_path / "t", 104), padded(tmp_path / "d", 112, loudness=20.0)
    rows = logits_of(drafter, [*PROMPT, *greedy(target).token_ids])
    assert bool((rows.argmax(-1) >= 104).any())
    assert greedy(target, drafter).stats.alpha_hat == 1.0


@pytest.mark.parametrize("rule", ["block", "rejection", "coupled"])
def test_a_wider_drafter_with_the_targets_weights_is_always_right_when_sampling(
    rule: str, tmp_path: Path
) -> None:
    target, drafter = padded(tmp_path / "t", 104), padded(tmp_path / "d", 112, loudness=20.0)
    proposer = ModelDrafter(drafter, target_vocab_size=104)
    policy = SamplingPolicy(temperature=1.0)
    request = Request(PROMPT, policy, max_new_tokens=60, rule=rule, seed=1)
    assert Engine(target, proposer).generate([request])[0].stats.alpha_hat == 1.0


def test_a_prompt_id_that_the_drafter_lacks_only_switches_drafting_off(tmp_path: Path) -> None:
    target = padded(tmp_path / "target", 112)
    drafter = padded(tmp_path / "drafter", 104)
    prompt = [*PROMPT, 108, 7]
    result = greedy(target, drafter, prompt=prompt)
    assert result.token_ids == greedy(target, prompt=prompt, gamma=0).token_ids
    assert result.stats.drafted == 0
