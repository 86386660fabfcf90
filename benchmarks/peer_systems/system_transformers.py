"""transformers' `generate`: plain, with `assistant_model`, with `prompt_lookup_num_tokens`."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from peer_systems.serve import Job, Models, Run, Stopwatch, serve


class Watcher:
    """A streamer that only tells the stopwatch; the prompt comes first and is not counted."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._prompt_seen = False

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self._watch.tokens(ids.numel())
        self._prompt_seen = True

    def end(self) -> None:
        pass


class TransformersSystem:
    """One target for all modes, and an assistant where the mode needs it."""

    def __init__(self, models: Models) -> None:
        torch.set_num_threads(models.num_threads)
        self._models = models
        self._target: PreTrainedModel | None = None
        self._assistant: PreTrainedModel | None = None

    def open(self, mode: str) -> dict[str, str]:
        if self._target is None:
            self._target = _load(self._models.target)
        if mode == "draft-model" and self._assistant is None:
            assert self._models.drafter is not None
            self._assistant = _load(self._models.drafter)
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "attention": str(self._target.config._attn_implementation),
        }

    def run(self, job: Job) -> Run:
        assert self._target is not None
        options: dict[str, object] = {}
        if job.mode == "draft-model":
            assert self._assistant is not None
            # The length lives in the assistant's own settings, and `generate` adapts it there.
            self._assistant.generation_config = _without_end(self._assistant.generation_config)
            if job.draft_length is not None:
                self._assistant.generation_config.num_assistant_tokens = job.draft_length
                self._assistant.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = self._assistant
        elif job.mode == "lookup":
            options["prompt_lookup_num_tokens"] = job.draft_length
        if job.temperature > 0:
            options |= {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        else:
            options["do_sample"] = False
        torch.manual_seed(job.seed)
        ids = torch.tensor([job.ids])
        watch = Stopwatch()
        output = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job.num_tokens,
            streamer=Watcher(watch),
            **options,
        )
        wall_s = watch.seconds()
        return Run(output[0, len(job.ids) :].tolist(), wall_s, watch.first_s, watch.num_first)


def _load(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = _without_end(model.generation_config)
    return model


def _without_end(config: GenerationConfig) -> GenerationConfig:
    """A model's defaults reduced to its special ids, and no token that ends a text."""
    return GenerationConfig(
        bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id or 0, eos_token_id=None
    )


if __name__ == "__main__":
    serve(TransformersSystem)
