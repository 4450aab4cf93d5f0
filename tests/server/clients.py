"""What the tests of the API share."""

from __future__ import annotations

from typing import Any

from openai import OpenAI


def client_of(url: str, **settings: Any) -> OpenAI:
    """OpenAI's client, which does not try again."""
    return OpenAI(**{"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, **settings})
