"""From a transformers causal model to an OpenVINO graph with paged attention, kept on disk.

1. The model is traced once by OpenVINO's PyTorch frontend, with its past keys and values as plain
   inputs and outputs.
2. Past inputs and outputs become state: the form in which OpenVINO knows a decoder, and in which
   the graph is saved.
3. At load its attention becomes paged attention, sliding windows are set layer by layer, and the
   output projection is cut down to the rows somebody asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from outrider.errors import UnsupportedModel, UsageError
from outrider.models.architecture import eos_ids, sliding_windows
from outrider.models.cache import cache_folder, kept_folder, read_manifest
from outrider.models.checkpoints import Checkpoint, identity, load_weights, quietly
from outrider.models.openvino import (
    apply_make_stateful_transformation,
    convert_model,
    ops,
    ov,
    paged_attention_transformation,
)

__all__ = ["Graph", "NotConverted", "convert", "kept_graph", "paged"]

_FORMAT = "graph 1"
_GRAPH_FILE = "decoder.xml"
_ELEMENTWISE = {"Add", "Convert", "Divide", "Multiply", "Tanh"}


@dataclass(frozen=True)
class Graph:
    """A converted decoder in its stateful form.

    Attributes:
        decoder: the OpenVINO model.
        windows: per layer how many tokens a query sees, 0 for all.
        eos_ids: ids that end a text, as the model's own settings have them.
        weights: the file that the decoder's weights are mapped from, if they are.
    """

    decoder: ov.Model
    windows: Sequence[int]
    eos_ids: frozenset[int]
    weights: Path | None = None


def kept_graph(
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    dtype: str,
    *,
    check: Callable[[Graph, PreTrainedModel], None],
    notify: Callable[[str], None],
) -> Graph:
    """The graph of a checkpoint, converted now if it is not kept yet.

    Args:
        checkpoint: where the model is.
        config: its configuration.
        dtype: "float32", "bfloat16" or "int8" (weights only).
        check: compares a fresh graph with its model; raises UnsupportedModel where they differ.
        notify: told, in one line, that conversion begins.

    Raises:
        UnsupportedModel: it does not convert. That is remembered too: the next call says so at
            once.
        UsageError: "int8" without nncf, or a cache that cannot be written.
    """
    _windows(config)  # refuses before anything is read
    versions = (transformers.__version__, ov.get_version(), torch.__version__)
    name = f"{Path(checkpoint.source).name}-{dtype}-{identity(checkpoint, _FORMAT, *versions)}"
    refusal = cache_folder() / "graphs" / f"{name}.unsupported"
    if refusal.is_file():
        raise NotConverted(refusal.read_text())
    if dtype == "int8" and importlib.util.find_spec("nncf") is None:
        raise UsageError("int8 weights need nncf: pip install 'outrider[int8]'")

    def make(folder: Path) -> dict[str, object]:
        module = load_weights(checkpoint, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        # Traced in float32 whatever the weights were rounded to: the device chooses its arithmetic.
        graph = convert(module.float())
        try:
            check(graph, module)
        except UnsupportedModel as error:
            raise NotConverted(str(error)) from error
        if dtype == "int8":
            graph = _with_int8_weights(graph)
        try:
            ov.save_model(graph.decoder, folder / _GRAPH_FILE, compress_to_fp16=False)
        except RuntimeError as error:  # a full disk, for one
            raise OSError(_first_line(error)) from error
        return {"windows": list(graph.windows), "eos_ids": sorted(graph.eos_ids)}

    try:
        folder = kept_folder(
            "graphs",
            name,
            make,
            facts=("windows", "eos_ids"),
            notify=lambda: notify(
                f"converting {checkpoint.name} for this CPU ({dtype}); later starts are quick"
            ),
        )
    except NotConverted as error:
        refusal.parent.mkdir(parents=True, exist_ok=True)
        refusal.write_text(str(error))
        raise
    manifest = read_manifest(folder)
    return Graph(
        ov.Core().read_model(folder / _GRAPH_FILE),
        [int(window) for window in manifest["windows"]],  # type: ignore[attr-defined]
        frozenset(int(token) for token in manifest["eos_ids"]),  # type: ignore[attr-defined]
        folder / _GRAPH_FILE.replace(".xml", ".bin"),
    )


def convert(module: PreTrainedModel) -> Graph:
    """The stateful graph of a float32 model.

    Raises:
        UnsupportedModel: its forward pass cannot be traced in this form.
    """
    kind = module.config.model_type
    windows = _windows(module.config)
    if not module._supports_sdpa:
        raise NotConverted(f"{kind} has no attention that OpenVINO recognises")
    module.set_attn_implementation("sdpa")
    try:
        with quietly(), torch.inference_mode(False), torch.no_grad():
            decoder = _traced(module)
            _make_stateful(decoder)
    except Exception as error:  # whatever a foreign model does under a tracer
        raise NotConverted(f"{kind} does not convert ({_first_line(error)})") from error
    return Graph(decoder, windows, eos_ids(module, None))


def paged(graph: Graph) -> ov.Model:
    """A copy of the graph with paged attention and a choice of rows; weights are shared.

    Inputs, for N tokens of B sequences end to end: input_ids and position_ids [N], past_lens [B],
    subsequence_begins [B + 1], block_indices, block_indices_begins [B + 1], max_context_len [],
    kept_rows [K] (which of the N positions logits are wanted for), key_cache.i and value_cache.i
    [blocks, heads, tokens per block, head size]. Output: logits [K, 1, V].

    Raises:
        UnsupportedModel: attention that the transformation does not recognise in every layer.
    """
    decoder = graph.decoder.clone()
    try:
        paged_attention_transformation(decoder)
    except Exception as error:
        raise NotConverted(f"no paged attention ({_first_line(error)})") from error
    layers = [op for op in decoder.get_ops() if op.get_type_name() == "PagedAttentionExtension"]
    if len(layers) != len(graph.windows):
        raise NotConverted(f"paged attention in {len(layers)} of {len(graph.windows)} layers")
    for op in layers:
        layer = int(op.input_value(3).get_node().get_friendly_name().removeprefix("key_cache."))
        window = np.array(graph.windows[layer], dtype=np.int32)
        op.input(10).replace_source_output(ops.constant(window).output(0))
    _cut_rows(decoder)
    decoder.validate_nodes_and_infer_types()
    return decoder


def _windows(config: PretrainedConfig) -> list[int]:
    try:
        return sliding_windows(config)
    except UnsupportedModel as error:
        raise NotConverted(f"{config.model_type} has {error}") from error


class NotConverted(UnsupportedModel):
    """A model without a graph that gives its logits; it may well run on the torch engine."""


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


def _cut_rows(decoder: ov.Model) -> None:
    """Give the output projection only the rows named by a new input, kept_rows [K].

    A projection of a whole prompt onto 150,000 tokens costs as much as several layers and a
    gigabyte of memory, for logits nobody reads.
    """
    rows = ops.parameter(ov.PartialShape([-1]), ov.Type.i64, name="kept_rows")
    rows.output(0).get_tensor().set_names({"kept_rows"})
    # From the logits back over what works on each row by itself (bias, scale, soft cap).
    target = decoder.output("logits").get_node().input(0)
    while (node := target.get_source_output().get_node()).get_type_name() in _ELEMENTWISE:
        varying = [i for i in node.inputs() if not _is_constant(i.get_source_output().get_node())]
        if len(varying) != 1:
            break
        [target] = varying
    if node.get_type_name() == "MatMul" and _is_constant(node.input_value(1).get_node()):
        target = node.input(0)
    source = target.get_source_output()
    chosen = ops.gather(source.get_node(), rows, ops.constant(np.int64(0)))
    assert len(source.get_node().outputs()) == 1
    target.replace_source_output(chosen.output(0))
    decoder.add_parameters([rows])


def _is_constant(node: ov.Node) -> bool:
    """Whether a node is a weight, perhaps stored in another type or scaled."""
    if node.get_type_name() == "Constant":
        return True
    inputs = [port.get_source_output().get_node() for port in node.inputs()]
    return bool(inputs) and all(_is_constant(item) for item in inputs)


def _with_int8_weights(graph: Graph) -> Graph:
    import nncf

    with quietly():
        decoder = nncf.compress_weights(
            graph.decoder.clone(), mode=nncf.CompressWeightsMode.INT8_ASYM
        )
    return Graph(decoder, graph.windows, graph.eos_ids)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    operations = sorted({word for line in lines for word in line.split() if "aten::" in word})
    if operations:  # what OpenVINO could not translate is in the middle of its message
        return f"no translation of {', '.join(operations[:3])}"
    return lines[0] if lines else type(error).__name__
