"""The driver's end of a system's process."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

from peer_systems.environment import clean_environment
from peer_systems.serve import Job, Models

MODULES = {
    "outrider": ["peer_systems.system_outrider"],
    "outrider-int8-drafter": ["peer_systems.system_outrider"],
    "transformers": ["peer_systems.system_transformers"],
    "openvino-genai": ["peer_systems.system_openvino_genai"],
    "openvino-genai-default-kv": ["peer_systems.system_openvino_genai"],
    "llama-cpp": ["peer_systems.system_llama_cpp"],
}
EXTRA_ARGUMENTS = {
    "openvino-genai-default-kv": ["--default-kv"],
    "outrider-int8-drafter": ["--int8-drafter"],
}
ANSWER_LIMIT_S = 3600


class WorkerError(Exception):
    """A system answered with an error, or its process ended; the message says which."""


class Worker:
    """A running system."""

    def __init__(self, system: str, python: Path, models: Models, log: Path) -> None:
        self.system = system
        self.peak_rss_bytes = 0
        self.facts: dict[str, str] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [
                    str(python),
                    "-m",
                    *MODULES[system],
                    json.dumps(asdict(models)),
                    *EXTRA_ARGUMENTS.get(system, []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=clean_environment(models.num_threads),
                start_new_session=True,  # Ctrl-C is for the driver
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def open(self, mode: str) -> None:
        """Load what `mode` needs.

        Raises:
            WorkerError: the system cannot.
        """
        facts = self._ask({"do": "open", "mode": mode})["facts"]
        assert isinstance(facts, dict)
        self.facts |= facts

    def run(self, job: Job) -> dict[str, object]:
        """The fields of `serve.Run` of one generation.

        Raises:
            WorkerError: it failed.
        """
        return self._ask({"do": "run", **asdict(job)})

    def close(self) -> None:
        """End the process and wait for it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: dict[str, object]) -> dict[str, object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._how_it_ended()) from None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_LIMIT_S)
        if not ready:
            self._process.kill()
            raise WorkerError(f"no answer within {ANSWER_LIMIT_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._how_it_ended())
        answer = json.loads(line)
        assert isinstance(answer, dict)
        self.peak_rss_bytes = max(self.peak_rss_bytes, answer.pop("peak_rss_bytes"))
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _how_it_ended(self) -> str:
        code = self._process.wait(timeout=60)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended with {how}: {' / '.join(said[-1:])[:300]}"
