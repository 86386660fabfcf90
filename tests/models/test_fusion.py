"""Joined operations give what the separate ones gave, and nothing that looks alike is joined."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
import transformers as hf

from models.families import FAMILIES, build, logits_of, plain, small, text
from outrider.models import Feed, Prompt, conversion, fusion, paged
from outrider.models import graph as graph_module
from outrider.models.conversion import convert
from outrider.models.fusion import flatten_attention, merge_projections, rotate_together
from outrider.models.graph import Graph
from outrider.models.openvino import ops, ov
from outrider.models.paged import PagedModel

LENGTH = 40

# Per layer: merged projections (queries, keys and values; gate and up), joint rotations.
JOINED = {
    "llama": (2, 1),
    "qwen2": (2, 1),  # biases are merged too
    "mistral": (2, 1),
    "gemma": (2, 1),
    "qwen3": (2, 0),  # queries and keys are normalised apart
    "phi": (1, 0),  # only a part of each head is rotated
    "gpt_neox": (1, 0),  # attention and MLP side by side, behind norms that are alike here
    "gpt2": (0, 0),
    "opt": (1, 0),
}


@cache
def separate(name: str) -> Graph:
    """The graph of a family without a merged projection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "merge_projections", lambda decoder: 0)
        return convert(build(FAMILIES[name].config()))


def logits(graph: Graph, ids: list[int]) -> torch.Tensor:
    """Of a passage in two passes, the second of another width."""
    model = PagedModel(graph, name="tiny", dtype="float32", context_length=256, kv_memory=2**22)
    sequence = model.start(Prompt(ids))
    parts = [model.score([Feed(sequence, ids[a:b], b - a)]) for a, b in ((0, 33), (33, len(ids)))]
    return torch.cat(parts)


def joined(graph: Graph) -> Graph:
    decoder = graph.decoder.clone()
    merge_projections(decoder)
    return Graph(decoder, graph.windows, graph.eos_ids)


@pytest.mark.parametrize("name", JOINED)
def test_what_can_be_joined_is_and_logits_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = separate(name)
    decoder = graph.decoder.clone()
    layers = len(graph.windows)
    merged = merge_projections(decoder)
    rotations: list[int] = []

    def count(decoder: ov.Model) -> int:
        rotations.append(rotate_together(decoder))
        return rotations[-1]

    monkeypatch.setattr(graph_module, "rotate_together", count)
    ids = text(LENGTH)
    fused = logits(Graph(decoder, graph.windows, graph.eos_ids), ids)
    assert (merged, rotations) == (layers * JOINED[name][0], [layers * JOINED[name][1]])
    monkeypatch.setattr(graph_module, "rotate_together", lambda decoder: 0)
    monkeypatch.setattr(graph_module, "flatten_attention", lambda decoder: None)
    reference = logits(graph, ids)
    assert (fused - reference).abs().max() < 2e-5 * reference.abs().max().clamp(min=1)
    assert (fused - logits_of(plain(name), ids)).abs().max() < 1e-4


def test_lower_precision_keeps_the_rotation_that_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    original = paged.paged

    def spy(graph: Graph, *, float32: bool) -> ov.Model:
        asked.append(float32)
        return original(graph, float32=float32)

    monkeypatch.setattr(paged, "paged", spy)
    graph = joined(separate("llama"))
    logits(graph, text(LENGTH))
    assert asked == [True]
    rotations: list[ov.Model] = []
    monkeypatch.setattr(graph_module, "rotate_together", rotations.append)
    original(graph, float32=False)
    assert not rotations


def broken(change: Callable[[ov.Model], None]) -> Callable[[ov.Model], int]:
    def rotate(decoder: ov.Model) -> int:
        count = rotate_together(decoder)
        change(decoder)
        decoder.validate_nodes_and_infer_types()
        return count

    return rotate


def exchange_first_two_inputs(decoder: ov.Model) -> None:
    """What a merge in the wrong order would do (as many heads for keys as for queries)."""
    for attention in fusion.paged_attentions(decoder):
        first, second = (attention.input_value(index) for index in (0, 1))
        attention.input(0).replace_source_output(second)
        attention.input(1).replace_source_output(first)


def test_control_a_wrong_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(hf.LlamaConfig, num_key_value_heads=4)()
    graph = convert(build(config))
    ids = text(LENGTH)
    expected = logits_of(build(config), ids)
    assert (logits(graph, ids) - expected).abs().max() < 1e-4
    monkeypatch.setattr(graph_module, "rotate_together", broken(exchange_first_two_inputs))
    assert (logits(graph, ids) - expected).abs().max() > 1e-2


def projections(*sizes: int, bias: bool = False, activation: bool = False) -> ov.Model:
    """A model of several products of one input, their results one by one."""
    rng = np.random.default_rng(0)
    x = ops.parameter(ov.PartialShape([-1, 1, 8]), ov.Type.f32, name="x")
    results = []
    for size in sizes:
        weight = ops.constant(rng.normal(size=(size, 8)).astype(np.float32))
        y = ops.matmul(x, weight, False, True)
        if bias:
            y = ops.add(y, ops.constant(rng.normal(size=(1, 1, size)).astype(np.float32)))
        results.append(ops.tanh(y) if activation else y)
    return ov.Model(results, [x], "projections")


def results_in_float32(
    model: ov.Model, x: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Also where the processor would compute in bfloat16."""
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return [np.array(value) for value in compiled(x).values()]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [False, True])
def test_every_result_of_a_merged_product_is_its_own(bias: bool, activation: bool) -> None:
    model = projections(3, 5, 2, bias=bias, activation=activation)
    x = np.random.default_rng(1).normal(size=(4, 1, 8)).astype(np.float32)
    before = results_in_float32(model, x)
    assert merge_projections(model) == 1
    assert [op.get_type_name() for op in model.get_ops()].count("MatMul") == 1
    for one, other in zip(before, results_in_float32(model, x), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_single_product_is_left_alone() -> None:
    model = projections(3)
    assert merge_projections(model) == 0
    assert "VariadicSplit" not in [op.get_type_name() for op in model.get_ops()]


def test_a_bias_that_others_read_too_is_not_merged() -> None:
    """The product without its bias is an output as well: both must survive."""
    model = projections(3, 5, bias=True)
    add = model.get_results()[0].input_value(0).get_node()
    product = next(
        value.get_node()
        for value in (add.input_value(0), add.input_value(1))
        if value.get_node().get_type_name() == "MatMul"
    )
    model.add_results([ops.result(product)])
    x = np.random.default_rng(1).normal(size=(4, 1, 8)).astype(np.float32)
    before = results_in_float32(model, x)
    assert merge_projections(model) == 1
    after = results_in_float32(model, x)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_flattening_leaves_two_reshapes_an_attention_at_most() -> None:
    graph = joined(separate("llama"))
    decoder = graph_module.paged(graph, float32=True)
    flatten_attention(decoder)  # again: nothing is left to do
    kinds = [op.get_type_name() for op in decoder.get_ordered_ops()]
    layers = len(graph.windows)
    assert "Transpose" not in kinds
    assert kinds.count("ShapeOf") == 0
    assert kinds.count("VariadicSplit") == 3 * layers
