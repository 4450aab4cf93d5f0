"""The console script within the tests' own process."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable

import pytest

from radixkv.cli import main


@pytest.fixture
def inside(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same as `radixkv` within this process: importing torch anew takes seconds."""

    def call(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ending:
            main(list(arguments))
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(str(ending.value.code)), out, err)

    return call
