"""OpenVINO, imported in one place and without its telemetry.

`import openvino` reports itself to its makers through the package `openvino_telemetry` when it
finds it. What a user runs here is nobody's business; without that package OpenVINO falls back to a
stub of its own. Who imported openvino before us made that choice already.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

__all__ = [
    "apply_make_stateful_transformation",
    "convert_model",
    "ops",
    "ov",
    "paged_attention_transformation",
    "release_pages",
]

_silenced = "openvino" not in sys.modules and "openvino_telemetry" not in sys.modules
if _silenced:
    sys.modules["openvino_telemetry"] = cast(Any, None)  # an import of it fails
import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402
from openvino._offline_transformations import (  # noqa: E402
    apply_make_stateful_transformation,
    paged_attention_transformation,
)

if _silenced:
    del sys.modules["openvino_telemetry"]

_MADV_DONTNEED = 4


def convert_model(module: nn.Module, example_input: tuple[Tensor, ...]) -> ov.Model:
    """`openvino.convert_model`, which sets up the root logger and leaves it so when it fails.

    Every warning of this process, ours included, would be lost after that.
    """
    root = logging.getLogger()
    level, filters, handlers = root.level, list(root.filters), list(root.handlers)
    try:
        return ov.convert_model(module, example_input=example_input)
    finally:
        root.setLevel(level)
        root.filters, root.handlers = filters, handlers


def release_pages(file: Path) -> None:
    """Take a read-only mapped file's pages out of this process (Linux; elsewhere nothing happens).

    Compiling copies the weights into the kernels' own order; what was read for that would stay
    resident as long as a single constant, such as the embeddings, is still used in place. Its pages
    come back one by one when they are touched.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        # Only what cannot have been written to: for that, the call would lose data.
        if len(fields) == 6 and fields[5] == str(file) and fields[1].startswith("r--"):
            first, end = (int(part, 16) for part in fields[0].split("-"))
            libc.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(_MADV_DONTNEED)
            )
