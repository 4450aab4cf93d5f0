"""``radixkv bench``: its subcommands and their options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, help="Measure servers.")


@app.callback()
def _bench() -> None:
    pass


@app.command()
def serve(
    dataset: Annotated[
        Literal["chat", "trace", "shared-prefix"], typer.Option(help="What is asked.")
    ],
    file: Annotated[
        Path | None, typer.Argument(help="The trace.", exists=True, dir_okay=False)
    ] = None,
    url: Annotated[str, typer.Option(help="The server's.")] = "http://127.0.0.1:8000",
    rate: Annotated[
        str, typer.Option(help="Requests a second, inf, or recorded (a trace's own times).")
    ] = "inf",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Most at a time.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most of an answer; 64, or as the trace has it.")
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="System prompts of shared-prefix.")] = 8,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="About so long is each.")] = 1024,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="Which of OpenAI's routes.")
    ] = "chat",
    model: Annotated[str | None, typer.Option(help="The server's first unless given.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RADIXKV_API_KEY", help="Sent as a bearer token.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length (an extension).")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests and times.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write summary and records there.")
    ] = None,
) -> None:
    """Drive any OpenAI-compatible server, and say how fast it answered and what was cached."""
    from radixkv.cli.bench import datasets
    from radixkv.cli.bench.serve import Load, run_bench

    if (file is not None) != (dataset == "trace"):
        raise typer.BadParameter("--dataset trace needs a FILE, and only it takes one")
    limit = max_tokens or 64
    match dataset:
        case "chat":
            turns = datasets.chat(num_requests, limit, seed)
        case "shared-prefix":
            turns = datasets.shared_prefix(num_requests, groups, prefix_tokens, limit, seed)
        case "trace":
            assert file is not None
            turns = datasets.recorded(file, num_requests, max_tokens)
    load = Load(
        url=url.rstrip("/").removesuffix("/v1"),
        dataset=dataset if file is None else f"trace {file.name}",
        rate=_rate(rate),
        concurrency=concurrency,
        endpoint=endpoint,
        model=model,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    run_bench(load, turns, api_key, json_file)


def _rate(text: str) -> float | None:
    """Requests a second; None for those recorded."""
    if text == "recorded":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise typer.BadParameter(f"--rate must be above 0, inf or recorded, not {text!r}")
    return rate
