"""llama-cpp-python: plain, and with `LlamaPromptLookupDecoding`.

Weights and cache in float32 (the cache is float16 by default); every sampler but the temperature is
off.
"""

from __future__ import annotations

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from peer_systems.serve import Job, Models, Run, Stopwatch, serve


class LlamaCppSystem:
    """A model for each mode: speculation keeps the logits of all positions, plain decoding not."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._llamas: dict[str, llama_cpp.Llama] = {}

    def open(self, mode: str) -> dict[str, str]:
        drafter = LlamaPromptLookupDecoding() if mode == "lookup" else None
        self._llamas[mode] = llama_cpp.Llama(
            self._models.target,
            n_ctx=self._models.context_length,
            n_threads=self._models.num_threads,
            n_threads_batch=self._models.num_threads,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            draft_model=drafter,
            verbose=False,
        )
        return {"llama-cpp-python": llama_cpp.__version__, "dtype": "float32"}

    def run(self, job: Job) -> Run:
        llama = self._llamas[job.mode]
        if job.mode == "lookup" and job.draft_length is not None:
            llama.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=job.draft_length)
        llama.set_seed(job.seed)
        llama.reset()
        ids: list[int] = []
        watch = Stopwatch()
        tokens = llama.generate(
            job.ids,
            temp=job.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            typical_p=1.0,
            repeat_penalty=1.0,
        )
        for token in tokens:
            ids.append(int(token))
            watch.tokens(1)
            if len(ids) == job.num_tokens:
                break
        wall_s = watch.seconds()
        tokens.close()
        return Run(ids, wall_s, watch.first_s)


if __name__ == "__main__":
    serve(LlamaCppSystem)
