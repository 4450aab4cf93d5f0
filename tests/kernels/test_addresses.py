"""Caches of more than 2^31 elements: two engines have overflowed a 32-bit page offset."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.interpreted
def test_addresses_do_not_overflow():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("far_addresses.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert "every address was right" in done.stdout
