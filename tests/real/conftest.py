"""The default target, loaded once for all tests that run it."""

from __future__ import annotations

import copy

import pytest
from transformers import AutoModelForCausalLM

from outrider import Model, load_model
from outrider.models.causal import CausalModel


@pytest.fixture(scope="session")
def target() -> Model:
    """The default target in float32, where identity is strict."""
    return load_model("default", dtype="float32")


@pytest.fixture(scope="session")
def small(target: CausalModel) -> CausalModel:
    """A real drafting model of the same tokenizer: the target's first six layers."""
    config = copy.deepcopy(target._module.config)
    config.num_hidden_layers = 6
    config._attn_implementation = "sdpa"
    module = AutoModelForCausalLM.from_config(config)
    module.load_state_dict(target._module.state_dict(), strict=False)
    return CausalModel(module.eval(), name="first six layers", tokenizer=target.tokenizer)
