"""Write a model folder's weights in the formats that the other systems read.

    python -m peer_systems.convert openvino MODEL_FOLDER OUT_FOLDER
    python -m peer_systems.convert gguf     GGUF_FILE    OUT_FILE

Runs in the environment of the peers. `openvino` writes a stateful model with 2-D attention mask and
its tokenizer, as OpenVINO GenAI expects them, weights in float32. `gguf` writes a quantised file
again with every tensor in float32, so that llama.cpp reads the weights that the others read.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from openvino import Model
    from transformers import PreTrainedModel

EXAMPLE_TOKENS = 2
EXAMPLE_PAST = 3


def to_openvino(source: Path, out: Path) -> None:
    """Convert the model and the tokenizer in `source` to the folder `out`."""
    import openvino as ov
    import torch
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.set_attn_implementation("sdpa")
    ov.save_model(stateful_model(model), out / "openvino_model.xml", compress_to_fp16=False)
    tokenizer, detokenizer = convert_tokenizer(
        AutoTokenizer.from_pretrained(source), with_detokenizer=True
    )
    ov.save_model(tokenizer, out / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, out / "openvino_detokenizer.xml")
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, out / name)


def stateful_model(model: PreTrainedModel) -> Model:
    """The OpenVINO model of a transformers causal model, its cache held as state.

    Inputs: input_ids [B, n], attention_mask [B, past + n], position_ids [B, n], beam_idx [B].
    Output: logits [B, n, V].
    """
    import openvino as ov
    import torch
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = [torch.zeros(1, num_heads, EXAMPLE_PAST, head_dim) for _ in range(2 * num_layers)]
    example = (
        torch.tensor([[1] * EXAMPLE_TOKENS]),
        torch.ones(1, EXAMPLE_PAST + EXAMPLE_TOKENS, dtype=torch.int64),
        torch.arange(EXAMPLE_PAST, EXAMPLE_PAST + EXAMPLE_TOKENS)[None],
        *past,
    )
    with torch.no_grad():
        converted = ov.convert_model(_functional(model), example_input=example)

    # 1. Names and open shapes.
    parts = [f"{layer}.{part}" for layer in range(num_layers) for part in ("key", "value")]
    past_names = [f"past_key_values.{part}" for part in parts]
    present_names = [f"present.{part}" for part in parts]
    inputs = ["input_ids", "attention_mask", "position_ids", *past_names]
    for port, name in zip(converted.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
        shape = [-1, num_heads, -1, head_dim] if name in past_names else [-1, -1]
        port.get_node().set_partial_shape(ov.PartialShape(shape))
    for port, name in zip(converted.outputs, ["logits", *present_names], strict=True):
        port.get_tensor().set_names({name})
    converted.validate_nodes_and_infer_types()

    # 2. Rows of the cache follow `beam_idx`.
    beam_idx = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name="beam_idx")
    beam_idx.output(0).get_tensor().set_names({"beam_idx"})
    converted.add_parameters([beam_idx])
    for name in past_names:
        port = converted.input(name).get_node().output(0)
        readers = list(port.get_target_inputs())
        gathered = ops.gather(port.get_node(), beam_idx, ops.constant(np.int64(0)))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    converted.validate_nodes_and_infer_types()

    # 3. The cache becomes state that starts empty.
    apply_make_stateful_transformation(converted, dict(zip(past_names, present_names, strict=True)))
    batch = ops.gather(
        ops.shape_of(converted.input("input_ids").get_node(), "i64"),
        ops.constant(np.array([0])),
        ops.constant(np.int64(0)),
    )
    sizes = [ops.constant(np.array([size])) for size in (num_heads, 0, head_dim)]
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, *sizes], 0))
    for node in converted.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    converted.validate_nodes_and_infer_types()
    return converted


def _functional(model: PreTrainedModel) -> torch.nn.Module:
    """`model` with its cache as plain inputs and outputs, and a 2-D mask."""
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class Functional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            position_ids: torch.Tensor,
            *past: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:
            cache = DynamicCache()
            for keys, values in zip(past[::2], past[1::2], strict=True):
                layer = DynamicLayer()
                layer.lazy_initialization(keys, values)
                # Set, not appended: concatenation to an empty tensor does not convert.
                layer.keys, layer.values, layer.is_initialized = keys, values, True
                cache.layers.append(layer)
            length, total = input_ids.shape[1], attention_mask.shape[1]
            columns = torch.arange(total)
            allowed = columns[None, :] <= columns[total - length :, None]
            allowed = allowed[None, None] & (attention_mask[:, None, None, :] > 0)
            lowest = torch.finfo(torch.float32).min
            output = self.model(
                input_ids=input_ids,
                attention_mask=torch.where(allowed, 0.0, lowest),
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            present = [part for layer in cache.layers for part in (layer.keys, layer.values)]
            return (output.logits, *present)

    return Functional()


def to_float32_gguf(source: Path, out: Path) -> None:
    """Write the GGUF file `source` again, every tensor in float32."""
    import gguf
    from gguf.constants import GGUFValueType

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture, use_temp_file=False)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        if field.name in ("general.file_type", "general.quantization_version"):
            continue
        kind = field.types[0]
        items = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, items)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    tensors = reader.tensors
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        num_bytes = 4 * int(np.prod(shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), num_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(np.ascontiguousarray(values, dtype=np.float32))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", choices=("openvino", "gguf"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    unfinished = arguments.out.with_name(f"{arguments.out.name}.{os.getpid()}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if arguments.format == "openvino":
        unfinished.mkdir()
        to_openvino(arguments.source, unfinished)
    else:
        to_float32_gguf(arguments.source, unfinished)
    unfinished.rename(arguments.out)


if __name__ == "__main__":
    main()
