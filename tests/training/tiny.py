"""A target small enough to be distilled in a test; run as a script, a run that is killed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.causal import CausalModel
from outrider.models.toy import ByteTokenizer
from outrider.training import shards
from outrider.training.distillation import Plan, Progress, distil
from outrider.training.learning import Evaluation, Recipe
from outrider.training.shards import shards_in
from outrider.training.student import StudentShape

V = 257
PLAN = Plan(
    tokens=900,
    shape=StudentShape(1, 64),
    vocab_size=200,
    recipe=Recipe(loss="kl", rate=1e-2, epochs=6.0, batch_tokens=256),
    rows=5,
    passes=60,
)


def module() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ByteTokenizer.end_id,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def target() -> CausalModel:
    return CausalModel(
        module(),
        name="tiny",
        tokenizer=ByteTokenizer(),
        eos_ids=frozenset({ByteTokenizer.end_id}),
    )


def run(folder: Path, plan: Plan = PLAN, *, killed_after: int = 0) -> Evaluation:
    """A run; with `killed_after`, one that kills its own process at that call of `tell`."""
    calls = 0

    def tell(progress: Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    return distil(target(), module, folder, plan, tell)


def kill_in_write(number: int) -> None:
    """Have this process kill itself half way through writing that shard."""
    save, calls = shards.save_file, 0

    def save_half(tensors: object, file: Path) -> None:
        nonlocal calls
        calls += 1
        save(tensors, file)  # type: ignore[arg-type]
        if calls == number:
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    shards.save_file = save_half  # type: ignore[assignment]


def apart(folder: Path, *, killed_after: int = 0, killed_in_write: int = 0) -> int:
    """A run in a process of its own, whose number of threads is always the same; its exit code."""
    script = Path(__file__)
    path = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), str(folder), str(killed_after), str(killed_in_write)]
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path}).returncode


def digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in shards_in(folder / "making")
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_in_write(int(sys.argv[3]))
    run(Path(sys.argv[1]), killed_after=int(sys.argv[2]))
