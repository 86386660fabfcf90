"""Outrider beside what a user would pick instead, on the same prompts in one run.

    python benchmarks/peers.py --setup                          everything, default target
    python benchmarks/peers.py --quick --json                   under five minutes
    python benchmarks/peers.py --pair qwen --qwen-folder FOLDER --setup

Measured are Outrider, transformers' `generate`, OpenVINO GenAI and llama-cpp-python, each plain and
with the kinds of speculation it has. All get the same float32 weights, token ids, number of threads
and number of tokens (end tokens do not stop them) and sample the whole law. The time is that of the
whole call, the prompt's pass included, divided by the generated tokens.

The other systems live in an environment of their own, made by `--setup`; a system that cannot run
here is left out with its reason. With the default pair all systems stay loaded and take turns on
every prompt; the larger pair does not fit into memory so often, and its systems are started one
after the other in every repeat. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from outrider.models.checkpoints import default_gguf, find_checkpoint, load_tokenizer
from peer_systems.environment import NotReadyError, PairFiles, PeerEnvironment, tell
from peer_systems.report import (
    Contender,
    Measurement,
    failures,
    make_rows,
    make_settings,
    make_summary,
    markdown,
)
from peer_systems.serve import Job, Models
from peer_systems.workers import Worker, WorkerError
from provenance import provenance
from timing import read_bandwidth_gbs, read_weight_bytes

BENCHMARKS = Path(__file__).resolve().parent
PROMPTS = BENCHMARKS / "peer_systems" / "prompts.json"
RESULTS = BENCHMARKS / "results"
SYSTEMS = (
    "outrider",
    "outrider-int8-drafter",
    "transformers",
    "openvino-genai",
    "openvino-genai-default-kv",
    "llama-cpp",
)
MODES = ("plain", "draft-model", "lookup")
TASKS = (
    "chat",
    "code writing",
    "code editing",
    "summarising",
    "question answering",
    "translation",
)
MODES_OF_SYSTEM = {
    "outrider-int8-drafter": ("draft-model",),
    "openvino-genai-default-kv": ("plain",),
    "llama-cpp": ("plain", "lookup"),
}
PROCESSES = {
    "outrider": (MODES,),
    "transformers": (MODES,),
}
"""Modes that share a process because they share the target; elsewhere each has its own."""
DRAFT_LENGTHS: dict[tuple[str, str], tuple[int | None, ...]] = {
    ("transformers", "lookup"): (10,),  # its documentation's example; there is no default
    ("openvino-genai", "draft-model"): (3, 5, 8),
    ("openvino-genai", "lookup"): (5,),  # its samples' setting
    ("llama-cpp", "lookup"): (2, 10),  # what it advises for CPUs, and its default
}
"""Everywhere else the system's own default is measured."""
WARM_UP_TOKENS = 8
MOST_FAILURES = 2
"""A contender that failed so often at a temperature is not tried there again."""
PAUSE_S = 0.2
"""Between two runs: threads of the system before may still spin."""


@dataclass(frozen=True)
class PairDefaults:
    """How a pair is measured unless the command line says otherwise."""

    tokens: int
    repeats: int
    stay_loaded: bool
    guessed_ms_per_token: float


PAIRS = {
    "default": PairDefaults(64, 3, stay_loaded=True, guessed_ms_per_token=90),
    "qwen": PairDefaults(48, 1, stay_loaded=False, guessed_ms_per_token=350),
}
QUICK_TOKENS, QUICK_LIMIT_S = 24, 230


@dataclass(frozen=True)
class PromptIds:
    """A prompt as every system gets it."""

    task: str
    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Process:
    """A system's process and the contenders that run in it."""

    system: str
    contenders: tuple[Contender, ...]

    def __str__(self) -> str:
        modes = dict.fromkeys(contender.mode for contender in self.contenders)
        return f"{self.system} ({', '.join(modes)})"


class Journal:
    """Every finished measurement on disk, so that an interrupted run can go on."""

    def __init__(self, file: Path, conditions: dict[str, object], *, fresh: bool) -> None:
        self._file = file
        self.measurements: list[Measurement] = []
        if not fresh and file.exists():
            head, *lines = file.read_text().splitlines()
            if json.loads(head) == json.loads(json.dumps(conditions)):
                self.measurements = [_read_measurement(line) for line in lines]
        self.num_resumed = len(self.measurements)
        if not self.measurements:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(conditions) + "\n")

    def add(self, measured: Measurement) -> None:
        self.measurements.append(measured)
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(measured)) + "\n")

    def has(self, contender: Contender, prompt: PromptIds, temperature: float, turn: int) -> bool:
        wanted = (contender, prompt.name, temperature, turn)
        return any(
            (one.contender, one.prompt, one.temperature, one.repeat) == wanted
            for one in self.measurements
        )

    def is_hopeless(self, contender: Contender, temperature: float) -> bool:
        """Whether it failed too often to be tried again."""
        failed = [
            one
            for one in self.measurements
            if one.contender == contender and one.temperature == temperature and one.error
        ]
        return len(failed) >= MOST_FAILURES

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)


class Crew:
    """The processes that are loaded at the moment; restarts those that died."""

    def __init__(
        self, environment: PeerEnvironment, pair: PairFiles, models: Models, warm_up: PromptIds
    ) -> None:
        self._environment = environment
        self._pair = pair
        self._models = models
        self._warm_up = warm_up
        self._workers: dict[Process, Worker] = {}
        self.facts: dict[str, dict[str, str]] = {}
        self.peak_rss_bytes: dict[str, int] = {}

    def worker(self, process: Process) -> Worker:
        """The process, loaded and warm.

        Raises:
            WorkerError: it cannot be loaded.
        """
        if process in self._workers and self._workers[process].is_alive:
            return self._workers[process]
        tell(f"  loading {process}")
        system = process.system
        target, drafter = self._environment.models(system, self._pair)
        models = replace(
            self._models, target=str(target), drafter=None if drafter is None else str(drafter)
        )
        is_ours = system.startswith("outrider")
        python = Path(sys.executable) if is_ours else self._environment.python
        log = self._environment.folder / "logs" / f"{system}.{process.contenders[0].mode}.log"
        worker = Worker(system, python, models, log)
        self._workers[process] = worker
        for contender in {one.mode: one for one in process.contenders}.values():
            worker.open(contender.mode)
            worker.run(_job(contender, self._warm_up, WARM_UP_TOKENS, temperature=0.0, seed=0))
        self.facts[system] = self.facts.get(system, {}) | worker.facts
        return worker

    def close(self, process: Process) -> None:
        """End a process, if it runs."""
        worker = self._workers.pop(process, None)
        if worker is not None:
            worker.close()
            name = str(process)
            peak = max(self.peak_rss_bytes.get(name, 0), worker.peak_rss_bytes)
            self.peak_rss_bytes[name] = peak

    def close_all(self) -> None:
        for process in list(self._workers):
            self.close(process)


@dataclass
class Progress:
    """What is left, and how long it will take."""

    num_left: int
    deadline: float
    spent_s: float = 0.0
    num_done: int = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def tell_one(self, measured: Measurement) -> None:
        self.num_left -= 1
        where = f"T={measured.temperature:g} {measured.prompt} #{measured.repeat + 1}"
        if measured.error is not None:
            tell(f"  {measured.contender} {where}: failed: {measured.error}")
            return
        self.num_done += 1
        self.spent_s += measured.wall_s + PAUSE_S
        left_s = self.num_left * self.spent_s / self.num_done
        tell(
            f"  {measured.contender} {where}: {measured.ms_per_token:.1f} ms per token; "
            f"{self.num_left} runs left, about {left_s / 60:.0f} min"
        )


def measure(
    crew: Crew,
    processes: Sequence[Process],
    prompts: Sequence[PromptIds],
    arguments: argparse.Namespace,
    journal: Journal,
    progress: Progress,
    bandwidths: list[float],
) -> None:
    """Run everything that the journal does not hold yet, by turns.

    Contenders that are loaded together take turns on every prompt and temperature; the order is
    turned round from one prompt to the next.
    """
    stay_loaded = PAIRS[arguments.pair].stay_loaded
    crews = [list(processes)] if stay_loaded else [[process] for process in processes]
    for turn in range(arguments.repeats):
        for members in crews if turn % 2 == 0 else crews[::-1]:
            order = [(process, one) for process in members for one in process.contenders]
            for prompt in prompts:
                for temperature in arguments.temperatures:
                    for process, contender in order:
                        if progress.is_over:
                            crew.close_all()
                            return
                        if journal.has(contender, prompt, temperature, turn):
                            continue
                        if journal.is_hopeless(contender, temperature):
                            progress.num_left -= 1
                            continue
                        job = _job(
                            contender, prompt, arguments.tokens, temperature, seed=1000 * turn + 1
                        )
                        measured = _measure_one(crew, process, contender, prompt, job, turn)
                        journal.add(measured)
                        progress.tell_one(measured)
                        time.sleep(PAUSE_S)
                    order.reverse()
            if not stay_loaded:
                for process in members:
                    crew.close(process)
        bandwidths.append(read_bandwidth_gbs(arguments.threads))
    crew.close_all()


def _measure_one(
    crew: Crew, process: Process, contender: Contender, prompt: PromptIds, job: Job, turn: int
) -> Measurement:
    blank = Measurement(contender, prompt.task, prompt.name, job.temperature, turn)
    try:
        got = crew.worker(process).run(job)
    except WorkerError as error:
        crew.close(process)  # what an error leaves behind is not measured
        return replace(blank, error=str(error))
    measured = replace(blank, **(got | {"ids": tuple(got["ids"])}))  # type: ignore[arg-type]
    if len(measured.ids) != job.num_tokens:
        told = f"gave {len(measured.ids)} tokens instead of {job.num_tokens}"
        return replace(blank, error=told)
    return measured


def _job(
    contender: Contender, prompt: PromptIds, num_tokens: int, temperature: float, seed: int
) -> Job:
    return Job(
        contender.mode, contender.draft_length, list(prompt.ids), num_tokens, temperature, seed
    )


def _read_measurement(line: str) -> Measurement:
    values = json.loads(line)
    values["contender"] = Contender(**values["contender"])
    return Measurement(**(values | {"ids": tuple(values["ids"])}))


def find_pair(arguments: argparse.Namespace) -> PairFiles:
    """The pair's float32 folders; `.gguf` files are imported as the product does it."""
    if arguments.pair == "default":
        target = Path(find_checkpoint("default", torch.float32).source)
        if not target.is_dir():
            raise SystemExit("the default target is not on this machine; run `make setup` first")
        return PairFiles(target, None, default_gguf())
    if arguments.qwen_folder is None:
        raise SystemExit("--pair qwen needs --qwen-folder: where the pair's two .gguf files lie")
    files = []
    for size in ("1.5b", "0.5b"):
        found = sorted(arguments.qwen_folder.glob(f"*{size}*.gguf"))
        if not found:
            raise SystemExit(f"--qwen-folder holds no *{size}*.gguf file")
        files.append(found[0])
    target, drafter = (Path(find_checkpoint(str(file), torch.float32).source) for file in files)
    return PairFiles(target, drafter, files[0])


def read_prompts(pair: PairFiles, tasks: Sequence[str], per_task: int) -> list[PromptIds]:
    """The first `per_task` prompts of every one of `tasks` in the target's chat format."""
    checkpoint = find_checkpoint(str(pair.target), torch.float32)
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    entries = json.loads(PROMPTS.read_text(encoding="utf-8"))
    prompts = []
    # One prompt of every task before the second of any: a run that is cut short has seen all.
    for index in range(per_task):
        for task in tasks:
            for entry in [entry for entry in entries if entry["task"] == task][index : index + 1]:
                ids = tokenizer.encode_chat([{"role": "user", "content": entry["text"]}])
                prompts.append(PromptIds(task, entry["name"], tuple(ids)))
    return prompts


def plan_processes(
    environment: PeerEnvironment, pair: PairFiles, arguments: argparse.Namespace
) -> tuple[list[Process], list[dict[str, str]]]:
    """The processes that can run, and what cannot with its reason."""
    processes, not_run = [], []
    for system in arguments.systems:
        modes = [
            mode
            for mode in MODES_OF_SYSTEM.get(system, MODES)
            if mode in arguments.modes and f"{system}:{mode}" not in arguments.skip
        ]
        if not modes:
            continue
        if pair.drafter is None:
            modes = [mode for mode in modes if mode != "draft-model"]
        try:
            environment.check(system, pair)
        except NotReadyError as reason:
            not_run += [{"system": system, "mode": mode, "reason": str(reason)} for mode in modes]
            continue
        for shared in PROCESSES.get(system, tuple((mode,) for mode in MODES)):
            contenders = tuple(
                Contender(system, mode, length)
                for mode in modes
                if mode in shared
                for length in _draft_lengths(system, mode, arguments)
            )
            if contenders:
                processes.append(Process(system, contenders))
    return processes, not_run


def _draft_lengths(system: str, mode: str, arguments: argparse.Namespace) -> Sequence[int | None]:
    if system.startswith("outrider") and mode != "plain" and arguments.gammas:
        return tuple(arguments.gammas)
    if (system, mode) == ("openvino-genai", "draft-model") and arguments.draft_lengths:
        return tuple(arguments.draft_lengths)
    return DRAFT_LENGTHS.get((system, mode), (None,))


def make_results(
    arguments: argparse.Namespace,
    journal: Journal,
    crew: Crew,
    pair: PairFiles,
    not_run: Sequence[dict[str, str]],
    bandwidths: Sequence[float],
    *,
    was_cut: bool,
) -> dict[str, object]:
    """Everything that is saved and printed."""
    measurements = journal.measurements
    weight_bytes = read_weight_bytes(pair.target)
    bandwidth = max(bandwidths)
    notes = [f"{one['system']} {one['mode']} did not run: {one['reason']}" for one in not_run]
    notes += [
        f"{one['system']} {one['mode']} (draft length {one['draft_length'] or 'default'}) failed "
        f"at temperature {one['temperature']} in {one['failed']} of {one['tried']} runs: "
        f"{one['reason']}"
        for one in failures(measurements)
    ]
    if was_cut:
        notes.append("The time limit ended the run before all prompts were measured.")
    if journal.num_resumed:
        notes.append(f"{journal.num_resumed} measurements are from before an interruption.")
    if any(one["system"] == "openvino-genai-default-kv" for one in make_summary(measurements)):
        notes.append(
            "openvino-genai-default-kv keeps its cache in the 8 bits it takes by default: another "
            "precision than all others, shown for comparison."
        )
    return {
        "title": f"Outrider and its peers, {arguments.pair} pair, float32",
        "rows": make_rows(measurements),
        "summary": make_summary(measurements),
        "settings": make_settings(measurements),
        "not_run": list(not_run),
        "notes": notes,
        "machine": {
            "read_gb_per_s": round(bandwidth, 2),
            "bandwidth_runs": len(bandwidths),
            "all_read_gb_per_s": [round(value, 2) for value in bandwidths],
            "weight_bytes": weight_bytes,
            "weight_read_ms": round(weight_bytes / bandwidth / 1e6, 2),
        },
        "memory": [
            {"process": name, "peak_rss_mb": round(peak / 1e6)}
            for name, peak in crew.peak_rss_bytes.items()
        ],
        "provenance": provenance(arguments, systems=crew.facts, target=pair.target.name),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pair", choices=tuple(PAIRS), default="default")
    add("--qwen-folder", type=Path, help="folder of the Qwen pair's two .gguf files")
    add("--quick", action="store_true", help="default pair, one prompt a task, under five minutes")
    add("--setup", action="store_true", help="first install and convert what is missing")
    add("--env", type=Path, default=BENCHMARKS.parent / ".peers", help="the peers' folder")
    add("--engine", default="auto", help="Outrider's engine")
    add("--systems", nargs="+", choices=SYSTEMS, help="default: all")
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--skip", nargs="+", default=(), metavar="SYSTEM:MODE", help="leave these out")
    add("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    add("--gammas", nargs="+", type=int, help="Outrider's draft lengths; default: its own")
    add("--draft-lengths", nargs="+", type=int, help="GenAI's, with a draft model")
    add("--tokens", type=int, help="tokens of every run")
    add("--repeats", type=int)
    add("--tasks", nargs="+", choices=TASKS, default=TASKS)
    add("--prompts-per-task", type=int, default=2)
    add("--threads", type=int, default=os.cpu_count())
    add("--time-limit", type=float, help="seconds after which no new measurement begins")
    add("--label", default="", help="end of the result files' names")
    add("--fresh", action="store_true", help="forget what an interrupted run measured")
    add("--json", action="store_true", help="the results as the last line of stdout")
    arguments = parser.parse_args()
    defaults = PAIRS[arguments.pair]
    if arguments.quick:
        if arguments.pair != "default":
            parser.error("--quick measures the default pair; leave out --pair")
        defaults = replace(defaults, tokens=QUICK_TOKENS, repeats=1)
        arguments.prompts_per_task = 1
        arguments.time_limit = arguments.time_limit or QUICK_LIMIT_S
    if arguments.systems is None:
        left_out = "openvino-genai-default-kv" if arguments.quick else None
        arguments.systems = [system for system in SYSTEMS if system != left_out]
    arguments.tokens = arguments.tokens or defaults.tokens
    arguments.repeats = arguments.repeats or defaults.repeats
    return arguments


def main() -> None:
    arguments = parse()
    begun = time.monotonic()
    pair = find_pair(arguments)
    environment = PeerEnvironment(arguments.env.resolve())
    if arguments.setup:
        environment.set_up(arguments.systems, pair)
        begun = time.monotonic()
    prompts = read_prompts(pair, arguments.tasks, arguments.prompts_per_task)
    processes, not_run = plan_processes(environment, pair, arguments)
    for one in not_run:
        tell(f"left out: {one['system']} {one['mode']}: {one['reason']}")

    longest = max(len(prompt.ids) for prompt in prompts)
    models = Models("", None, arguments.engine, arguments.threads, longest + arguments.tokens + 32)
    crew = Crew(environment, pair, models, prompts[0])
    bandwidths = [read_bandwidth_gbs(arguments.threads)]
    source = provenance(arguments)
    conditions = {
        "pair": pair.target.name,
        "tokens": arguments.tokens,
        "engine": arguments.engine,
        "threads": arguments.threads,
        "prompts": {prompt.name: prompt.ids for prompt in prompts},
        "source": source["source"],
        "packages": dict(environment.versions()),
    }
    name = f"peers-{arguments.pair}" + ("-quick" if arguments.quick else "")
    name += f"-{arguments.label}" if arguments.label else ""
    journal = Journal(RESULTS / f"{name}.unfinished.jsonl", conditions, fresh=arguments.fresh)

    contenders = [one for process in processes for one in process.contenders]
    wanted = [
        (one, prompt, temperature, turn)
        for one in contenders
        for prompt in prompts
        for temperature in arguments.temperatures
        for turn in range(arguments.repeats)
    ]
    num_left = sum(not journal.has(*item) for item in wanted)
    guessed_s = num_left * arguments.tokens * PAIRS[arguments.pair].guessed_ms_per_token / 1e3
    shortest = min(len(prompt.ids) for prompt in prompts)
    tell(
        f"{len(contenders)} contenders, {len(prompts)} prompts of {shortest} to {longest} tokens, "
        f"{arguments.tokens} new tokens each; {num_left} runs to do "
        f"({journal.num_resumed} done before), at a guess {guessed_s / 60:.0f} minutes"
    )
    deadline = begun + (arguments.time_limit or float("inf"))
    progress = Progress(num_left, deadline)
    try:
        measure(crew, processes, prompts, arguments, journal, progress, bandwidths)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on from here") from None
    finally:
        crew.close_all()
    if not any(measured.error is None for measured in journal.measurements):
        raise SystemExit("nothing was measured; the lines above say why")
    results = make_results(
        arguments, journal, crew, pair, not_run, bandwidths, was_cut=progress.num_left > 0
    )
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    (RESULTS / f"{name}.md").write_text(text)
    if arguments.quick or progress.num_left == 0:
        journal.remove()
    print(json.dumps(results) if arguments.json else text)


if __name__ == "__main__":
    main()
