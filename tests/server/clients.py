"""What the tests of the API share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI


def client_of(url: str, **settings: Any) -> OpenAI:
    """OpenAI's client, which does not try again."""
    return OpenAI(**{"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, **settings})


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; half a minute at the most."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
