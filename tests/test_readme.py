"""Every Python block of the README and the docs runs as it stands, in order, on the demo model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_there_are_blocks_to_run() -> None:
    assert python_blocks(ROOT / "README.md")


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in python_blocks(page):
        # What a comment behind a print promises must be what it prints.
        promised = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        exec(compile(block, str(page), "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
        for line in promised:
            assert line in printed


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
