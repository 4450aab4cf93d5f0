"""``radixkv inspect`` and ``radixkv lint``: their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    url: Annotated[str, typer.Argument(help="The server's, like http://127.0.0.1:8000.")],
    limit: Annotated[
        int, typer.Option(min=1, max=5000, help="Most nodes: held, then used last.")
    ] = 200,
    watch: Annotated[bool, typer.Option("--watch", help="Look again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="RADIXKV_API_KEY", help="Sent as a bearer token.")
    ] = None,
) -> None:
    """Show the tree of a running server: what is cached, shared and held."""
    from radixkv.cli.tree import run_inspect

    run_inspect(url, api_key, limit, interval if watch else None)


def lint(
    file: Annotated[
        Path, typer.Argument(help="JSON lines: requests' bodies.", exists=True, dir_okay=False)
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="demo, a hub name, a folder or a GGUF file.")
    ] = "demo",
    min_tokens: Annotated[
        int, typer.Option(min=1, help="Fewer tokens that a request could share do not matter.")
    ] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Leave with 1 if anything is found.")
    ] = False,
) -> None:
    """Read logged requests and name the tokens at which prompts that should share differ."""
    from radixkv.cli.lint.run import run_lint

    run_lint(file, model, min_tokens, as_json, strict)
