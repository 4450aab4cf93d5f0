"""How much faster than Hugging Face ``generate`` is a batch of chats over one system prompt?

Sixteen conversations that share a system prompt of about 1,700 tokens, from an empty cache, greedy,
against ``generate`` on the same prompts as one left-padded batch, in turn in one run.

    python benchmarks/shared_prompt.py [--turns 5] [--dtype bfloat16] [--output FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Timing, in_turn, print_head, print_table, write_json

from radixkv import LLM, SamplingParams
from radixkv.model.loading import LoadedModel, load_model
from radixkv.workloads import demo_workload

NAMES = {
    "cold": "radixkv, empty cache",
    "warm": "radixkv, prompts cached",
    "generate": "Hugging Face generate",
}


def conversations(count: int) -> list[list[dict[str, str]]]:
    """The demo's first turn."""
    workload = demo_workload()
    return [
        [
            {"role": "system", "content": workload.system_prompt},
            {"role": "user", "content": question},
        ]
        for question in workload.questions[:count]
    ]


def hugging_face(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: int
) -> Callable[[], None]:
    """One left-padded batch through ``generate``, as its users run it."""
    width = max(map(len, prompts))
    padding = loaded.eos_token_ids[0]
    ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    @torch.inference_mode()
    def run() -> None:
        loaded.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=padding,
        )

    return run


def measure(options: argparse.Namespace) -> tuple[dict[str, Timing], int, int]:
    """Times of the three, the number of prompts, and the longest one's tokens."""
    llm = LLM.demo(dtype=options.dtype)
    chats = conversations(options.conversations)
    # Both sides run to the same length, so that the work is the same however an answer ends.
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0, ignore_eos=True)
    prompts = [list(output.prompt_token_ids) for output in llm.chat(chats, params)]

    def cold() -> None:
        llm.cache.reset()
        llm.chat(chats, params)

    def warm() -> None:
        llm.chat(chats, params)

    theirs = hugging_face(load_model("demo", options.dtype), prompts, options.max_tokens)
    times = in_turn({"cold": cold, "warm": warm, "generate": theirs}, options.turns)
    return times, len(prompts), max(map(len, prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times, chats, width = measure(options)
    base = times["generate"]
    rows = [
        [
            NAMES[name],
            timing.median_wall,
            timing.median_cpu,
            chats * options.max_tokens / timing.median_wall,
            base.median_wall / timing.median_wall,
            base.median_cpu / timing.median_cpu,
        ]
        for name, timing in times.items()
    ]
    print_head()
    print_table(
        f"{chats} chats, {width} prompt tokens, {options.max_tokens} new tokens each, "
        f"{options.dtype}, {options.threads} threads; medians of {options.turns} turns",
        ["", "wall s", "CPU s", "tokens/s", "x wall", "x CPU"],
        rows,
    )
    write_json(
        options.output,
        {NAMES[name]: {"wall_s": t.wall, "cpu_s": t.cpu} for name, t in times.items()},
    )


if __name__ == "__main__":
    main()
