"""What commands that talk with a server share: its key, one question, its errors in a line."""

from __future__ import annotations

from typing import Any

import httpx

from radixkv.errors import RadixKVError


def headers_of(api_key: str | None) -> dict[str, str]:
    """The headers that carry a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def get_json(url: str, path: str, api_key: str | None, **query: Any) -> Any:
    """What a server answers to a GET.

    Raises
    ------
    RadixKVError
        If it cannot be reached, refuses, or answers no JSON.
    """
    try:
        response = httpx.get(
            f"{url.rstrip('/')}{path}", headers=headers_of(api_key), params=query, timeout=30
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RadixKVError(f"cannot reach {url}: {error}") from error
    try:
        answer = response.json()
    except ValueError as error:
        raise RadixKVError(f"{url}{path} answers no JSON (HTTP {response.status_code})") from error
    if response.status_code != 200:
        message = answer.get("error") if isinstance(answer, dict) else None
        message = message.get("message") if isinstance(message, dict) else message
        hint = " (--api-key, or RADIXKV_API_KEY)" if response.status_code == 401 else ""
        raise RadixKVError(f"{url}{path}: HTTP {response.status_code}: {message or ''}{hint}")
    return answer
