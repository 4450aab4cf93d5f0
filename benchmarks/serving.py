"""What the benchmarks with a model share: options, prompts, the engines' tables and JSON."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import print_head, print_table, write_json
from peers.engines import ENGINES, OURS, Field, Outcome, Setting, equal_share, on_cores
from peers.process import PeerProcess

from radixkv.model.demo import demo_model_path
from radixkv.workloads import demo_workload

Prompts = list[list[int]]
Reply = dict[str, Any]
Phase = Callable[[PeerProcess, dict[str, Any]], Reply]
Outcomes = dict[str, dict[str, Outcome]]  # by engine and phase

HEAD = ["", "wall s", "CPU s", "tokens/s", "TTFT s", "cached %", "equal %", "ours is x faster"]


def parser_of(doc: str, turns: int = 5) -> argparse.ArgumentParser:
    """The options that all of these have."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a run of seconds to a minute")
    parser.add_argument("--turns", type=int, default=turns, help="of each engine")
    parser.add_argument("--slow-turns", type=int, default=1, help="of those that take minutes")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help="which, by name: %(default)s by default"
    )
    parser.add_argument("--model", default="demo", help="or the folder of a checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2, help="and cores, for every engine")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    parser.add_argument("--plot", type=Path, help="draw them there, as SVG or PNG")
    return parser


def engines_of(options: argparse.Namespace) -> list[str]:
    """The chosen engines' names, ours first."""
    names = [name.strip() for name in options.engines.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ENGINES]:
        raise SystemExit(f"no such engine: {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    return [OURS, *(name for name in names if name != OURS)]


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(each) for each in text.split(",")]


class Texts:
    """Prompts out of the demo's handbook and questions, or random ones without a tokenizer.

    Two questions never begin with the same token: what prompts share is what they are said to.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.vocabulary: int = config["vocab_size"]
        self.longest: int = config["max_position_embeddings"]
        workload = demo_workload()
        if (folder / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
            self._book = encode(workload.system_prompt).ids
            self._questions = [encode(f" {text}").ids for text in workload.questions]
            self._follow_ups = [encode(f" {text}").ids for text in workload.follow_ups]
        else:
            rng = np.random.default_rng(0)
            self._book = rng.integers(0, self.vocabulary, 1700).tolist()
            self._questions = rng.integers(0, self.vocabulary, (16, 20)).tolist()
            self._follow_ups = rng.integers(0, self.vocabulary, (16, 12)).tolist()

    def _mark(self, number: int) -> int:
        """A token that nobody else's question begins with."""
        return self.vocabulary // 4 + number

    def prefix(self, length: int) -> list[int]:
        """The handbook, again and again, up to this many tokens."""
        return (self._book * (length // len(self._book) + 1))[:length]

    def question(self, number: int) -> list[int]:
        return [self._mark(number), *self._questions[number % len(self._questions)]]

    def follow_up(self, number: int) -> list[int]:
        return [self._mark(number), *self._follow_ups[number % len(self._follow_ups)]]

    def alone(self, number: int, length: int) -> list[int]:
        """A prompt of this length that shares nothing with the others."""
        passage = self.prefix(length + 37 * number)[37 * number :]
        return [self._mark(number), *passage][:length]


@dataclass(frozen=True)
class Run:
    """A call of an engine: how prompts are continued."""

    max_tokens: int
    kind: str = "greedy"  # "sample" or "beam"
    width: int = 1

    def __call__(self, process: PeerProcess, prompts: Prompts) -> Reply:
        return process.ask(
            do="run",
            prompts=prompts,
            kind=self.kind,
            width=self.width,
            max_tokens=self.max_tokens,
        )

    def cold(self, prompts: Prompts) -> Phase:
        """The phase in which nothing is cached."""

        def phase(process: PeerProcess, before: dict[str, Any]) -> Reply:
            process.ask(do="reset")
            return self(process, prompts)

        return phase

    def again(self, prompts: Prompts) -> Phase:
        """The phase in which what came before is cached."""
        return lambda process, before: self(process, prompts)


def warm_up(field: Field, prompts: Prompts, run: Run) -> None:
    """One untimed run of two tokens a prompt for each engine; who fails at it will fail again."""
    short = Run(2, run.kind, run.width)
    field.turns({"warm-up": short.cold(prompts)}, 1, 1)


def first_token(reply: Reply) -> float | None:
    """Mean seconds to the first token over the prompts, if the engine told."""
    firsts = reply.get("first_s") or [times[0] for times in reply.get("times") or [] if times]
    known = [first for first in firsts if first is not None]
    return statistics.mean(known) if known else None


def tokens_per_second(kept: dict[str, Any]) -> float | None:
    """Of a phase of one engine, by the median turn; None if it did not run."""
    return kept["new_tokens"] / statistics.median(kept["wall_s"]) if "wall_s" in kept else None


def summary(outcome: Outcome, ours: Outcome | None, prompts: Prompts) -> dict[str, Any]:
    """What JSON keeps of a phase of one engine; compared to ours if it is given."""
    if not outcome.replies:
        return {"failure": outcome.failure or "it had no turn"}
    replies, last = outcome.replies, outcome.replies[-1]
    kept = {
        "wall_s": [reply["wall_s"] for reply in replies],
        "cpu_s": [reply["cpu_s"] for reply in replies],
        "ttft_s": [first_token(reply) for reply in replies],
        "new_tokens": sum(len(own) for each in last["tokens"] for own in each),
        "cached_tokens": last.get("cached_tokens") and sum(last["cached_tokens"]),
        "prompt_tokens": sum(map(len, prompts)),
        "peak_mib": max(reply["peak_mib"] for reply in replies),
        "equal_share": (
            equal_share(ours.replies[0]["tokens"], replies[0]["tokens"])
            if ours is not None and ours.replies
            else None
        ),
    }
    return kept | ({"failure": outcome.failure} if outcome.failure else {})


def row_of(name: str, kept: dict[str, Any], ours: dict[str, Any]) -> list[Any]:
    """A line of the table; a dash is what an engine does not tell."""
    if "wall_s" not in kept:
        return [ENGINES[name].title, *["-"] * (len(HEAD) - 1)]
    wall, cpu = statistics.median(kept["wall_s"]), statistics.median(kept["cpu_s"])
    firsts = [first for first in kept["ttft_s"] if first is not None]
    cached, equal = kept["cached_tokens"], kept["equal_share"]
    return [
        ENGINES[name].title,
        f"{wall:.2f}",
        f"{cpu:.2f}",
        kept["new_tokens"] / wall,
        f"{statistics.median(firsts):.3f}" if firsts else "-",
        100 * cached / kept["prompt_tokens"] if cached is not None else "-",
        100 * equal if equal is not None else "-",
        f"{wall / statistics.median(ours['wall_s']):.2f}" if "wall_s" in ours else "-",
    ]


def print_failures(engines: dict[str, dict[str, Any]], where: str = "") -> None:
    """A line for each engine that has no figures, with the reason."""
    for name, kept in engines.items():
        if "failure" in kept:
            print(f"{where}{ENGINES[name].title}: {kept['failure']}")


def fail_without_ours(kept: dict[str, Any]) -> None:
    """End the program, as failed, if our own engine did."""
    if "failure" in kept:
        raise SystemExit(f"radixkv failed: {kept['failure']}")


Results = dict[str, dict[str, dict[str, dict[str, Any]]]]  # by case, phase and engine


class Report:
    """Prints a table as each case ends, and keeps the figures."""

    def __init__(self, options: argparse.Namespace, field: Field) -> None:
        self.options, self.field = options, field
        self.results: Results = {}
        print_head()
        for name, facts in field.facts.items():
            said = facts.get("failure") or facts.get("note", "")
            versions = ", ".join(f"{k} {v}" for k, v in facts.get("versions", {}).items())
            print(f"{ENGINES[name].title}: {said}{f' ({versions})' if versions else ''}")

    def case(
        self, title: str, outcomes: Outcomes, prompts: dict[str, Prompts], compare: bool = True
    ) -> None:
        """Add a case: outcomes by engine and phase, and each phase's prompts.

        What was sampled is not compared: everyone draws other numbers.
        """
        by_phase: dict[str, dict[str, dict[str, Any]]] = {}
        rows: list[list[Any]] = []
        for phase, given in prompts.items():
            kept = {
                name: summary(each[phase], outcomes[OURS][phase] if compare else None, given)
                for name, each in outcomes.items()
            }
            by_phase[phase] = kept
            rows += [
                [f"{phase}: {row[0]}", *row[1:]]
                for row in (row_of(name, each, kept[OURS]) for name, each in kept.items())
            ]
        self.results[title] = by_phase
        options = self.options
        print_table(
            f"{title}; {options.dtype}, {options.threads} threads, medians of {options.turns} "
            f"turns ({options.slow_turns} of slow engines)",
            HEAD,
            rows,
        )
        for phase, engines in by_phase.items():
            print_failures(engines, f"{phase}: ")
        if compare and options.dtype == "float32":
            self._check(title, outcomes, by_phase)

    def _check(
        self, title: str, outcomes: Outcomes, kept: dict[str, dict[str, dict[str, Any]]]
    ) -> None:
        """Say where float32 outputs differ that should not: between engines, and our own turns."""
        for phase, engines in kept.items():
            for name, each in engines.items():
                share = each.get("equal_share")
                if share is not None and share < 1:
                    print(f"{title}, {phase}: {ENGINES[name].title} gave other tokens than radixkv")
            ours = [reply["tokens"] for reply in outcomes[OURS][phase].replies]
            if any(tokens != ours[0] for tokens in ours):
                print(f"{title}, {phase}: radixkv gave other tokens in another turn")
        both = [outcomes[OURS][phase].replies for phase in ("cold", "warm") if phase in kept]
        if len(both) == 2 and all(both) and both[0][-1]["tokens"] != both[1][-1]["tokens"]:
            print(f"{title}: radixkv gave other tokens cold and warm")

    def finish(self, draw: Callable[[Results, Path], None]) -> None:
        """Write the JSON and draw the plot, if they are asked for."""
        write_json(self.options.output, self.results, engines=self.field.facts)
        if self.options.plot is not None:
            draw(self.results, self.options.plot)
            print(f"drawn in {self.options.plot}")
        for case in self.results.values():
            for engines in case.values():
                fail_without_ours(engines[OURS])


def model_folder(options: argparse.Namespace) -> Path:
    """The checkpoint that all engines load."""
    return demo_model_path(print) if options.model == "demo" else Path(options.model)


def run_benchmark(
    options: argparse.Namespace,
    max_len: int,
    max_seqs: int,
    measure: Callable[[Field, Texts, Report], None],
    draw: Callable[[Results, Path], None],
) -> None:
    """Start the engines on their cores, measure, print, write, draw."""
    folder = model_folder(options)
    texts = Texts(folder)
    setting = Setting(
        model=str(folder),
        dtype=options.dtype,
        threads=options.threads,
        max_len=min(max_len, texts.longest),
        max_seqs=max_seqs,
    )
    with on_cores(options.threads), Field(engines_of(options), setting) as field:
        report = Report(options, field)
        measure(field, texts, report)
        report.finish(draw)
