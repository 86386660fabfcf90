"""OpenVINO, imported in one place and without its telemetry.

`import openvino` reports itself to its makers through the package `openvino_telemetry` when it
finds it. What a user runs here is nobody's business; without that package OpenVINO falls back to a
stub of its own. Who imported openvino before us made that choice already.
"""

from __future__ import annotations

import sys
from typing import Any, cast

__all__ = ["apply_make_stateful_transformation", "ops", "ov", "paged_attention_transformation"]

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
