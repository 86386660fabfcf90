"""Fewer and larger operations, for a graph that computes the same.

A pass over one token of a small model spends a quarter of its time between its operations, and a
pass of another width than the one before goes through the shapes of all of them again. Projections
of one input become one projection, the rotary embedding of queries and keys one, and what only
changes a shape goes away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from outrider.models.openvino import ops, ov

__all__ = [
    "flatten_attention",
    "is_constant",
    "merge_projections",
    "paged_attentions",
    "rotate_together",
]

_MOVES = {"Reshape", "Transpose", "Unsqueeze", "Squeeze"}


def merge_projections(decoder: ov.Model) -> int:
    """Make one matrix product of all that multiply the same input by a constant; how many now are.

    y_i = x W_i^T + b_i becomes a split of x [W_1; W_2; ...]^T + [b_1, b_2, ...]. A gate that has an
    activation behind it gains most: fused with it, OpenVINO multiplies with slower kernels.
    """
    merged = 0
    for op in decoder.get_ordered_ops():
        for port in op.outputs():
            group = [
                reader.get_node()
                for reader in port.get_target_inputs()
                if reader.get_index() == 0 and _is_projection(reader.get_node())
            ]
            if len(group) > 1:
                _merge(port, sorted(group, key=lambda node: str(node.get_friendly_name())))
                merged += 1
    if merged:
        decoder.validate_nodes_and_infer_types()
    return merged


def _is_projection(node: ov.Node) -> bool:
    if node.get_type_name() != "MatMul":
        return False
    if node.input_value(1).get_node().get_type_name() != "Constant":
        return False
    how = node.get_attributes()
    return (
        not how["transpose_a"]
        and how["transpose_b"]
        and len(node.input_value(1).get_shape()) == 2
        and len(node.get_output_partial_shape(0)) == 3
    )


def _merge(source: ov.Output, group: Sequence[ov.Node]) -> None:
    weights = [_values(node.input_value(1)) for node in group]
    sizes = [len(weight) for weight in weights]
    biases = [_bias(node) for node in group]
    product = ops.matmul(source, ops.constant(np.concatenate(weights)), False, True)
    results = [node.output(0) for node in group]
    if all(bias is not None for bias in biases):
        values = np.concatenate([bias[1] for bias in biases if bias is not None])
        product = ops.add(product, ops.constant(values[None, None]))
        results = [bias[0].output(0) for bias in biases if bias is not None]
    split = ops.variadic_split(product, ops.constant(np.int64(-1)), ops.constant(np.array(sizes)))
    for index, result in enumerate(results):
        for reader in list(result.get_target_inputs()):
            reader.replace_source_output(split.output(index))


def _bias(product: ov.Node) -> tuple[ov.Node, NDArray[np.generic]] | None:
    """The addition of a constant row that is all that happens to a product, and the row."""
    readers = list(product.output(0).get_target_inputs())
    if len(readers) != 1 or readers[0].get_node().get_type_name() != "Add":
        return None
    add = readers[0].get_node()
    other = add.input_value(1 - readers[0].get_index())
    width = product.get_output_partial_shape(0)[-1].get_length()
    if other.get_node().get_type_name() != "Constant" or _values(other).size != width:
        return None
    return add, _values(other).reshape(width)


def flatten_attention(decoder: ov.Model) -> None:
    """One reshape before each input of a paged attention and one behind it, to known shapes.

    The attention takes and gives [N, heads * size], the model around it has [N, 1, heads * size];
    in between it was [N, heads, 1, size] in several steps, some of them computed from other shapes.
    """
    for attention in paged_attentions(decoder):
        for index in range(3):
            target = attention.input(index)
            source = _before_moves(target.get_source_output())
            if source != target.get_source_output():
                width = target.get_partial_shape()[1].get_length()
                target.replace_source_output(_reshaped(source, [-1, width]))
        result = attention.output(0)
        width = result.get_partial_shape()[1].get_length()
        last, readers = result, list(result.get_target_inputs())
        while movers := [reader for reader in readers if _keeps_order(reader.get_node())]:
            rest = [reader for reader in readers if reader.get_node().get_type_name() != "ShapeOf"]
            if len(movers) != 1 or len(rest) != 1:
                break
            last = movers[0].get_node().output(0)
            readers = list(last.get_target_inputs())
        shape = last.get_partial_shape()
        if last != result and len(shape) == 3 and shape[1] == ov.Dimension(1):
            flat = _reshaped(result, [-1, 1, width])
            for reader in readers:
                reader.replace_source_output(flat)
    decoder.validate_nodes_and_infer_types()


def rotate_together(decoder: ov.Model) -> int:
    """Rotate queries and keys as one tensor wherever they come from one projection; how often.

    Su et al., "RoFormer" (2021), as transformers computes it: x cos + rotate(x) sin, where rotate
    swaps the halves of each head and negates the second, now first. The sign goes into the sine
    here, and the swap is a gather. OpenVINO's own fused operation infers its shape by copying
    itself, which takes 40 microseconds, twice a layer, at every change of width. But it computes in
    float32 whatever the model does: this is for models in float32.
    """
    tables: dict[tuple[str, str], tuple[ov.Output, ov.Output]] = {}
    count = 0
    for attention in paged_attentions(decoder):
        rotated = [_rotary(_before_moves(attention.input_value(index))) for index in (0, 1)]
        queries, keys = rotated
        if queries is None or keys is None or queries[1:] != keys[1:]:
            continue
        split = queries[0].get_node()
        if split.get_type_name() != "VariadicSplit" or len(split.outputs()) != 3:
            continue
        # Names order what was merged, so keys may come before queries.
        order = (0, 1, 2) if queries[0].get_index() == 0 else (1, 0, 2)
        sources = [queries[0], keys[0], _before_moves(attention.input_value(2))]
        if any(sources[place] != split.output(index) for index, place in enumerate(order)):
            continue
        cos, sin = queries[1:]
        size = cos.get_partial_shape()[3].get_length()
        widths = [split.output(index).get_partial_shape()[2].get_length() for index in range(3)]
        key = (_name(cos), _name(sin))
        if key not in tables:
            sign = np.ones(size, dtype=np.float32)
            sign[: size // 2] = -1
            signed = ops.multiply(_reshaped(sin, [-1, 1, size]), ops.constant(sign[None, None]))
            tables[key] = _reshaped(cos, [-1, 1, size]), signed.output(0)
        cosines, sines = tables[key]
        both = ops.variadic_split(
            split.input_value(0),
            ops.constant(np.int64(-1)),
            ops.constant(np.array([widths[0] + widths[1], widths[2]])),
        )
        heads = _reshaped(both.output(0), [-1, (widths[0] + widths[1]) // size, size])
        halves = np.roll(np.arange(size), size // 2)
        swapped = ops.gather(heads, ops.constant(halves), ops.constant(np.int64(2)))
        turned = ops.add(ops.multiply(heads, cosines), ops.multiply(swapped, sines))
        parts = ops.variadic_split(
            _reshaped(turned.output(0), [-1, widths[0] + widths[1]]),
            ops.constant(np.int64(1)),
            ops.constant(np.array(widths[:2])),
        )
        attention.input(order[0]).replace_source_output(parts.output(0))
        attention.input(order[1]).replace_source_output(parts.output(1))
        attention.input(2).replace_source_output(_reshaped(both.output(1), [-1, widths[2]]))
        count += 1
    if count:
        decoder.validate_nodes_and_infer_types()
    return count


def _rotary(result: ov.Output) -> tuple[ov.Output, ov.Output, ov.Output] | None:
    """What was rotated, by which cosines and sines [N, 1, 1, size], if a result is that."""
    add = result.get_node()
    if add.get_type_name() != "Add":
        return None
    products = [add.input_value(index).get_node() for index in (0, 1)]
    if any(product.get_type_name() != "Multiply" for product in products):
        return None
    (x, cos), (turned, sin) = ([node.input_value(0), node.input_value(1)] for node in products)
    shape = list(x.get_partial_shape())
    for table in (cos, sin):
        of = list(table.get_partial_shape())
        if len(of) != 4 or len(shape) != 4 or of[3] != shape[3] or of[1:3] != [ov.Dimension(1)] * 2:
            return None
    if shape[3].is_dynamic or turned.get_node().get_type_name() != "Concat":
        return None
    size = shape[3].get_length()
    if turned.get_node().get_attributes()["axis"] not in (-1, 3) or size % 2:
        return None
    second, first = (turned.get_node().input_value(index) for index in (0, 1))
    negated = second.get_node()
    if negated.get_type_name() != "Multiply" or not is_constant(negated.input_value(1).get_node()):
        return None
    if _scalar(negated.input_value(1)) != -1:
        return None
    if _slice(negated.input_value(0), size) != (x, size // 2, size):
        return None
    if _slice(first, size) != (x, 0, size // 2):
        return None
    return _before_moves(x), cos, sin


def _slice(result: ov.Output, size: int) -> tuple[ov.Output, int, int] | None:
    """What a slice with step 1 along the last of four axes takes, from where, and to where."""
    node = result.get_node()
    if node.get_type_name() != "Slice" or len(node.inputs()) != 5:
        return None
    if not all(is_constant(node.input_value(index).get_node()) for index in range(1, 5)):
        return None
    start, stop, step, axis = (int(_scalar(node.input_value(index))) for index in range(1, 5))
    if step != 1 or axis not in (-1, 3):
        return None
    return node.input_value(0), start, min(stop, size)


def paged_attentions(decoder: ov.Model) -> list[ov.Node]:
    """The paged attention of every layer."""
    return [
        op for op in decoder.get_ordered_ops() if op.get_type_name() == "PagedAttentionExtension"
    ]


def is_constant(node: ov.Node) -> bool:
    """Whether a node is a weight, perhaps stored in another type or scaled."""
    if node.get_type_name() == "Constant":
        return True
    inputs = [port.get_source_output().get_node() for port in node.inputs()]
    return bool(inputs) and all(is_constant(item) for item in inputs)


def _before_moves(result: ov.Output) -> ov.Output:
    """Where values come from that only got other shapes since."""
    while _keeps_order(result.get_node()):
        result = result.get_node().input_value(0)
    return result


def _keeps_order(node: ov.Node) -> bool:
    """Whether a node gives a tensor another shape and leaves its values in their order."""
    if node.get_type_name() != "Transpose":
        return node.get_type_name() in _MOVES
    order = node.input_value(1).get_node()
    if order.get_type_name() != "Constant":
        return False
    shape = node.get_input_partial_shape(0)
    moved = [axis for axis in order.data.tolist() if shape[axis] != ov.Dimension(1)]
    return moved == sorted(moved)


def _name(port: ov.Output) -> str:
    return f"{port.get_node().get_friendly_name()}:{port.get_index()}"


def _reshaped(source: ov.Output, shape: Sequence[int]) -> ov.Output:
    return ops.reshape(source, ops.constant(np.array(shape)), False).output(0)


def _values(constant: ov.Output) -> NDArray[np.generic]:
    return cast(NDArray[np.generic], constant.get_node().data)


def _scalar(constant: ov.Output) -> float:
    """The only value of a constant that may have been converted."""
    node = constant.get_node()
    while node.get_type_name() in ("Convert", "ConvertLike"):
        node = node.input_value(0).get_node()
    return float(node.data.item()) if node.get_type_name() == "Constant" else float("nan")
