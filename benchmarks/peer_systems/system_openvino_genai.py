"""OpenVINO GenAI's `LLMPipeline`: plain, with `draft_model`, with `prompt_lookup`.

Its defaults, but for three things: it computes in float32; the cache is kept in float32 (by default
it is 8-bit; the system `openvino-genai-default-kv` leaves it so); and what an earlier run left in
the cache is not used again, since every run is to read its whole prompt.
"""

from __future__ import annotations

import sys

import numpy as np
import openvino as ov
import openvino_genai as genai

from peer_systems.serve import Job, Models, Run, Stopwatch, serve

LOOKUP_NGRAM = 3
"""Longest text looked up in the prompt; GenAI has no default for it."""


class GenAISystem:
    """A pipeline for each mode: a pipeline's mode is fixed when it is built."""

    def __init__(self, models: Models, *, default_kv: bool = False) -> None:
        self._models = models
        self._default_kv = default_kv
        self._pipelines: dict[str, genai.LLMPipeline] = {}

    def open(self, mode: str) -> dict[str, str]:
        options: dict[str, object] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": self._models.num_threads,
        }
        if not self._default_kv:
            options["KV_CACHE_PRECISION"] = "f32"
        extra: dict[str, object] = {}
        if mode == "draft-model":
            assert self._models.drafter is not None
            extra["draft_model"] = genai.draft_model(self._models.drafter, "CPU", **options)
        elif mode == "lookup":
            extra["prompt_lookup"] = True
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = sys.maxsize  # as LLMPipeline sets it
        scheduler.enable_prefix_caching = False
        self._pipelines[mode] = genai.LLMPipeline(
            self._models.target, "CPU", scheduler_config=scheduler, **options, **extra
        )
        return {
            "openvino": ov.get_version(),
            "openvino-genai": genai.get_version(),
            "dtype": "float32",
            "kv_cache": "default" if self._default_kv else "float32",
        }

    def run(self, job: Job) -> Run:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = job.num_tokens
        settings.ignore_eos = True
        settings.do_sample = job.temperature > 0
        if settings.do_sample:
            settings.temperature = job.temperature
            settings.rng_seed = job.seed
        if job.draft_length is not None:
            settings.num_assistant_tokens = job.draft_length
        if job.mode == "lookup":
            settings.max_ngram_size = LOOKUP_NGRAM
        ids = ov.Tensor(np.array([job.ids], dtype=np.int64))
        watch = Stopwatch()
        result = self._pipelines[job.mode].generate(ids, settings)
        wall_s = watch.seconds()
        first_s = result.perf_metrics.get_ttft().mean / 1e3
        return Run([int(token) for token in result.tokens[0]], wall_s, first_s)


if __name__ == "__main__":
    serve(lambda models: GenAISystem(models, default_kv="--default-kv" in sys.argv))
