"""From a transformers causal model to an OpenVINO graph.

1. The model is traced once by OpenVINO's PyTorch frontend, with its past keys and values as plain
   inputs and outputs.
2. Past inputs and outputs become state: the form in which OpenVINO knows a decoder.
3. Projections of one input become one (`fusion`). So it is saved.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from outrider.models.architecture import eos_ids
from outrider.models.checkpoints import quietly
from outrider.models.fusion import merge_projections
from outrider.models.graph import Graph, NotConverted, first_line, known_windows
from outrider.models.openvino import apply_make_stateful_transformation, convert_model, ops, ov

__all__ = ["convert", "with_int8_weights"]


def convert(module: PreTrainedModel) -> Graph:
    """The stateful graph of a float32 model.

    Raises:
        UnsupportedModel: its forward pass cannot be traced in this form.
    """
    kind = module.config.model_type
    windows = known_windows(module.config)
    if not module._supports_sdpa:
        raise NotConverted(f"{kind} has no attention that OpenVINO recognises")
    module.set_attn_implementation("sdpa")
    try:
        with quietly(), torch.inference_mode(False), torch.no_grad():
            decoder = _traced(module)
            _make_stateful(decoder)
            merge_projections(decoder)
    except Exception as error:  # whatever a foreign model does under a tracer
        raise NotConverted(f"{kind} does not convert ({first_line(error)})") from error
    return Graph(decoder, windows, eos_ids(module, None))


class _WithPast(torch.nn.Module):
    """A causal model whose cache is made of inputs and outputs."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__()
        self._module = module

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values = keys, values
            # The first update of a new layer would join its states to an empty tensor of one
            # dimension, which does not convert.
            layer.is_initialized = True
            cache.layers.append(layer)
        output = self._module(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        present = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return (output.logits, *present)


def _traced(module: PreTrainedModel) -> ov.Model:
    """The decoder with inputs input_ids, attention_mask (4-D, additive), position_ids, past.*."""
    num_past, num_new = 3, 2  # none of them 1, and different: nothing shall look constant
    ids = torch.arange(1, 1 + num_past + num_new)[None]
    first = module(input_ids=ids[:, :num_past], use_cache=True, past_key_values=DynamicCache())
    past = [
        states.detach().clone()
        for layer in first.past_key_values.layers
        for states in (layer.keys, layer.values)
    ]
    mask = torch.zeros(1, 1, num_new, num_past + num_new)
    positions = torch.arange(num_past, num_past + num_new)[None]
    decoder = convert_model(_WithPast(module), (ids[:, num_past:], mask, positions, *past))
    names = [f"{i}.{kind}" for i in range(len(past) // 2) for kind in ("key", "value")]
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past.{name}" for name in names)]
    shapes = [[-1, -1], [-1, 1, -1, -1], [-1, -1]]
    shapes += [[-1, states.shape[1], -1, states.shape[3]] for states in past]
    for port, name, shape in zip(decoder.inputs, inputs, shapes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(ov.PartialShape(shape))
    outputs = ["logits", *(f"present.{name}" for name in names)]
    for port, name in zip(decoder.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    decoder.validate_nodes_and_infer_types()
    return decoder


def _make_stateful(decoder: ov.Model) -> None:
    """Turn past.* and present.* into variables that begin empty."""
    rows = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name="beam_idx")
    rows.output(0).get_tensor().set_names({"beam_idx"})
    decoder.add_parameters([rows])
    zero = ops.constant(np.int64(0))
    names = {}
    for port in decoder.inputs:
        name = port.get_any_name()
        if not name.startswith("past."):
            continue
        names[name] = name.replace("past.", "present.")
        readers = list(port.get_target_inputs())
        chosen = ops.gather(port.get_node(), rows, zero)
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    decoder.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(decoder, names)
    shape = ops.shape_of(decoder.input("input_ids").get_node(), "i64")
    batch = ops.gather(shape, ops.constant(np.array([0])), zero)
    for op in decoder.get_ops():
        if op.get_type_name() != "ReadValue":
            continue
        _, heads, _, size = op.get_output_partial_shape(0)
        rest = np.array([heads.get_length(), 0, size.get_length()], dtype=np.int64)
        empty = ops.concat([batch, ops.constant(rest)], 0)
        op.set_arguments([ops.broadcast(ops.constant(np.float32(0)), empty)])
    decoder.validate_nodes_and_infer_types()


def with_int8_weights(graph: Graph) -> Graph:
    """The same graph with its weights rounded to 8 bits, a scale and a zero for every output.

    w is kept as q in 0..255 and read as (q - zero) * scale, scale = (max w - min w) / 255 over the
    weights of one output (of one id, for embeddings), 0 always among the values that are hit.
    """
    decoder = graph.decoder.clone()
    for op in decoder.get_ops():
        if op.get_type_name() != "Constant" or op.get_element_type() != ov.Type.f32:
            continue
        axis = _summed_axis(op)
        if axis is None:
            continue
        readers = list(op.output(0).get_target_inputs())
        rounded = _rounded(op.data, axis)
        for reader in readers:
            reader.replace_source_output(rounded)
    decoder.validate_nodes_and_infer_types()
    return Graph(decoder, graph.windows, graph.eos_ids)


def _summed_axis(constant: ov.Node) -> int | None:
    """The axis of a weight [.., ..] that products sum over; None for what is no weight."""
    if len(constant.get_output_shape(0)) != 2:
        return None
    axes = set()
    for reader in constant.output(0).get_target_inputs():
        node = reader.get_node()
        if node.get_type_name() == "MatMul" and reader.get_index() == 1:
            axes.add(1 if node.get_attributes()["transpose_b"] else 0)
        elif node.get_type_name() == "Gather" and reader.get_index() == 0:
            axes.add(1)
        else:
            return None
    return axes.pop() if len(axes) == 1 else None


def _rounded(weight: NDArray[np.float32], axis: int) -> ov.Output:
    low = np.minimum(weight.min(axis=axis, keepdims=True), 0.0)
    high = np.maximum(weight.max(axis=axis, keepdims=True), 0.0)
    scale = np.maximum((high - low) / 255.0, np.float32(1e-12)).astype(np.float32)
    zero = np.rint(-low / scale)
    kept = np.clip(np.rint(weight / scale) + zero, 0, 255).astype(np.uint8)
    shifted = ops.subtract(
        ops.convert(ops.constant(kept), "f32"),
        ops.convert(ops.constant(zero.astype(np.uint8)), "f32"),
    )
    return ops.multiply(shifted, ops.constant(scale)).output(0)
