"""How much faster than Hugging Face ``generate`` is a batch of chats over one system prompt?

Sixteen conversations that share a system prompt of about 1,700 tokens, from an empty cache, greedy,
against ``generate`` on the same prompts as one left-padded batch, in turn in one run.

    python benchmarks/shared_prompt.py [--turns 5] [--dtype bfloat16] [--output FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import in_turn, machine, print_table, write_json

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.model.loading import load_model
from radixkv.workloads import demo_workload


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

    llm = LLM.demo(dtype=options.dtype)
    theirs = load_model("demo", options.dtype)
    workload = demo_workload()
    conversations = [
        [
            {"role": "system", "content": workload.system_prompt},
            {"role": "user", "content": question},
        ]
        for question in workload.questions[: options.conversations]
    ]
    # Both sides run to the same length, so that the work is the same however an answer ends.
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0, ignore_eos=True)
    outputs: list[RequestOutput] = []

    def cold() -> None:
        llm.cache.reset()
        outputs[:] = llm.chat(conversations, params)

    def warm() -> None:
        llm.chat(conversations, params)

    cold()
    prompts = [list(output.prompt_token_ids) for output in outputs]
    width = max(map(len, prompts))
    padding = theirs.eos_token_ids[0]
    ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    @torch.inference_mode()
    def hugging_face() -> None:
        theirs.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=options.max_tokens,
            min_new_tokens=options.max_tokens,
            pad_token_id=padding,
        )

    times = in_turn({"cold": cold, "warm": warm, "generate": hugging_face}, options.turns)
    tokens = len(prompts) * options.max_tokens
    names = {
        "cold": "radixkv, empty cache",
        "warm": "radixkv, prompts cached",
        "generate": "Hugging Face generate",
    }
    base = times["generate"]
    rows = [
        [
            names[name],
            timing.median_wall,
            timing.median_cpu,
            tokens / timing.median_wall,
            base.median_wall / timing.median_wall,
            base.median_cpu / timing.median_cpu,
        ]
        for name, timing in times.items()
    ]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_table(
        f"{len(prompts)} chats, {width} prompt tokens, {options.max_tokens} new tokens each, "
        f"{options.dtype}, {options.threads} threads; medians of {options.turns} turns",
        ["", "wall s", "CPU s", "tokens/s", "x wall", "x CPU"],
        rows,
    )
    results = {
        names[name]: {"wall_s": timing.wall, "cpu_s": timing.cpu} for name, timing in times.items()
    }
    write_json(options.output, results)


if __name__ == "__main__":
    main()
