"""Decoder-only transformers models on a CPU at the speed of memory (the `openvino` engine).

The model is an OpenVINO graph with paged attention (`conversion`), its cache our own block tables
(`blocks`). A pass takes the tokens of all feeds end to end, whatever their lengths; where each
token's keys and values lie is said by number. Rolling back is a smaller number.

Keys and values have the precision that is computed in. OpenVINO's own default, 8 bits, is a
different model than the one it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import UnsupportedModel, UsageError
from outrider.models import CachedSequence, Dtype, Feed, Prompt
from outrider.models.architecture import context_length, form, refuse_unsupported
from outrider.models.blocks import BlockPool, BlockTable
from outrider.models.checkpoints import find_checkpoint, load_config, load_tokenizer, to_stderr
from outrider.models.graph import Graph, kept_graph, paged
from outrider.models.openvino import ov, release_pages
from outrider.models.probe import plain_logits, probe, probe_ids
from outrider.text import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PagedModel", "check", "computes_bfloat16", "load_paged"]

_BLOCK_SIZE = 32  # tokens; OpenVINO's CPU kernels take no other
_CHUNK = 512  # most tokens of one sequence in one pass, so that activations stay small
_LEAST_KV_MEMORY = 2 * 2**30
_PROBE_LENGTH = 80  # beyond two blocks
_PROBE_MEMORY = 2**30
_TOLERANCE = 1e-3


class _Piece(NamedTuple):
    """Tokens of one sequence for one pass: `num_kept` rows wanted of `tokens` behind `past`."""

    table: BlockTable
    past: int
    tokens: Sequence[int]
    num_kept: int


class PagedModel:
    """A converted model behind the `Model` seam.

    Args:
        graph: from `conversion`.
        name: what the user called it.
        dtype: what the weights were rounded to.
        context_length: most tokens a sequence can hold.
        tokenizer: None if only ids are wanted.
        eos_ids: ids that end a text.
        kv_memory: bytes for keys and values; None takes 2 GiB, or what one sequence of full length
            needs if that is more, but no more than half of the memory that is free.
        form: see `architecture.form`.

    Attributes:
        pool: the blocks of its cache.
        weights: the file its weights came from, if they came from one.
        kv_bytes_per_token: memory that a token's keys and values take in all layers.

    Raises:
        UnsupportedModel: the graph does not take paged attention.
        UsageError: `kv_memory` is not enough for one block.
    """

    engine = "openvino"
    shares_prefixes = True

    def __init__(
        self,
        graph: Graph,
        *,
        name: str,
        dtype: str,
        context_length: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: frozenset[int] = frozenset(),
        kv_memory: int | None = None,
        form: str = "",
    ) -> None:
        self.name = name
        self.form = form
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.context_length = context_length
        self.weights = graph.weights
        precision = "bf16" if dtype != "float32" and computes_bfloat16() else "f32"
        compiled = ov.Core().compile_model(
            paged(graph, float32=precision == "f32"),
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                # Threads bound to cores wait for whatever else runs there.
                "ENABLE_CPU_PINNING": False,
                # Kernels are kept for every width of a pass that came up, and widths change.
                "CPU_RUNTIME_CACHE_CAPACITY": 5000,
                # Otherwise int8 weights would meet activations rounded to 8 bits as well.
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            },
        )
        self._request = compiled.create_infer_request()
        self._types = {
            port.get_any_name(): port.element_type.to_dtype()
            for port in compiled.inputs
            if "_cache." not in port.get_any_name()
        }
        self._inputs: dict[str, NDArray[np.generic]] = {}
        self._longest = np.zeros((), dtype=np.int32)
        self._request.set_tensor("max_context_len", ov.Tensor(self._longest, shared_memory=True))
        self.vocab_size = compiled.outputs[0].partial_shape[-1].get_length()
        self._caches = self._allocate(compiled, kv_memory)
        self.pool = BlockPool(len(self._caches[0]), block_size=_BLOCK_SIZE, copy=self._copy_block)
        self._warm_up()
        if graph.weights is not None:
            release_pages(graph.weights)

    def start(self, prompt: Prompt) -> BlockTable:
        """A sequence that has cached whatever another one has cached of this prompt's beginning."""
        return self.pool.open(prompt.ids)

    def room(self, sequence: CachedSequence) -> int:
        """What the context has left, or the blocks that no live sequence needs."""
        table = cast(BlockTable, sequence)
        return min(self.context_length - table.length, self.pool.room(table))

    def forget(self) -> None:
        """Give up the blocks of ended sequences."""
        self.pool.clear()

    def score(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits [sum of keep, V] after the last `keep` tokens of every feed; float32.

        Raises:
            CacheFull: there is no memory for these tokens; nothing was fed.
        """
        pieces = []
        for sequence, tokens, keep in feeds:
            table = cast(BlockTable, sequence)
            assert 1 <= keep <= len(tokens), (keep, len(tokens))
            assert table.length + len(tokens) <= self.context_length, "fed past the context's end"
            pieces.append(_Piece(table, table.length, tokens, keep))
        self.pool.append([(piece.table, piece.tokens) for piece in pieces])
        try:
            return self._run(pieces)
        except BaseException:
            for piece in pieces:
                piece.table.rollback(piece.past)
            raise

    def _warm_up(self) -> None:
        """OpenVINO brings some weights into their final order when it first needs them."""
        table = self.start(Prompt([0]))
        for num_tokens in (1, 8):
            self.score([Feed(table, [0] * min(num_tokens, self.context_length), 1)])
            table.rollback(0)
        table.close()

    def _run(self, pieces: Sequence[_Piece]) -> Tensor:
        """One pass, after passes of their own for all but the last part of every long feed."""
        last: list[_Piece] = []
        rows: list[list[Tensor]] = []
        for table, past, tokens, num_kept in pieces:
            begun: list[Tensor] = []
            while len(tokens) > _CHUNK:
                kept = max(0, num_kept - (len(tokens) - _CHUNK))
                logits = self._pass([_Piece(table, past, tokens[:_CHUNK], max(1, kept))])
                if kept:
                    begun.append(logits)
                past, tokens, num_kept = past + _CHUNK, tokens[_CHUNK:], num_kept - kept
            rows.append(begun)
            last.append(_Piece(table, past, tokens, num_kept))
        logits = self._pass(last)
        if not any(rows):
            return logits
        ordered, first = [], 0
        for begun, piece in zip(rows, last, strict=True):
            ordered += [*begun, logits[first : first + piece.num_kept]]
            first += piece.num_kept
        return torch.cat(ordered)

    def _pass(self, pieces: Sequence[_Piece]) -> Tensor:
        """Logits [sum of num_kept, V] of one inference; block tables reach to the pieces' ends."""
        tokens: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        blocks: list[int] = []
        begins, block_begins, longest = [0], [0], 0
        for table, past, new, num_kept in pieces:
            end = past + len(new)
            tokens.extend(new)
            positions.extend(range(past, end))
            kept.extend(range(len(tokens) - num_kept, len(tokens)))
            blocks.extend(table.blocks[: -(-end // _BLOCK_SIZE)])
            begins.append(len(tokens))
            block_begins.append(len(blocks))
            longest = max(longest, end)
        for name, values in {
            "input_ids": tokens,
            "position_ids": positions,
            "kept_rows": kept,
            "past_lens": [piece.past for piece in pieces],
            "subsequence_begins": begins,
            "block_indices": blocks,
            "block_indices_begins": block_begins,
        }.items():
            self._fill(name, values)
        self._longest[...] = longest
        self._request.infer()
        # The output's memory is written again by the next pass.
        logits = np.array(self._request.get_output_tensor(0).data, dtype=np.float32)
        return torch.from_numpy(logits.reshape(len(kept), self.vocab_size))

    def _fill(self, name: str, values: Sequence[int]) -> None:
        """Give an input its values. One of the same length as before is written over in place.

        To set a tensor takes 20 microseconds, to change the shape of one that is set, 45: of the
        step of a small drafter a fifth.
        """
        array = self._inputs.get(name)
        if array is None or len(array) != len(values):
            array = self._inputs[name] = np.empty(len(values), dtype=self._types[name])
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        array[:] = values

    def _allocate(
        self, compiled: ov.CompiledModel, kv_memory: int | None
    ) -> list[NDArray[np.generic]]:
        """Blocks for keys and values per layer; the machine gives the memory when they are used."""
        ports = [port for port in compiled.inputs if "_cache." in port.get_any_name()]
        shapes = {
            port.get_any_name(): [size.get_length() for size in list(port.partial_shape)[1:]]
            for port in ports
        }
        for shape in shapes.values():
            assert shape[1] == _BLOCK_SIZE, shape
        per_block = sum(
            int(np.prod(shapes[port.get_any_name()])) * port.element_type.size for port in ports
        )
        self.kv_bytes_per_token = per_block // _BLOCK_SIZE
        if kv_memory is None:
            whole = per_block * -(-self.context_length // _BLOCK_SIZE)
            kv_memory = min(max(_LEAST_KV_MEMORY, whole), _free_memory() // 2)
        num_blocks = kv_memory // per_block
        if num_blocks < 1:
            raise UsageError(
                f"kv_memory must hold at least {_BLOCK_SIZE} tokens of {self.name}, "
                f"{per_block} bytes; got {kv_memory}"
            )
        caches: list[NDArray[np.generic]] = []
        for port in ports:
            kind, shape = port.element_type, [num_blocks, *shapes[port.get_any_name()]]
            # numpy has no bfloat16; to it, these are numbers of two bytes.
            cache = np.zeros(shape, dtype=np.uint16 if kind == ov.Type.bf16 else kind.to_dtype())
            caches.append(cache)
            self._request.set_tensor(port.get_any_name(), ov.Tensor(cache, shape, kind))
        return caches

    def _copy_block(self, source: int, target: int) -> None:
        for cache in self._caches:
            cache[target] = cache[source]


def load_paged(
    reference: str, *, dtype: Dtype = "auto", kv_memory: int | None = None
) -> PagedModel:
    """The paged model a reference names; see `models.load_model`.

    Raises:
        UnsupportedModel: it cannot be served exactly, or does not convert.
    """
    if dtype == "auto":
        dtype = "bfloat16" if computes_bfloat16() else "float32"
    checkpoint = find_checkpoint(
        reference, torch.bfloat16 if dtype == "bfloat16" else torch.float32
    )
    config = load_config(checkpoint)
    refuse_unsupported(config, reference)
    graph = kept_graph(checkpoint, config, dtype, check=check, notify=to_stderr)
    tokenizer = load_tokenizer(checkpoint)
    eos_ids = graph.eos_ids
    if not eos_ids and tokenizer is not None and tokenizer.eos_id is not None:
        eos_ids = frozenset([tokenizer.eos_id])
    return PagedModel(
        graph,
        name=reference,
        dtype=dtype,
        context_length=context_length(config),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        kv_memory=kv_memory,
        form=form(config),
    )


def check(graph: Graph, module: PreTrainedModel) -> None:
    """Refuse a graph whose logits are not those of the float32 model it was made from.

    Raises:
        UnsupportedModel: with the difference.
    """
    count = min(_PROBE_LENGTH, context_length(module.config))
    model = PagedModel(
        graph, name="probe", dtype="float32", context_length=count, kv_memory=_PROBE_MEMORY
    )
    ids = probe_ids(count, model.vocab_size)
    difference = probe(model, ids, plain_logits(module, ids))
    if not difference <= _TOLERANCE:
        raise UnsupportedModel(
            f"{module.config.model_type} converts, but its logits come out different by "
            f"{difference:.1e}"
        )


def _free_memory() -> int:
    """Bytes that can be taken without pushing anything out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 2 * _LEAST_KV_MEMORY


def computes_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16; without them it would be emulated."""
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
