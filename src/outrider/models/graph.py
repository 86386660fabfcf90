"""The OpenVINO graph of a model: kept on disk, and given paged attention when it is loaded.

At load attention becomes paged attention, sliding windows are set layer by layer, the output
projection is cut down to the rows somebody asked for, and operations around attention are joined
(`fusion`). `conversion` makes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers

from outrider.errors import UnsupportedModel
from outrider.models.architecture import refuse_recurrent, sliding_windows
from outrider.models.cache import cache_folder, kept_folder, read_manifest
from outrider.models.checkpoints import Checkpoint, identity, load_weights
from outrider.models.fusion import (
    flatten_attention,
    is_constant,
    paged_attentions,
    rotate_together,
)
from outrider.models.openvino import ops, ov, paged_attention_transformation

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Graph", "NotConverted", "first_line", "kept_graph", "known_windows", "paged"]

_FORMAT = "graph 3"
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


class NotConverted(UnsupportedModel):
    """A model without a graph that gives its logits; it may well run on the torch engine."""


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
        UsageError: a cache that cannot be written.
    """
    known_windows(config)  # refuses before anything is read
    versions = (transformers.__version__, ov.get_version(), torch.__version__)
    name = f"{Path(checkpoint.source).name}-{dtype}-{identity(checkpoint, _FORMAT, *versions)}"
    refusal = cache_folder() / "graphs" / f"{name}.unsupported"
    if refusal.is_file():
        raise NotConverted(refusal.read_text())

    def make(folder: Path) -> dict[str, object]:
        # Seconds of imports that a start with a kept graph does not need.
        from outrider.models.conversion import convert, with_int8_weights

        refuse_recurrent(config, checkpoint.name)
        module = load_weights(checkpoint, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        # Traced in float32 whatever the weights were rounded to: the device chooses its arithmetic.
        graph = convert(module.float())
        try:
            check(graph, module)
        except UnsupportedModel as error:
            raise NotConverted(str(error)) from error
        if dtype == "int8":
            graph = with_int8_weights(graph)
        try:
            ov.save_model(graph.decoder, folder / _GRAPH_FILE, compress_to_fp16=False)
        except RuntimeError as error:  # a full disk, for one
            raise OSError(first_line(error)) from error
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


def paged(graph: Graph, *, float32: bool) -> ov.Model:
    """A copy of the graph with paged attention and a choice of rows; weights are shared.

    Inputs, for N tokens of B sequences end to end: input_ids and position_ids [N], past_lens [B],
    subsequence_begins [B + 1], block_indices, block_indices_begins [B + 1], max_context_len [],
    kept_rows [K] (which of the N positions logits are wanted for), key_cache.i and value_cache.i
    [blocks, heads, tokens per block, head size]. Output: logits [K, 1, V].

    Args:
        graph: from `kept_graph`.
        float32: whether it will be computed in float32.

    Raises:
        UnsupportedModel: attention that the transformation does not recognise in every layer.
    """
    decoder = graph.decoder.clone()
    try:
        paged_attention_transformation(decoder)
    except Exception as error:
        raise NotConverted(f"no paged attention ({first_line(error)})") from error
    layers = paged_attentions(decoder)
    if len(layers) != len(graph.windows):
        raise NotConverted(f"paged attention in {len(layers)} of {len(graph.windows)} layers")
    for op in layers:
        layer = int(op.input_value(3).get_node().get_friendly_name().removeprefix("key_cache."))
        window = np.array(graph.windows[layer], dtype=np.int32)
        op.input(10).replace_source_output(ops.constant(window).output(0))
    _cut_rows(decoder)
    decoder.validate_nodes_and_infer_types()
    flatten_attention(decoder)
    if float32:
        rotate_together(decoder)
    return decoder


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
        varying = [i for i in node.inputs() if not is_constant(i.get_source_output().get_node())]
        if len(varying) != 1:
            break
        [target] = varying
    if node.get_type_name() == "MatMul" and is_constant(node.input_value(1).get_node()):
        target = node.input(0)
    source = target.get_source_output()
    chosen = ops.gather(source.get_node(), rows, ops.constant(np.int64(0)))
    assert len(source.get_node().outputs()) == 1
    target.replace_source_output(chosen.output(0))
    decoder.add_parameters([rows])


def known_windows(config: PretrainedConfig) -> list[int]:
    """`sliding_windows`, where an unknown kind of layer means that the model does not convert."""
    try:
        return sliding_windows(config)
    except UnsupportedModel as error:
        raise NotConverted(f"{config.model_type} has {error}") from error


def first_line(error: Exception) -> str:
    """What a foreign error says in one line; of untranslated operations, their names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    operations = sorted({word for line in lines for word in line.split() if "aten::" in word})
    if operations:  # what OpenVINO could not translate is in the middle of its message
        return f"no translation of {', '.join(operations[:3])}"
    return lines[0] if lines else type(error).__name__
