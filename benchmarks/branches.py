"""How much faster than Hugging Face ``generate`` are requests with branches?

Beam search (4 beams, 4 prompts, 32 tokens) and sampling (8 continuations of 8 prompts, 64 tokens),
from an empty cache, against ``generate`` on the same prompts as one left-padded batch, in turn in
one run. With ``--system`` the prompts begin with the demo's system prompt of 1,700 tokens.

    python benchmarks/branches.py [--system] [--turns 5] [--dtype bfloat16] [--output FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Timing, in_turn, machine, print_table, write_json

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.model.loading import LoadedModel, load_model
from radixkv.workloads import demo_workload


@dataclass(frozen=True)
class Case:
    """One kind of branches: how many, of how many prompts, how long."""

    beams: bool
    width: int
    prompts: int
    tokens: int

    @property
    def name(self) -> str:
        kind = "beam" if self.beams else "n ="
        return f"{kind} {self.width}, {self.prompts} prompts, {self.tokens} tokens"

    @property
    def generated(self) -> int:
        """Tokens computed and chosen, whether or not they are returned."""
        return self.width * self.prompts * self.tokens

    def ours(self) -> SamplingParams | BeamSearchParams:
        # Both sides run to the same length, so that the work is the same however a text ends.
        if self.beams:
            return BeamSearchParams(beam_width=self.width, max_tokens=self.tokens, ignore_eos=True)
        return SamplingParams(n=self.width, max_tokens=self.tokens, seed=0, ignore_eos=True)

    def theirs(self) -> dict[str, Any]:
        length = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens}
        if self.beams:
            return {"num_beams": self.width, "do_sample": False, **length}
        # Their defaults would filter: ours does not.
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        return {"num_return_sequences": self.width, "do_sample": True, **plain, **length}


def cases(scale: int) -> list[Case]:
    """The two of the table, with a part of their tokens if ``scale`` is above 1."""
    return [
        Case(beams=True, width=4, prompts=4, tokens=max(32 // scale, 2)),
        Case(beams=False, width=8, prompts=8, tokens=max(64 // scale, 2)),
    ]


def hugging_face(loaded: LoadedModel, prompts: list[list[int]], case: Case) -> Callable[[], None]:
    """One left-padded batch through ``generate``, as its users run it."""
    width = max(map(len, prompts))
    padding = loaded.eos_token_ids[0]
    ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    @torch.inference_mode()
    def run() -> None:
        loaded.model.generate(
            input_ids=ids, attention_mask=mask, pad_token_id=padding, **case.theirs()
        )

    return run


def prompts_of(llm: LLM, case: Case, system: bool) -> list[list[int]]:
    """Questions, behind the long system prompt or alone."""
    workload = demo_workload()
    before = [{"role": "system", "content": workload.system_prompt}] if system else []
    questions = workload.questions[: case.prompts]
    return [llm.render_chat([*before, {"role": "user", "content": q}]) for q in questions]


def measure(
    llm: LLM, reference: LoadedModel, case: Case, turns: int, system: bool
) -> dict[str, Timing]:
    """Times of both."""
    prompts = prompts_of(llm, case, system)

    def ours() -> None:
        llm.cache.reset()
        outputs = llm.generate(prompts, case.ours())
        assert all(len(output.token_ids) == case.tokens for output in outputs)

    return in_turn({"ours": ours, "generate": hugging_face(reference, prompts, case)}, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", action="store_true", help="behind a system prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divides the tokens, for a short run")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = LLM.demo(dtype=options.dtype)
    reference = load_model("demo", options.dtype)
    rows, results = [], {}
    for case in cases(options.scale):
        times = measure(llm, reference, case, options.turns, options.system)
        base = times["generate"]
        results[case.name] = {name: {"wall_s": t.wall, "cpu_s": t.cpu} for name, t in times.items()}
        for name, timing in times.items():
            rows.append(
                [
                    f"{case.name}: {name}",
                    timing.median_wall,
                    timing.median_cpu,
                    case.generated / timing.median_wall,
                    base.median_wall / timing.median_wall,
                    base.median_cpu / timing.median_cpu,
                ]
            )
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_table(
        f"{options.dtype}, {options.threads} threads; medians of {options.turns} turns",
        ["", "wall s", "CPU s", "tokens/s", "x wall", "x CPU"],
        rows,
    )
    write_json(options.output, results)


if __name__ == "__main__":
    main()
