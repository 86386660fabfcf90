"""Outrider: language models answer faster, with exactly the same output law.

    import outrider
    pair = outrider.load()                       # default target, prompt-lookup drafter
    print(pair.generate("Why is the sky blue?").text)

Names are resolved when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.decoding import Engine as Engine
    from outrider.drafters import Drafter as Drafter
    from outrider.drafters import make_drafter as make_drafter
    from outrider.errors import ContextOverflow as ContextOverflow
    from outrider.errors import GenerationError as GenerationError
    from outrider.errors import ModelNotFound as ModelNotFound
    from outrider.errors import NothingToDraw as NothingToDraw
    from outrider.errors import NumericalError as NumericalError
    from outrider.errors import OutriderError as OutriderError
    from outrider.errors import UnsupportedModel as UnsupportedModel
    from outrider.errors import UsageError as UsageError
    from outrider.errors import VocabularyMismatch as VocabularyMismatch
    from outrider.models import Model as Model
    from outrider.models import load_model as load_model
    from outrider.pair import Pair as Pair
    from outrider.pair import load as load
    from outrider.requests import Event as Event
    from outrider.requests import Request as Request
    from outrider.requests import Result as Result
    from outrider.requests import Round as Round
    from outrider.requests import Statistics as Statistics
    from outrider.requests import TokenLogprob as TokenLogprob
    from outrider.sampling import SamplingPolicy as SamplingPolicy

__version__ = "0.1.0"

_HOME = {
    "Engine": "decoding",
    "Drafter": "drafters",
    "make_drafter": "drafters",
    "ContextOverflow": "errors",
    "GenerationError": "errors",
    "ModelNotFound": "errors",
    "NothingToDraw": "errors",
    "NumericalError": "errors",
    "OutriderError": "errors",
    "UnsupportedModel": "errors",
    "UsageError": "errors",
    "VocabularyMismatch": "errors",
    "Model": "models",
    "load_model": "models",
    "Pair": "pair",
    "load": "pair",
    "Event": "requests",
    "Request": "requests",
    "Result": "requests",
    "Round": "requests",
    "Statistics": "requests",
    "TokenLogprob": "requests",
    "SamplingPolicy": "sampling",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"outrider.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
