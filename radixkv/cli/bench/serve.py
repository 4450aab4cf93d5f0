"""``radixkv bench serve``: a run from its settings to its table."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radixkv.cli.bench.client import Target
from radixkv.cli.bench.datasets import Turn
from radixkv.cli.bench.driver import Run, arrivals, drive
from radixkv.cli.bench.report import Summary, print_report, summarize
from radixkv.cli.http import get_json, headers_of
from radixkv.errors import ConfigError, RadixKVError

# A server that says nothing for so long will not say anything any more.
READ_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a server is put under; ``rate`` in requests a second, None as recorded."""

    url: str
    dataset: str
    rate: float | None
    concurrency: int
    endpoint: str
    model: str | None
    ignore_eos: bool
    seed: int


def run_bench(
    load: Load, turns: Sequence[Turn], api_key: str | None, json_file: Path | None
) -> None:
    """Run, print and write; leaves with 130 if interrupted, 1 if nothing was answered.

    Raises
    ------
    RadixKVError
        If the server cannot be reached, or names no model.
    ConfigError
        If the URL is none, or arrivals are to be as recorded and are not.
    """
    due = arrivals(turns, load.rate, load.seed)
    if httpx.URL(load.url).scheme not in ("http", "https"):
        raise ConfigError(f"--url must be like http://127.0.0.1:8000, not {load.url!r}")
    model = load.model or first_model(load.url, api_key)
    if json_file is not None:
        # An output that cannot be written should be known before the run.
        json_file.open("a", encoding="utf-8").close()
    run, interrupted = Run(), False
    with _progress() as progress:
        task = progress.add_task(model, total=len(turns), state="")

        def on_end(now: Run) -> None:
            failed = sum(record.error is not None for record in now.records)
            under_way = now.started - len(now.records)
            state = f"{max(under_way, 0)} under way, {failed} failed"
            progress.update(task, completed=len(now.records), state=state)

        try:
            asyncio.run(_drive(load, model, api_key, turns, due, run, on_end))
        except KeyboardInterrupt:
            interrupted = True
    summary = summarize(run)
    console = Console()
    console.print(_title(load, model, len(turns)), highlight=False, markup=False, soft_wrap=True)
    print_report(summary, console)
    if json_file is not None:
        _write(json_file, load, model, summary, run)
    if interrupted:
        raise KeyboardInterrupt
    if not summary.completed:
        raise typer.Exit(1)


async def _drive(
    load: Load,
    model: str,
    api_key: str | None,
    turns: Sequence[Turn],
    due: Sequence[float],
    run: Run,
    on_end: Any,
) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency)
    timeout = httpx.Timeout(READ_SECONDS, connect=30.0)
    async with httpx.AsyncClient(
        base_url=load.url, headers=headers_of(api_key), limits=limits, timeout=timeout
    ) as client:
        target = Target(client, model, load.endpoint, load.ignore_eos, load.seed)
        await drive(target, turns, due, load.concurrency, run, on_end)


def first_model(url: str, api_key: str | None) -> str:
    """The first model that a server names.

    Raises
    ------
    RadixKVError
        If it cannot be reached, or names none.
    """
    listed = get_json(url, "/v1/models", api_key)
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise RadixKVError(f"{url} names no model; say which one with --model") from error


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _title(load: Load, model: str, requests: int) -> str:
    if load.rate is None:
        pace = "at recorded times"
    elif math.isinf(load.rate):
        pace = "all at once"
    else:
        pace = f"{load.rate:g} a second"
    return (
        f"{load.dataset}: {requests} requests {pace}, at most {load.concurrency} at a time, "
        f"to {model} (/v1/{'chat/' if load.endpoint == 'chat' else ''}completions)"
    )


def _write(path: Path, load: Load, model: str, summary: Summary, run: Run) -> None:
    settings = asdict(load) | {"model": model}
    if load.rate is None or math.isinf(load.rate):
        # JSON has no infinity.
        settings["rate"] = "recorded" if load.rate is None else "inf"
    records = []
    for record in sorted(run.records, key=lambda record: record.number):
        written = asdict(record)
        del written["text"]
        records.append(written)
    whole = {"settings": settings, "summary": summary.as_dict(), "records": records}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
