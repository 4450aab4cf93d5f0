"""``radixkv demo``: the main job on a real model, and a table of what sharing did."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from radixkv import native
from radixkv.cli.dtypes import command_dtype
from radixkv.decoding import SamplingParams
from radixkv.devices import resolve_device
from radixkv.engine import RequestOutput, TokenDelta
from radixkv.llm import LLM
from radixkv.workloads import demo_workload

SHOWN = (0, 1)

Conversation = list[dict[str, str]]


@dataclass
class Turn:
    """One turn of all conversations, measured."""

    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: float = 0.0
    prefilled: int = 0
    peak_blocks: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs)

    @property
    def generated(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def blocks_unshared(self, block_size: int) -> int:
        """What paged allocation without sharing would have taken."""
        return sum(
            -(-(len(output.prompt_token_ids) + len(output.token_ids)) // block_size)
            for output in self.outputs
        )


def run_demo(
    dtype: str, device: str, quantization: str | None, max_tokens: int, compare: bool
) -> None:
    """Load the demo model, serve the workload, print the table."""
    console = Console()
    place, dtype = resolve_device(device), command_dtype("demo", dtype, device)
    started = time.perf_counter()
    llm = LLM.demo(
        dtype=dtype,
        device=place,
        quantization=quantization,
        progress=lambda line: print(line, file=sys.stderr),
    )
    weights = f", {quantization} weights" if quantization else ""
    operators = "compiled operators" if native.is_available() else "torch's operators"
    operators = operators if place.type == "cpu" else f"Triton kernels on {place}"
    console.print(
        f"{llm.loaded.name}, {llm.loaded.dtype}{weights}, {operators}, "
        f"ready in {time.perf_counter() - started:.1f} s"
    )
    workload = demo_workload()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    conversations: list[Conversation] = [
        [
            {"role": "system", "content": workload.system_prompt},
            {"role": "user", "content": question},
        ]
        for question in workload.questions
    ]
    first = run_turn(llm, conversations, params, console, "first turn")
    again = [
        [
            *conversation,
            {"role": "assistant", "content": output.text},
            {"role": "user", "content": follow_up},
        ]
        for conversation, output, follow_up in zip(
            conversations, first.outputs, workload.follow_ups, strict=True
        )
    ]
    second = run_turn(llm, again, params, console, "second turn")
    llm.cache.check()
    baseline = None
    if compare:
        console.print("the same first turn with Hugging Face generate, one padded batch ...")
        baseline = hugging_face_seconds(llm, first, max_tokens)
    console.print(table(llm, first, second, baseline))


def run_turn(
    llm: LLM,
    conversations: list[Conversation],
    params: SamplingParams,
    console: Console,
    title: str,
) -> Turn:
    """Send one turn of every conversation at once; stream two of the answers."""
    texts = dict.fromkeys(SHOWN, "")
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console
    )
    task = progress.add_task(f"{title}: answers", total=len(conversations), completed=0)
    turn = Turn()
    counters = llm.engine.counters
    before, counters.peak_blocks_held = counters.prefilled_tokens, 0

    def screen() -> Group:
        questions = {index: conversations[index][-1]["content"] for index in SHOWN}
        panels = [
            Panel(texts[index] or "…", title=questions[index], title_align="left")
            for index in SHOWN
        ]
        return Group(*panels, progress)

    started = time.perf_counter()
    with Live(screen(), console=console, refresh_per_second=8) as live:

        def on_token(delta: TokenDelta) -> None:
            index = int(delta.request_id)
            if index in texts:
                texts[index] += delta.text
            if delta.finish_reason is not None:
                progress.advance(task)
            live.update(screen())

        turn.outputs = llm.chat(conversations, params, on_token=on_token)
    turn.seconds = time.perf_counter() - started
    if not console.is_terminal:
        console.print()  # rich ends its last line only on a terminal
    turn.prefilled = counters.prefilled_tokens - before
    turn.peak_blocks = counters.peak_blocks_held
    for output in turn.outputs:
        if output.error is not None:
            raise output.error
    return turn


@torch.inference_mode()
def hugging_face_seconds(llm: LLM, turn: Turn, max_tokens: int) -> float:
    """Seconds that Hugging Face ``generate`` takes for the same turn, as one padded batch."""
    prompts = [list(output.prompt_token_ids) for output in turn.outputs]
    width = max(map(len, prompts))
    padding = llm.loaded.eos_token_ids[0]
    model: Any = llm.loaded.model
    lines = [[padding] * (width - len(p)) + p for p in prompts]
    ids = torch.tensor(lines, device=model.device)
    used = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    mask = torch.tensor(used, device=model.device)
    llm.close()
    started = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=padding,
    )
    return time.perf_counter() - started


def table(llm: LLM, first: Turn, second: Turn, baseline: float | None) -> Table:
    """What a person wants to know."""
    size = llm.cache.block_size
    result = Table(title="16 conversations over one system prompt", title_justify="left")
    result.add_column("")
    for name in ("first turn", "second turn"):
        result.add_column(name, justify="right")

    def row(name: str, *values: Any) -> None:
        result.add_row(name, *(f"{v:,}" if isinstance(v, int) else str(v) for v in values))

    turns = (first, second)
    row("prompt tokens", *(turn.prompt_tokens for turn in turns))
    row("  served from the cache", *(turn.cached_tokens for turn in turns))
    row("  prefilled", *(turn.prefilled for turn in turns))
    row("generated tokens", *(turn.generated for turn in turns))
    row(f"blocks of {size} in use at the peak", *(turn.peak_blocks for turn in turns))
    row("  paged without sharing", *(turn.blocks_unshared(size) for turn in turns))
    whole = len(first.outputs) * -(-llm.engine.max_model_len // size)
    row("  contiguous, at the model's maximum", whole, whole)
    times = [[output.time_to_first_token or 0.0 for output in turn.outputs] for turn in turns]
    row("time to first token, first request", *(f"{each[0]:.2f} s" for each in times))
    row("  median of the others", *(f"{statistics.median(each[1:]):.2f} s" for each in times))
    row("wall time", *(f"{turn.seconds:.1f} s" for turn in turns))
    row("output tokens per second", *(f"{turn.generated / turn.seconds:.1f}" for turn in turns))
    if baseline is not None:
        row("the same with Hugging Face generate", f"{baseline:.1f} s", "")
        row("  radixkv is faster by", f"{baseline / first.seconds:.1f}×", "")
    return result
