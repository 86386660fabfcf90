"""A checkpoint in one byte a weight, to be shipped; unfolded into an ordinary one when it is used.

Every matrix [rows, columns] is kept as int8 with one scale a row, w = q * scale; what is small
stays as it is. Whoever reads a compact folder gets the folder of an ordinary checkpoint, made once
and kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import UnsupportedModel
from outrider.models.cache import fingerprint, kept_folder

__all__ = ["fold", "is_compact", "unfolded"]

_FILE = "weights.int8.safetensors"
_ORDINARY = "model.safetensors"
_FORMAT = "compact 1"


def fold(folder: Path, out: Path) -> None:
    """Write the compact form of an ordinary checkpoint folder.

    Args:
        folder: with a single model.safetensors.
        out: gets the weights and copies of all other files, but no folders.
    """
    folded: dict[str, Tensor] = {}
    for name, weight in load_file(folder / _ORDINARY).items():
        if weight.dim() != 2:
            folded[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        folded[name] = (weight.float() / scale).round().to(torch.int8)
        folded[f"{name}.scale"] = scale.to(torch.float32)
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.name != _ORDINARY:
            shutil.copyfile(file, out / file.name)
    save_file(folded, out / _FILE)
    (out / _FILE).chmod(0o644)  # safetensors writes for the owner alone


def is_compact(folder: Path) -> bool:
    """Whether a folder's weights are in this form."""
    return (folder / _FILE).is_file() and not (folder / _ORDINARY).is_file()


def unfolded(folder: Path, notify: Callable[[str], None]) -> Path:
    """The ordinary checkpoint that a compact one stands for, kept from the first use on.

    Raises:
        UnsupportedModel: the weights cannot be read.
    """

    def make(ordinary: Path) -> dict[str, object]:
        try:
            folded = load_file(folder / _FILE)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{folder / _FILE} cannot be read: {error}") from error
        weights = {
            name: weight.float() * folded[f"{name}.scale"] if weight.dtype == torch.int8 else weight
            for name, weight in folded.items()
            if not name.endswith(".scale")
        }
        save_file(weights, ordinary / _ORDINARY, metadata={"format": "pt"})
        for file in folder.iterdir():
            if file.is_file() and file.name != _FILE:
                shutil.copyfile(file, ordinary / file.name)
        return {"source": folder.name}

    files = sorted(file for file in folder.iterdir() if file.is_file())
    key = fingerprint(files, _FORMAT)
    return kept_folder(
        "models",
        f"{folder.name}-{key}",
        make,
        notify=lambda: notify(f"unpacking {folder.name}; later starts are quick"),
    )
