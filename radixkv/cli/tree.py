"""``radixkv inspect``: the tree of a running server, in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from radixkv.cli.http import get_json
from radixkv.errors import RadixKVError

PREVIEW_CHARACTERS = 60
ROUTE = "/v1/tree"

Answer = dict[str, Any]


def run_inspect(url: str, api_key: str | None, limit: int, watch: float | None) -> None:
    """Show the tree once, or again every ``watch`` seconds until interrupted.

    Raises
    ------
    RadixKVError
        If the server cannot be reached, refuses, or is none of ours.
    """
    console = Console()

    def look() -> Group:
        return render(get_json(url, ROUTE, api_key, limit=limit))

    if watch is None:
        console.print(look())
    else:
        _watch(console, look, watch)


def _watch(console: Console, look: Callable[[], Group], seconds: float) -> None:
    with Live(look(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            time.sleep(seconds)
            live.update(look(), refresh=True)


def render(answer: Answer) -> Group:
    """The pool's summary, and a tree for each namespace.

    Raises
    ------
    RadixKVError
        If the answer is not of the form that this version knows.
    """
    try:
        return Group(_summary(answer), *_trees(answer))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RadixKVError(
            f"{ROUTE} answers in a form that is not known here: {error!r}"
        ) from error


def _summary(answer: Answer) -> Text:
    pool = answer["pool"]
    held = pool["held_only"] + pool["held_and_cached"]
    queries, hits = answer["query_tokens"], answer["hit_tokens"]
    rate = f"{hits / queries:.1%}" if queries else "-"
    return Text(
        f"{answer['model']}: {answer['running']} running, {answer['waiting']} waiting\n"
        f"{pool['num_blocks']:,} blocks of {pool['block_size']} tokens: {held:,} held, "
        f"{pool['cached_only']:,} cached only, {pool['free']:,} free\n"
        f"{queries:,} prompt tokens, {hits:,} of them cached: {rate}"
    )


def _trees(answer: Answer) -> list[Tree | Text]:
    trees: dict[tuple[str, ...], Tree] = {}
    branches: dict[int, Tree] = {}
    # What was made last stands first, as in the tree that `radixkv chat` shows.
    for node in sorted(answer["nodes"], key=lambda node: (node["start"], -node["created"])):
        namespace = tuple(node["namespace"])
        if node["parent"] is None:
            name = "root" + (f" {'/'.join(namespace)}" if namespace else "")
            above = trees.setdefault(namespace, Tree(Text(name)))
        else:
            above = branches[node["parent"]]
        branches[node["id"]] = above.add(_describe(node, answer["clock"]))
    for node in answer["nodes"]:
        if hidden := node["hidden_children"]:
            branches[node["id"]].add(Text(f"… {hidden} more", style="dim"))
    return list(trees.values()) or [Text("(empty)")]


def _describe(node: Answer, clock: int) -> Text:
    size = f"{node['tokens']:,} tokens in {node['blocks']:,} blocks, "
    line = Text(size, no_wrap=True, overflow="ellipsis")
    held = node["held"]
    line.append(f"held by {held}", style="bold green" if held else "")
    line.append(f", hits {node['hits']}, used {clock - node['last_used']} uses ago")
    marks = [name for name in ("open", "ephemeral") if node[name]]
    if node["priority"]:
        marks.append(f"priority {node['priority']}")
    if marks:
        line.append(f" ({', '.join(marks)})", style="yellow")
    line.append(f": {node['text'][:PREVIEW_CHARACTERS]!r}", style="cyan")
    return line
