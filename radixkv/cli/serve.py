"""``radixkv serve``: its options. They have vLLM's names where they mean the same."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

import typer

from radixkv.errors import ConfigError
from radixkv.server.config import ServerConfig

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


def _flag(name: str, panel: str, text: str, shown: str | None = "N", **more: Any) -> Any:
    return typer.Option(name, help=text, metavar=shown, rich_help_panel=panel, **more)


@dataclass(frozen=True, kw_only=True)
class LoadingFlags:
    """What `LLM` is told: its parameters, each with its flag."""

    dtype: Annotated[
        str,
        _flag("--dtype", MODEL, "auto, float32, bfloat16 or float16.", "NAME", show_default=False),
    ] = "auto"
    device: Annotated[
        str, _flag("--device", MODEL, "auto, cpu, cuda or cuda:N.", "NAME", show_default=False)
    ] = "auto"
    quantization: Annotated[
        str | None, _flag("--quantization", MODEL, "int8: weights in 8 bits.", "NAME")
    ] = None
    max_model_len: Annotated[
        int | None, _flag("--max-model-len", MODEL, "Tokens of a prompt and its answer.", min=1)
    ] = None
    seed: Annotated[int | None, _flag("--seed", MODEL, "Of requests that bring none.", min=0)] = (
        None
    )
    max_num_seqs: Annotated[int, _flag("--max-num-seqs", CACHE, "Running at a time.", min=1)] = 256
    max_num_batched_tokens: Annotated[
        int, _flag("--max-num-batched-tokens", CACHE, "Tokens of a step.", min=1)
    ] = 2048
    kv_memory: Annotated[
        str,
        _flag("--kv-memory", CACHE, "auto, or as 2GiB, 512MiB.", "SIZE", show_default=False),
    ] = "auto"
    kv_dtype: Annotated[
        str, _flag("--kv-cache-dtype", CACHE, "auto, fp8 or fp8_e5m2.", "NAME", show_default=False)
    ] = "auto"
    block_size: Annotated[int, _flag("--block-size", CACHE, "Tokens.", min=1)] = 16
    eviction: Annotated[
        str,
        _flag("--eviction", CACHE, "lru, plain-lru, fifo or priority.", "NAME", show_default=False),
    ] = "lru"


@dataclass(frozen=True, kw_only=True)
class ServingFlags:
    """What `ServerConfig` is told: its fields, which it checks, each with its flag."""

    served_model_name: Annotated[
        str | None, _flag("--served-model-name", MODEL, "What clients call it.", "NAME")
    ] = None
    host: Annotated[str, _flag("--host", SERVER, "Where to listen.", "HOST")] = ServerConfig.host
    port: Annotated[int, _flag("--port", SERVER, "0 takes a free one.")] = ServerConfig.port
    api_keys: Annotated[
        list[str] | None, _flag("--api-key", SERVER, f"May be repeated; or {KEYS}=A,B.", "KEY")
    ] = None
    isolate_keys: Annotated[
        bool, _flag("--isolate-keys", SERVER, "Keys find nothing of one another's cache.", "")
    ] = ServerConfig.isolate_keys
    protect_page: Annotated[
        bool, _flag("--protect-page", SERVER, "The page and metrics need a key too.", "")
    ] = ServerConfig.protect_page
    max_queued: Annotated[int, _flag("--max-queued", SERVER, "Unfinished; more get 429.")] = (
        ServerConfig.max_queued
    )
    max_body_bytes: Annotated[int, _flag("--max-body-bytes", SERVER, "Largest body.")] = (
        ServerConfig.max_body_bytes
    )
    context_seconds: Annotated[
        float, _flag("--context-ttl", SERVER, "Of a context nobody calls.", "SECONDS")
    ] = ServerConfig.context_seconds
    drain_seconds: Annotated[
        float, _flag("--drain-seconds", SERVER, "For what runs at SIGTERM.", "SECONDS")
    ] = ServerConfig.drain_seconds
    access_log: Annotated[AccessLog, _flag("--access-log", WATCHING, "Of requests.", None)] = (
        AccessLog.plain
    )
    log_stats_seconds: Annotated[
        float, _flag("--log-stats-seconds", WATCHING, "0 logs none.", "SECONDS")
    ] = ServerConfig.log_stats_seconds
    kv_events: Annotated[
        str | None, _flag("--kv-events", WATCHING, "Publish at tcp://HOST:PORT.", "URL")
    ] = None
    otlp_endpoint: Annotated[
        str | None, _flag("--otlp-endpoint", WATCHING, "Send traces there.", "URL")
    ] = None


F = TypeVar("F", LoadingFlags, ServingFlags)


def _takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, which takes any keywords, the fields of these for its flags."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for group in groups:
            named += inspect.signature(group, eval_str=True).parameters.values()
        command.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
        return command

    return decorate


def _taken(group: type[F], flags: dict[str, Any]) -> F:
    return group(**{field.name: flags[field.name] for field in fields(group)})


@_takes(LoadingFlags, ServingFlags)
def serve(
    model: Annotated[
        str, typer.Argument(help="A hub name, a folder or a GGUF file.", metavar="MODEL")
    ] = "demo",
    **flags: Any,
) -> None:
    """Serve a model over OpenAI's API."""
    from radixkv.server.address import bound

    config = _config(_taken(ServingFlags, flags))
    with bound(config.host, config.port) as listener:
        # Not before: it takes seconds, and what is wrong with the address is known now.
        from radixkv.cli.dtypes import command_dtype
        from radixkv.llm import LLM
        from radixkv.server.logs import show_logs
        from radixkv.server.run import run_server

        told = _taken(LoadingFlags, flags)
        told = replace(told, dtype=command_dtype(model, told.dtype, told.device))
        llm = LLM(model, **vars(told), progress=lambda line: print(line, file=sys.stderr))
        show_logs(config.access_log)
        raise typer.Exit(run_server(llm, config, listener))


def _config(told: ServingFlags) -> ServerConfig:
    settings = vars(told) | {
        "api_keys": (*(told.api_keys or ()), *_keys_of_environment()),
        "access_log": told.access_log.as_setting(),
    }
    return ServerConfig(**settings)


def _keys_of_environment() -> list[str]:
    """Keys that are not to be seen in a list of processes."""
    given = os.environ.get(KEYS)
    if given is None:
        return []
    keys = [key.strip() for key in given.split(",")]
    if not all(keys):
        raise ConfigError(f"{KEYS} holds an empty key; give keys with commas between, or unset it")
    return keys
