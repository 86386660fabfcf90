"""A drafter that is sure and wrong: what does speculation cost at worst?

    python benchmarks/hopeless_drafter.py FOLDER [--seed N]
    outrider bench --drafter FOLDER --drafter-dtype int8 --temperatures 0,1

The shipped drafter, reading as it does, with its ids shuffled in what it says: as dear, as sure of
itself, and right by chance alone. Adaptive lengths should notice and leave the target alone.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from outrider import load_model
from outrider.drafters.registry import shipped_drafter
from outrider.models.checkpoints import quietly
from outrider.models.compact import unfolded
from outrider.models.trimmed import read_vocabulary
from outrider.training.distillation import save_drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; name a new folder")
    shipped = shipped_drafter(load_model("default"))
    assert shipped is not None, "the default target's drafter is part of the package"
    ordinary = unfolded(shipped, logging.getLogger("outrider").info)
    vocabulary = read_vocabulary(ordinary)
    assert vocabulary is not None, shipped
    with quietly():
        model = LlamaForCausalLM.from_pretrained(ordinary)
    shuffled = torch.randperm(
        len(vocabulary.kept), generator=torch.Generator().manual_seed(arguments.seed)
    )
    embeddings = model.get_input_embeddings().weight.data  # the output's too: they are tied
    embeddings.copy_(embeddings[shuffled].clone())
    read_as = shuffled.argsort()[vocabulary.read_as]
    arguments.folder.mkdir(parents=True)
    save_drafter(model, replace(vocabulary, read_as=read_as), arguments.folder)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
