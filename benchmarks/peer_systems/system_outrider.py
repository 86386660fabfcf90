"""Outrider through its public API, in the product's own environment.

The system `outrider-int8-drafter` rounds the drafting model's weights to 8 bits; the target, and so
the law of the output, is the same.
"""

from __future__ import annotations

import sys
from typing import Final, cast

import torch

import outrider
from outrider.models import Dtype, Engine
from outrider.pair import Settings
from peer_systems.serve import Job, Models, Run, Stopwatch, serve

DTYPE: Final = "float32"
DRAFTER_OF_MODE = {"plain": "none", "lookup": "lookup"}


class OutriderSystem:
    """One target for all modes; "plain" is a pair without a drafter."""

    def __init__(self, models: Models, *, drafter_dtype: Dtype = DTYPE) -> None:
        torch.set_num_threads(models.num_threads)
        self._models = models
        self._drafter_dtype = drafter_dtype
        self._pairs: dict[str, outrider.Pair] = {}

    def open(self, mode: str) -> dict[str, str]:
        engine = cast(Engine, self._models.engine)
        if mode == "draft-model":
            assert self._models.drafter is not None
            drafter = self._models.drafter
        else:
            drafter = DRAFTER_OF_MODE[mode]
        if self._pairs:
            target = next(iter(self._pairs.values())).target
            proposer = outrider.make_drafter(
                drafter, target, engine=engine, dtype=self._drafter_dtype, device="cpu"
            )
            pair = outrider.Pair(target, proposer)
        else:
            pair = outrider.load(
                self._models.target,
                drafter,
                engine=engine,
                dtype=DTYPE,
                drafter_dtype=self._drafter_dtype,
                device="cpu",
            )
        self._pairs[mode] = pair
        return {
            "outrider": outrider.__version__,
            "torch": torch.__version__,
            "engine": pair.target.engine,
            "dtype": pair.target.dtype,
        }

    def run(self, job: Job) -> Run:
        pair = self._pairs[job.mode]
        settings: Settings = {
            "temperature": job.temperature,
            "max_new_tokens": job.num_tokens,
            "ignore_eos": True,
            "seed": job.seed,
        }
        if job.draft_length is not None:
            settings["gamma"] = job.draft_length
        pair.forget()  # every run is to read its whole prompt
        watch = Stopwatch()
        events = pair.stream(job.ids, **settings)
        result = None
        for event in events:
            watch.tokens(len(event.token_ids))
            result = event.result
        wall_s = watch.seconds()
        assert result is not None
        if result.error is not None:
            raise result.error
        details: dict[str, float | None] = {
            "alpha_hat": result.stats.alpha_hat,
            "tokens_per_call": result.stats.tokens_per_call,
            "drafted": result.stats.drafted,
            "accepted": result.stats.accepted,
            "examined": result.stats.examined,
            "emitted": result.stats.emitted,
            "target_passes": result.stats.target_passes,
        }
        return Run(result.token_ids, wall_s, watch.first_s, watch.num_first, details)


if __name__ == "__main__":
    drafter_dtype: Dtype = "int8" if "--int8-drafter" in sys.argv else DTYPE
    serve(lambda models: OutriderSystem(models, drafter_dtype=drafter_dtype))
