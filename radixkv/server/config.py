"""ServerConfig: what a server is told, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How an engine is served.

    Parameters
    ----------
    host : str
    port : int
        0 takes any free one.
    served_model_name : str, optional
        What clients call the model; the model's own name unless given.
    api_keys : tuple of str
        Who brings one of them is served; without any, everybody is.
    isolate_keys : bool
        What one key's requests have cached is never found by another's.
    protect_page : bool
        The page and metrics need a key too.
    max_queued : int
        Requests that may be unfinished at a time; more are answered with 429.
    max_body_bytes : int
        Largest body of a request. A value in it may stand for 8 of these bytes, an object, list or
        field for 128 (see `body.check_parts`): while they are made nothing else runs; see
        `benchmarks/event_loop.py`.
    max_n : int
        Most continuations of one prompt, and most prompts of one request.
    context_seconds : float
        Time after its last call at which a context over HTTP is closed.
    max_contexts : int
        Contexts over HTTP that may be open at a time.
    drain_seconds : float
        Time that running requests get to end when the server is told to.
    access_log : bool or "json"
        A line for each request, to the logger ``radixkv.access``; for a person or for programs.
    log_stats_seconds : float
        Time between two lines on how the engine does, to the logger ``radixkv.server``, while it
        has work; 0 for none.
    kv_events : str, optional
        Publish what is cached over ZMQ, bound here, like "tcp://127.0.0.1:5557". Who reads it
        reads prompts' tokens.
    otlp_endpoint : str, optional
        Send OpenTelemetry traces to a collector at this URL. Without one, to where the environment
        variable OTEL_EXPORTER_OTLP_ENDPOINT says, if it is set.

    Raises
    ------
    ConfigError
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    isolate_keys: bool = False
    protect_page: bool = False
    max_queued: int = 1024
    max_body_bytes: int = 2 << 20
    max_n: int = 128
    context_seconds: float = 300.0
    max_contexts: int = 1024
    drain_seconds: float = 30.0
    access_log: bool | Literal["json"] = True
    log_stats_seconds: float = 10.0
    kv_events: str | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be in 0 to 65535, not {self.port}")
        if not all(self.api_keys):
            raise ConfigError("an API key is empty")
        if (self.isolate_keys or self.protect_page) and not self.api_keys:
            raise ConfigError("isolate_keys and protect_page need api_keys; give --api-key")
        for name in ("max_queued", "max_body_bytes", "max_n", "max_contexts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.access_log not in (True, False, "json"):
            raise ConfigError(f'access_log must be True, False or "json", not {self.access_log!r}')
        for name in ("context_seconds", "drain_seconds", "log_stats_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0 seconds, not {getattr(self, name)}")
