"""The default target, loaded once for all tests that run it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider import Model, load_model
from outrider.models.checkpoints import find_checkpoint, load_weights
from outrider.models.conversion import convert
from outrider.models.paged import PagedModel


@pytest.fixture(scope="session")
def target() -> Model:
    """The default target on the default CPU engine, in float32, where identity is strict."""
    model = load_model("default", engine="openvino", dtype="float32")
    assert isinstance(model, PagedModel)
    return model


@pytest.fixture(scope="session")
def module() -> PreTrainedModel:
    """The same weights in transformers, untouched by Outrider."""
    return load_weights(find_checkpoint("default", torch.float32), torch.float32)


@pytest.fixture(scope="session")
def small(target: Model, module: PreTrainedModel) -> Model:
    """A real drafting model of the same tokenizer: the target's first six layers."""
    config = copy.deepcopy(module.config)
    config.num_hidden_layers = 6
    layers = AutoModelForCausalLM.from_config(config)
    layers.load_state_dict(module.state_dict(), strict=False)
    return PagedModel(
        convert(layers.eval()),
        name="first six layers",
        dtype="float32",
        context_length=target.context_length,
        tokenizer=target.tokenizer,
    )
