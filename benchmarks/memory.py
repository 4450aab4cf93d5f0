"""How much memory do samples and beams share?

The question of section 6.3 of "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., 2023), by its definition: blocks saved by sharing over the blocks that
the same continuations would hold each on its own, summed over all steps. What different prompts
share is not counted, as there. Two kinds of prompts, with the mean lengths of the paper's traces:
short instructions (Alpaca: 19 tokens in, 58 out) and longer conversations (ShareGPT: 161 in, 338
out); here they are questions about the demo's handbook, alone and behind a passage of it.

    python benchmarks/memory.py [--prompts 4] [--scale 1] [--dtype bfloat16] [--output FILE]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import print_head, print_table, write_json

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.engine import Request
from radixkv.workloads import demo_workload

WIDTHS = {"n =": (2, 4, 8), "beam": (2, 4, 6)}


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of what is generated; the paper's savings on such a trace, in %."""

    name: str
    prompt: int
    new: int
    paper: dict[str, str]


KINDS = (
    Lengths("Alpaca's lengths", 19, 58, {"n =": "6.1-9.8", "beam": "37.6-55.2"}),
    Lengths("ShareGPT's lengths", 161, 338, {"n =": "16.2-30.5", "beam": "44.3-66.3"}),
)


@dataclass
class Blocks:
    """Blocks held at each step, summed: each continuation on its own, and shared as they are."""

    alone: int = 0
    shared: int = 0

    def add(self, request: Request) -> None:
        """Count what a running request holds now."""
        tables = [
            branch.sequence.block_table.tolist() for branch in request.branches if branch.sequence
        ]
        self.alone += sum(map(len, tables))
        self.shared += len({block for table in tables for block in table})

    @property
    def saved(self) -> float:
        return 1 - self.shared / self.alone


def prompts_of(llm: LLM, lengths: Lengths, count: int) -> list[list[int]]:
    """Questions about the handbook, each behind the end of a passage of its own if there is room.

    All have the same length but those whose question alone is longer.
    """
    workload = demo_workload()
    passages = workload.system_prompt.split("\n## ")[1:]
    prompts = []
    for place, question in enumerate(workload.questions[:count]):
        asked = list(llm.tokenize(question))
        before = list(llm.tokenize(passages[place % len(passages)] + "\n\n"))
        prompts.append(before[len(before) - max(lengths.prompt - len(asked), 0) :] + asked)
    return prompts


def params_for(kind: str, width: int, tokens: int) -> SamplingParams | BeamSearchParams:
    # All run to the same length, as the paper's requests run to that of their trace.
    if kind == "beam":
        return BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
    return SamplingParams(n=width, max_tokens=tokens, seed=0, ignore_eos=True)


def measure(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | BeamSearchParams
) -> Blocks:
    """Run all prompts in one batch from an empty cache, and count behind each step."""
    llm.cache.reset()
    requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
    blocks = Blocks()
    while llm.engine.has_work:
        llm.engine.step()
        for request in requests:
            blocks.add(request)
    assert all(request.error is None for request in requests)
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1, help="divides the tokens, for a short run")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = LLM.demo(dtype=options.dtype)
    rows, results = [], {}
    for lengths in KINDS:
        prompts = prompts_of(llm, lengths, options.prompts)
        tokens = max(lengths.new // options.scale, 2)
        mean = sum(map(len, prompts)) / len(prompts)
        for kind, width in [(kind, width) for kind, widths in WIDTHS.items() for width in widths]:
            start = time.perf_counter()
            blocks = measure(llm, prompts, params_for(kind, width, tokens))
            name = f"{kind} {width}, {lengths.name}: {mean:.0f} in, {tokens} out"
            results[name] = {
                "alone": blocks.alone,
                "shared": blocks.shared,
                "saved": blocks.saved,
                "wall_s": time.perf_counter() - start,
            }
            rows.append(
                [name, blocks.alone, blocks.shared, 100 * blocks.saved, lengths.paper[kind]]
            )
    print_head()
    print_table(
        f"{options.prompts} prompts, blocks of {llm.cache.block_size} tokens, {options.dtype}; "
        "blocks x steps",
        ["", "alone", "shared", "saved %", "paper %"],
        rows,
    )
    write_json(options.output, results)


if __name__ == "__main__":
    main()
