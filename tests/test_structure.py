"""The house: layers, public names, light imports. The checks are themselves checked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import outrider

SOURCE = Path(outrider.__file__).parent

LAYERS = [
    {"errors", "randomness", "theory", "text", "threads"},
    {"sampling", "verification"},
    {"models"},
    {"costs", "drafters", "draft_length", "pass_width"},
    {"requests", "decoding"},
    {"pair"},
    {"measure", "audit", "training"},
    {"server", "cluster"},
    {"cli"},
    {"__main__", "__init__"},
]
FRAMEWORKS = {
    "transformers": {
        "training/distillation.py",
        "training/learning.py",
        "training/student.py",
        "models/architecture.py",
        "models/causal.py",
        "models/checkpoints.py",
        "models/conversion.py",
        "models/graph.py",
        "models/seq2seq.py",
    },
    "openvino": {"models/openvino.py"},
}
ENGINES = {"causal", "conversion", "fusion", "graph", "openvino", "paged", "seq2seq", "toy"}
"""Of `models`: what only the model seam may reach. What is measured, is measured through it."""


def imports(source: str) -> set[str]:
    """Every module named in an import statement, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def without_typing_only(source: str) -> str:
    """`source` without its `if TYPE_CHECKING:` blocks, which never run."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(tree))


def room(path: str) -> str:
    return path.removesuffix(".py").split("/")[0]


def is_room(module: str) -> bool:
    """Whether a dotted name leads into a room of the package (and is not a name in __init__)."""
    parts = module.split(".")
    if parts[0] != "outrider" or len(parts) < 2:
        return False
    return (SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").exists()


def layer(name: str) -> int:
    for number, rooms in enumerate(LAYERS):
        if name in rooms:
            return number
    raise AssertionError(f"{name} has no layer")


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of one file of the package."""
    found = []
    for module in sorted(imports(without_typing_only(source))):
        parts = module.split(".")
        above = is_room(module) and layer(parts[1]) > layer(room(path))
        if above and parts[1] != room(path):
            found.append(f"{path} imports {module}, which is above it")
        is_engine = parts[:2] == ["outrider", "models"] and ENGINES & set(parts[2:3])
        if is_engine and room(path) == "measure":
            found.append(f"{path} imports {module}, an engine")
        for framework, allowed in FRAMEWORKS.items():
            if parts[0] == framework and path not in allowed:
                found.append(f"{path} imports {framework}")
    return found


def files() -> list[str]:
    return sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", files())
def test_every_file_imports_only_from_its_own_layer_or_below(path: str) -> None:
    assert violations(path, (SOURCE / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("verification.py", "from outrider.decoding import Engine"),
        ("models/causal.py", "from outrider.drafters import Drafter"),
        ("sampling.py", "import outrider.models"),
        ("drafters/lookup.py", "def f():\n    from outrider import pair"),
        ("decoding.py", "import transformers"),
        ("drafters/model.py", "from transformers import AutoModel"),
        ("theory.py", "from outrider.sampling import History"),
        ("text.py", "import openvino.properties"),
        ("measure/cost.py", "from outrider.models.paged import PagedModel"),
        ("measure/texts.py", "def f():\n    import outrider.models.causal"),
    ],
)
def test_a_planted_violation_is_found(path: str, line: str) -> None:
    assert violations(path, line)


def test_an_import_for_the_type_checker_alone_is_no_violation() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import outrider.decoding"
    assert violations("errors.py", source) == []


def test_every_room_of_the_house_has_a_layer() -> None:
    assert [path for path in files() if layer(room(path)) < 0] == []


def test_theory_needs_nothing_but_the_standard_library() -> None:
    modules = {name.split(".")[0] for name in imports((SOURCE / "theory.py").read_text())}
    assert modules - {"outrider"} <= set(sys.stdlib_module_names)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_outrider_imports_no_heavy_library() -> None:
    code = (
        "import sys, outrider\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_the_command_lines_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['outrider', '--help']\n"
        "from outrider.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    assert run_python(code).splitlines()[-1] == "False"


PUBLIC = [
    "ContextOverflow",
    "Drafter",
    "Engine",
    "Event",
    "GenerationError",
    "Model",
    "ModelNotFound",
    "NothingToDraw",
    "NumericalError",
    "OutriderError",
    "Pair",
    "Request",
    "Result",
    "Round",
    "SamplingPolicy",
    "Statistics",
    "TokenLogprob",
    "UnsupportedModel",
    "UsageError",
    "VocabularyMismatch",
    "load",
    "load_model",
    "make_drafter",
]


def test_the_public_names_are_these_and_all_of_them_resolve() -> None:
    assert outrider.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(outrider, name).__doc__, name
    assert set(PUBLIC) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="no attribute 'verify'"):
        _ = outrider.verify  # type: ignore[attr-defined]


def test_every_module_says_what_it_exports_and_documents_it() -> None:
    import importlib

    for path in files():
        if path in ("__main__.py", "measure/__init__.py", "training/__init__.py"):
            continue
        name = "outrider." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        module = importlib.import_module(name.removesuffix(".__init__"))
        assert module.__doc__, path
        for exported in module.__all__:
            value = getattr(module, exported)
            if callable(value) and getattr(value, "__module__", "").startswith("outrider"):
                assert value.__doc__, f"{path}: {exported}"


def test_no_public_function_takes_or_returns_any() -> None:
    for path in files():
        tree = ast.parse((SOURCE / path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert "Any" not in ast.unparse(node.args).split(), f"{path}: {node.name}"
