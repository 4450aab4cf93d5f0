"""``radixkv generate``: prompts from the command line, or a file of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radixkv.decoding import SamplingParams
from radixkv.engine import RequestOutput, TokenDelta
from radixkv.errors import RadixKVError, RequestError
from radixkv.llm import LLM

LoadModel = Callable[[], LLM]


def run_prompts(load: LoadModel, prompts: Sequence[str], params: SamplingParams) -> None:
    """Print each prompt's continuations."""
    with load() as llm:
        outputs = llm.generate(list(prompts), params)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.error is not None:
            raise output.error
        for completion in output.outputs:
            number = f"[{completion.index + 1}] " if len(output.outputs) > 1 else ""
            print(f"{number}{prompt}{completion.text}")


def run_file(load: LoadModel, source: Path, target: Path, params: SamplingParams) -> None:
    """Run a file of prompts and write a line of JSON for each, in order.

    Raises
    ------
    RequestError
        If a line is no JSON object with a "prompt" or "messages", or is refused at the door:
        named by its number, before anything has run.
    """
    records = _read(source)
    # An output that cannot be written should be known before hours of work.
    target.open("a", encoding="utf-8").close()
    with load() as llm:
        prompts = []
        for number, record in records:
            try:
                tokens = _tokens(llm, record)
                llm.engine.check_request(tokens, params)
            except RequestError as error:
                raise RequestError(f"{source}, line {number}: {error}") from error
            prompts.append(tokens)
        outputs = _with_progress(llm, prompts, params)
    with target.open("w", encoding="utf-8") as file:
        for (_, record), output in zip(records, outputs, strict=True):
            file.write(json.dumps(_result(record, output), ensure_ascii=False) + "\n")
    failed = sum(1 for output in outputs if output.error is not None)
    if failed:
        raise RadixKVError(f"{failed} of {len(outputs)} prompts failed; see 'error' in {target}")


def _read(source: Path) -> list[tuple[int, dict[str, Any]]]:
    """The records, each with the number of its line."""
    records = []
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is no UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{source}, line {number}: no JSON ({error})") from error
        if not isinstance(record, dict) or not ({"prompt", "messages"} & record.keys()):
            raise RequestError(f"{source}, line {number}: needs a 'prompt' or 'messages'")
        records.append((number, record))
    if not records:
        raise RequestError(f"{source} holds no prompts")
    return records


def _tokens(llm: LLM, record: dict[str, Any]) -> Sequence[int]:
    if "messages" in record:
        return llm.render_chat(record["messages"])
    return llm.tokenize(record["prompt"])


def _with_progress(
    llm: LLM, prompts: list[Sequence[int]], params: SamplingParams
) -> list[RequestOutput]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        task = progress.add_task("prompts", total=len(prompts) * params.n, rates="")
        tokens = 0

        def on_token(delta: TokenDelta) -> None:
            nonlocal tokens
            tokens += delta.token_id >= 0
            elapsed = progress.tasks[task].elapsed or 0
            if delta.finish_reason is not None or tokens % 16 == 0:
                counters = llm.cache.counters
                rate = counters.hit_tokens / max(counters.query_tokens, 1)
                speed = tokens / elapsed if elapsed else 0.0
                progress.update(
                    task,
                    advance=delta.finish_reason is not None,
                    rates=f"{speed:.0f} tokens/s, {rate:.0%} of prompt tokens cached",
                )

        return llm.generate(prompts, params, on_token=on_token)


def _result(record: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        **record,
        "outputs": [
            {"text": completion.text, "finish_reason": completion.finish_reason}
            for completion in output.outputs
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
    if output.error is not None:
        result["error"] = str(output.error)
    return result
