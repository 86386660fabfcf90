"""Where the other systems live: their packages and their copies of the models.

    FOLDER/venv     a virtual environment with benchmarks/peers-requirements.txt
    FOLDER/models   the pair in the formats of OpenVINO GenAI and llama.cpp, float32
    FOLDER/logs     what the systems printed

Nothing here is needed by the product, and nothing is put into its environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
REQUIREMENTS = BENCHMARKS / "peers-requirements.txt"
COMPILED = "llama-cpp-python"
COMPILE_LIMIT_S = 1800
PACKAGES = {
    "transformers": ("transformers", "torch"),
    "openvino-genai": ("openvino-genai", "openvino-tokenizers"),
    "openvino-genai-default-kv": ("openvino-genai", "openvino-tokenizers"),
    "llama-cpp": ("llama-cpp-python",),
}
"""The distributions that a system must find in the environment; Outrider needs none."""


class NotReadyError(Exception):
    """A system that cannot run here; the message says why and what to do."""


@dataclass(frozen=True)
class PairFiles:
    """A target and its drafting model as Outrider reads them.

    Attributes:
        target, drafter: float32 model folders; `drafter` is None for a pair without one.
        target_gguf: the file the target was imported from, None if there is none.
    """

    target: Path
    drafter: Path | None
    target_gguf: Path | None


class PeerEnvironment:
    """The folder of the peers; made and filled by `set_up`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self._versions: dict[str, str] | None = None
        self._failures: dict[str, str] = {}

    def set_up(self, systems: list[str], pair: PairFiles) -> None:
        """Install and convert what `systems` need; what is there stays. Failures are remembered."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".gitignore").write_text("*\n")
        self._install(with_compiled="llama-cpp" in systems)
        for system in systems:
            if system in self._failures or system not in PACKAGES:
                continue
            try:
                self._convert(system, pair)
            except subprocess.CalledProcessError as error:
                last = (error.stderr or "").strip().splitlines()[-1:]
                self._failures[system] = f"conversion failed: {' '.join(last)[:300]}"

    def check(self, system: str, pair: PairFiles) -> None:
        """Raise NotReadyError if `system` cannot be started."""
        if system in self._failures:
            raise NotReadyError(self._failures[system])
        for package in PACKAGES.get(system, ()):
            if package not in self.versions():
                raise NotReadyError(f"{package} is not installed; run with --setup")
        for path in self._converted(system, pair):
            if not path.exists():
                raise NotReadyError(f"{path.name} is not converted yet; run with --setup")

    def models(self, system: str, pair: PairFiles) -> tuple[Path, Path | None]:
        """Target and drafter in the format that `system` reads."""
        converted = self._converted(system, pair)
        if not converted:
            return pair.target, pair.drafter
        return converted[0], converted[1] if len(converted) > 1 else None

    def versions(self) -> Mapping[str, str]:
        """Version of every distribution in the environment; empty if there is none."""
        if self._versions is None:
            self._versions = {}
            if self.python.exists():
                listing = subprocess.run(
                    [self.python, "-m", "pip", "list", "--format", "json"],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                for entry in json.loads(listing.stdout):
                    self._versions[entry["name"].lower().replace("_", "-")] = entry["version"]
        return self._versions

    def _install(self, *, with_compiled: bool) -> None:
        stamp = self.folder / "installed.txt"
        lines = REQUIREMENTS.read_text().splitlines()
        wanted = [line for line in lines if line.strip() and not line.startswith("#")]
        compiled = [line for line in wanted if line.startswith(COMPILED)]
        plain = [line for line in wanted if line not in compiled]
        done = stamp.read_text().splitlines() if stamp.exists() else []
        if not self.python.exists():
            tell(f"making an environment in {self.folder.name}")
            venv.create(self.folder / "venv", with_pip=True)
            done = []
        if not set(plain) <= set(done):
            tell("installing the peers' packages")
            self._pip(plain)
            done = [*done, *plain]
        if with_compiled and not set(compiled) <= set(done):
            tell(f"compiling {COMPILED}; this takes a while")
            try:
                self._pip(compiled, limit_s=COMPILE_LIMIT_S)
                done = [*done, *compiled]
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                self._failures["llama-cpp"] = f"does not install: {type(error).__name__}"
        stamp.write_text("\n".join(done) + "\n")
        self._versions = None

    def _pip(self, requirements: list[str], *, limit_s: float | None = None) -> None:
        pip = [str(self.python), "-m", "pip", "install", "--quiet"]
        subprocess.run(
            ["nice", "-n", "10", *pip, *requirements],
            check=True,
            timeout=limit_s,
            stdout=sys.stderr,
            env=dict(os.environ) | {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},  # images: not measured
        )

    def _convert(self, system: str, pair: PairFiles) -> None:
        if system.startswith("openvino-genai"):
            sources, kind = [pair.target, pair.drafter], "openvino"
        elif system == "llama-cpp" and pair.target_gguf is not None:
            sources, kind = [pair.target_gguf], "gguf"
        else:
            return
        # `sources` and the converted paths are in the same order.
        for source, out in zip(sources, self._converted(system, pair), strict=False):
            if source is None or out.exists():
                continue
            tell(f"converting {source.name} for {system}")
            subprocess.run(
                ["nice", "-n", "10", self.python, "-m", "peer_systems.convert", kind, source, out],
                check=True,
                env=clean_environment(),
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                text=True,
            )

    def _converted(self, system: str, pair: PairFiles) -> list[Path]:
        """The target and, if there is one, the drafter; empty if `system` reads the originals."""
        folder = self.folder / "models"
        if system.startswith("openvino-genai"):
            sources = [source for source in (pair.target, pair.drafter) if source is not None]
            return [folder / f"{source.name}.openvino" for source in sources]
        if system == "llama-cpp":
            if pair.target_gguf is None:
                raise NotReadyError("llama.cpp needs the target as a .gguf file")
            return [folder / f"{pair.target.name}.gguf"]
        return []


def clean_environment(num_threads: int | None = None) -> dict[str, str]:
    """The environment variables of a child: it finds these modules and asks no hub."""
    variables = dict(os.environ)
    paths = [str(BENCHMARKS), *filter(None, [variables.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    variables["HF_HUB_OFFLINE"] = "1"
    variables["OPENVINO_TELEMETRY_OPT_OUT"] = "1"
    variables["PYTHONWARNINGS"] = "ignore"
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    return variables


def tell(line: str) -> None:
    """Show one line of progress."""
    print(line, file=sys.stderr, flush=True)
