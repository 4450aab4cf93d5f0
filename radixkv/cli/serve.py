"""``radixkv serve``: its options. They have vLLM's names where they mean the same."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated, Literal

import typer

from radixkv.errors import ConfigError

KEYS = "RADIXKV_API_KEY"

MODEL, CACHE, SERVER, WATCHING = "Model", "Batches and cache", "Server", "Watching"


class AccessLog(StrEnum):
    """How requests are logged, to stdout."""

    plain = "plain"
    json = "json"
    off = "off"

    def as_setting(self) -> bool | Literal["json"]:
        """As `ServerConfig` has it."""
        return "json" if self is AccessLog.json else self is AccessLog.plain


def serve(
    model: Annotated[
        str,
        typer.Argument(help="demo, a hub name, a folder or a GGUF file.", metavar="MODEL"),
    ] = "demo",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16.", metavar="NAME", rich_help_panel=MODEL)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N.", metavar="NAME", rich_help_panel=MODEL)
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="int8 weights.", metavar="NAME", rich_help_panel=MODEL)
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="What clients call it.", metavar="NAME", rich_help_panel=MODEL),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt and answer.", metavar="N", rich_help_panel=MODEL),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of requests without one.", metavar="N", rich_help_panel=MODEL),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Running at a time.", metavar="N", rich_help_panel=CACHE)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a step.", metavar="N", rich_help_panel=CACHE)
    ] = 2048,
    kv_memory: Annotated[
        str, typer.Option(help="The pool, as 2GiB.", metavar="SIZE", rich_help_panel=CACHE)
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="fp8 or fp8_e5m2.", metavar="NAME", rich_help_panel=CACHE)
    ] = "auto",
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a block.", metavar="N", rich_help_panel=CACHE)
    ] = 16,
    eviction: Annotated[
        str,
        typer.Option(help="Or plain-lru, fifo, priority.", metavar="NAME", rich_help_panel=CACHE),
    ] = "lru",
    host: Annotated[
        str, typer.Option(help="Listen here.", metavar="HOST", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="0 takes a free one.", metavar="N", rich_help_panel=SERVER)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable; or {KEYS}=A,B.", metavar="KEY", rich_help_panel=SERVER),
    ] = None,
    isolate_keys: Annotated[
        bool,
        typer.Option("--isolate-keys", help="Keys share no cache.", rich_help_panel=SERVER),
    ] = False,
    protect_page: Annotated[
        bool,
        typer.Option("--protect-page", help="Page, metrics: by key.", rich_help_panel=SERVER),
    ] = False,
    max_queued: Annotated[
        int, typer.Option(min=1, help="Unfinished; then 429.", metavar="N", rich_help_panel=SERVER)
    ] = 1024,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="A body's.", metavar="N", rich_help_panel=SERVER)
    ] = 2 << 20,
    context_ttl: Annotated[
        float,
        typer.Option(min=0, help="Of an idle context.", metavar="SECONDS", rich_help_panel=SERVER),
    ] = 300.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="At SIGTERM.", metavar="SECONDS", rich_help_panel=SERVER)
    ] = 30.0,
    access_log: Annotated[
        AccessLog, typer.Option(help="On stdout.", rich_help_panel=WATCHING)
    ] = AccessLog.plain,
    log_stats_seconds: Annotated[
        float, typer.Option(min=0, help="0: none.", metavar="SECONDS", rich_help_panel=WATCHING)
    ] = 10.0,
    kv_events: Annotated[
        str | None,
        typer.Option(help="Publish, as tcp://HOST:PORT.", metavar="URL", rich_help_panel=WATCHING),
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send traces there.", metavar="URL", rich_help_panel=WATCHING)
    ] = None,
) -> None:
    """Serve a model over OpenAI's API."""
    from radixkv.server.address import bound
    from radixkv.server.config import ServerConfig

    config = ServerConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_keys=(*(api_key or ()), *_keys_of_environment()),
        isolate_keys=isolate_keys,
        protect_page=protect_page,
        max_queued=max_queued,
        max_body_bytes=max_body_bytes,
        context_seconds=context_ttl,
        drain_seconds=drain_seconds,
        access_log=access_log.as_setting(),
        log_stats_seconds=log_stats_seconds,
        kv_events=kv_events,
        otlp_endpoint=otlp_endpoint,
    )

    with bound(host, port) as listener:
        # Not before: it takes seconds, and what is wrong with the address is known now.
        from radixkv.cli.dtypes import command_dtype
        from radixkv.llm import LLM
        from radixkv.server.logs import show_logs
        from radixkv.server.run import run_server

        llm = LLM(
            model,
            dtype=command_dtype(model, dtype, device),
            device=device,
            kv_memory=kv_memory,
            kv_dtype=kv_cache_dtype,
            quantization=quantization,
            block_size=block_size,
            eviction=eviction,
            seed=seed,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            progress=lambda line: print(line, file=sys.stderr),
        )
        show_logs(config.access_log)
        raise typer.Exit(run_server(llm, config, listener))


def _keys_of_environment() -> list[str]:
    """Keys that are not to be seen in a list of processes."""
    given = os.environ.get(KEYS)
    if given is None:
        return []
    keys = [key.strip() for key in given.split(",")]
    if not all(keys):
        raise ConfigError(f"{KEYS} holds an empty key; give keys with commas between, or unset it")
    return keys
