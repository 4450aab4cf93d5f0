"""``radixkv lint``: from a file to its findings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer
from rich.console import Console

from radixkv.cli.lint.prompts import Renderer
from radixkv.cli.lint.report import lint, print_verdict
from radixkv.cli.lint.requests import read_requests


def run_lint(file: Path, model: str, min_tokens: int, as_json: bool, strict: bool) -> None:
    """Print what was found; leaves with 1 if that is anything and ``strict``.

    Raises
    ------
    RequestError
        If the file holds something else than requests, or the model's template refuses one.
    ModelLoadError
        If there is no such model, or it has no tokenizer.
    """
    requests = read_requests(file)
    from radixkv.model.loading import load_tokenizer

    tokenizer, name = load_tokenizer(model, progress=lambda line: print(line, file=sys.stderr))
    verdict = lint(requests, Renderer(tokenizer, name), min_tokens)
    if as_json:
        print(json.dumps(verdict.as_dict(), indent=2, ensure_ascii=False))
    else:
        print_verdict(verdict, Console())
    if strict and verdict.findings:
        raise typer.Exit(1)
