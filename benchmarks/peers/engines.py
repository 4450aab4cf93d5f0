"""The engines of a benchmark: which there are, how each is started, and turns between them.

Every engine, ours too, runs in a process of its own behind one protocol (`process.py`), on the same
cores with the same number of threads. One that cannot be started, or that fails at a case, is
reported with the reason, and the others go on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.install import PEERS, python_of, status_of
from peers.process import PeerError, PeerProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Tokens = list[list[list[int]]]  # by prompt and continuation

# Idle threads of one engine spin a little before they sleep; the next engine waits for that.
REST_SECONDS = 0.3


@dataclass(frozen=True)
class Engine:
    """How an engine is started.

    Attributes
    ----------
    title : str
        Its name in tables.
    script : str
        The driver script in this folder, with arguments.
    environment : str
        The peer's environment; empty for our own.
    slow : bool
        Takes so much longer that it has turns of its own (``--slow-turns``).
    """

    title: str
    script: tuple[str, ...]
    environment: str = ""
    slow: bool = False


ENGINES = {
    "radixkv": Engine("radixkv", ("drive_radixkv.py",)),
    "vllm": Engine("vLLM (CPU)", ("drive_vllm.py",), "vllm"),
    "llama": Engine("llama.cpp", ("drive_llama.py",), "llama", slow=True),
    "hf": Engine("Hugging Face generate", ("drive_hf.py", "generate"), slow=True),
    "hf-batching": Engine(
        "Hugging Face continuous batching", ("drive_hf.py", "batching"), slow=True
    ),
}
OURS = "radixkv"


@dataclass(frozen=True)
class Setting:
    """What all engines of a run are started with; see `process.py`."""

    model: str  # a folder
    dtype: str
    threads: int
    max_len: int
    max_seqs: int
    kv_bytes: int = 4 << 30
    seconds: float = 3600  # the longest answer


@dataclass
class Outcome:
    """What one engine did in one phase: each turn's reply, or why there is none."""

    replies: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""


@contextmanager
def on_cores(threads: int) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, to as many cores as there are threads."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def command_of(name: str) -> list[str]:
    """Interpreter, script and arguments of an engine's driver.

    Raises
    ------
    PeerError
        If it is not installed; with the reason.
    """
    engine = ENGINES[name]
    python = Path(sys.executable)
    if engine.environment:
        status = status_of(engine.environment)
        if not status["installed"]:
            raise PeerError(f"not installed: {status['reason']}")
        python = python_of(engine.environment)
    script, *arguments = engine.script
    return [str(python), str(HERE / script), *arguments]


def model_for(name: str, setting: Setting) -> str:
    """The model as an engine reads it: a folder, or for llama.cpp a GGUF."""
    if name != "llama":
        return setting.model
    from radixkv.model.demo import DEMO_SHA256

    if not setting.model.endswith(f"gguf-{DEMO_SHA256}"):
        raise PeerError("llama.cpp reads GGUF files, and only the demo model's can be made here")
    from peers.demo_gguf import demo_gguf

    return str(demo_gguf(PEERS / "models", setting.dtype))


def start(name: str, setting: Setting) -> tuple[PeerProcess, dict[str, Any]]:
    """Start an engine and load the model; its process and what it said.

    Raises
    ------
    PeerError
    """
    # Whoever counts cores is told; Hugging Face must not look for what is in the folder.
    environment = {
        "OMP_NUM_THREADS": str(setting.threads),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ENGINES[name].environment:
        environment["PYTHONPATH"] = ""
    command, model = command_of(name), model_for(name, setting)
    process = PeerProcess(ENGINES[name].title, command, environment, setting.seconds)
    try:
        said = process.ask(
            do="load",
            model=model,
            dtype=setting.dtype,
            threads=setting.threads,
            max_len=setting.max_len,
            max_seqs=setting.max_seqs,
            kv_bytes=setting.kv_bytes,
        )
    except BaseException:
        process.close()
        raise
    return process, said


class Field:
    """All engines of a run, started; take turns with `turns`.

    Attributes
    ----------
    processes : dict
        By name, of those that run.
    facts : dict
        By name, what is said of each in JSON: versions and notes, or why it does not run.
    """

    def __init__(self, names: Iterable[str], setting: Setting) -> None:
        self.setting = setting
        self.names = list(names)
        self.processes: dict[str, PeerProcess] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Field:
        try:
            for name in self.names:
                self._start(name)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, name: str) -> None:
        print(f"starting {ENGINES[name].title} ...", file=sys.stderr, flush=True)
        try:
            self.processes[name], said = start(name, self.setting)
            environment = ENGINES[name].environment
            versions = status_of(environment)["versions"] if environment else {}
            self.facts[name] = {"versions": versions, **said}
        except PeerError as error:
            self.facts[name] = {"failure": str(error)}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes.values():
            process.close()
        self.processes.clear()

    def turns(
        self,
        phases: dict[str, Callable[[PeerProcess, dict[str, Any]], dict[str, Any]]],
        turns: int,
        slow_turns: int,
    ) -> dict[str, dict[str, Outcome]]:
        """Let each engine run all phases, one engine after the other, so many times.

        Parameters
        ----------
        phases : dict
            By name, in order: called with the process and the replies of the phases before it in
            this turn; returns a reply.

        Returns
        -------
        dict
            Outcomes by engine and phase, also of those that do not run.
        """
        outcomes = {name: {phase: Outcome() for phase in phases} for name in self.names}
        for name in self.names:
            if failure := self.facts[name].get("failure"):
                for outcome in outcomes[name].values():
                    outcome.failure = failure
        for turn in range(turns):
            for name, process in list(self.processes.items()):
                if turn and ENGINES[name].slow and turn >= slow_turns:
                    continue
                time.sleep(REST_SECONDS)
                self._turn(name, process, phases, outcomes[name])
        return outcomes

    def _turn(
        self,
        name: str,
        process: PeerProcess,
        phases: dict[str, Callable[[PeerProcess, dict[str, Any]], dict[str, Any]]],
        outcomes: dict[str, Outcome],
    ) -> None:
        replies: dict[str, Any] = {}
        for phase, run in phases.items():
            try:
                replies[phase] = run(process, replies)
                outcomes[phase].replies.append(replies[phase])
            except PeerError as error:
                # A phase stands on those before it.
                failed = list(phases)[list(phases).index(phase) :]
                for later in failed:
                    outcomes[later].failure = outcomes[later].failure or str(error)
                if not process.is_alive():
                    self.facts[name] = {"failure": str(error)}
                    self.processes.pop(name).close()
                return


def equal_share(ours: Tokens, theirs: Tokens) -> float:
    """The share of prompts whose continuations are the same, token by token."""
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return same / len(ours)
