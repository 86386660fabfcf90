"""What models are here: the default target, imported files, toys."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.models.cache import cache_folder, read_manifest
from outrider.models.checkpoints import DEFAULT_HUB_ID, default_gguf

__all__ = ["ModelEntry", "available_models"]


@dataclass(frozen=True)
class ModelEntry:
    """One model that can be named on the command line.

    Attributes:
        reference: what to pass as --target or --drafter.
        kind: architecture, or "toy".
        where: the file or folder; a hub id if it is not here.
        state: "ready" (starts at once), "here" (is read when first used) or "on the hub".
        can: what it can do: "chat" with a chat format, "text" without.
        context_length: most tokens, None where that is not known without reading the model.
        size_bytes: of its files.
    """

    reference: str
    kind: str
    where: str
    state: str
    can: str
    context_length: int | None = None
    size_bytes: int | None = None

    def as_dict(self) -> dict[str, str | int | None]:
        """Ready for JSON."""
        return asdict(self)


def available_models() -> list[ModelEntry]:
    """The default target, then every imported file, then the toys."""
    imported = [_imported_entry(folder) for folder in sorted(cache_folder().glob("models/*-*"))]
    ready = [entry for entry in imported if entry is not None]
    file = default_gguf()
    if file is None:
        default = ModelEntry("default", "llama", DEFAULT_HUB_ID, "on the hub", "chat", 8192)
    else:
        is_ready = any(Path(entry.reference).name.startswith(file.stem) for entry in ready)
        state = "ready" if is_ready else "here"
        size = file.stat().st_size
        default = ModelEntry("default", "llama", str(file), state, "chat", 8192, size)
    toys = [
        ModelEntry(f"toy:{name}", "toy", "built in", "ready", "chat", 4096)
        for name in ("target", "near", "far")
    ]
    return [default, *ready, *toys]


def _imported_entry(folder: Path) -> ModelEntry | None:
    try:
        config = json.loads((folder / "config.json").read_text())
        note = read_manifest(folder)
        sizes, source = note["sizes"], note["source"]
        assert isinstance(sizes, dict)
    except (OSError, ValueError, KeyError, AssertionError):
        return None
    tokenizer = folder / "tokenizer_config.json"
    chats = (folder / "chat_template.jinja").is_file() or (
        tokenizer.is_file() and "chat_template" in tokenizer.read_text()
    )
    return ModelEntry(
        str(folder),
        config.get("model_type", "unknown"),
        f"imported from {source}",
        "ready",
        "chat" if chats else "text",
        config.get("max_position_embeddings"),
        sum(sizes.values()),
    )
