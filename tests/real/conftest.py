"""The default target, loaded once for all tests that run it."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from outrider import Model, load_model
from outrider.models.causal import CausalModel


@pytest.fixture(scope="session")
def target() -> Model:
    """The default target in float32, where identity is strict."""
    return load_model("default", dtype="float32")


@pytest.fixture(scope="session")
def small(target: CausalModel) -> CausalModel:
    """A real drafting model of the same tokenizer: the target's first six layers."""
    module = copy.copy(target._module)
    module._modules = dict(module._modules)
    module.config = copy.deepcopy(module.config)
    module.config.num_hidden_layers = 6
    inner = copy.copy(module.model)
    inner._modules = dict(inner._modules)
    inner.config = module.config
    inner.layers = nn.ModuleList(list(inner.layers)[:6])
    module.model = inner
    return CausalModel(module, name="first six layers", tokenizer=target.tokenizer)
