"""The access log: one line a request, once it has been answered."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from urllib.parse import quote

from radixkv.server.record import Record

log = logging.getLogger("radixkv.access")

# What a path may have unescaped: no line break or control character reaches the log.
SAFE = "/:@!$&'()*+,;=-._~"


def log_plainly(record: Record) -> None:
    """Log it for a person to read."""
    if not log.isEnabledFor(logging.INFO):
        return
    tokens = record.tokens()
    parts = [f"{record.seconds:.3f} s"]
    if tokens:
        parts.append("prompt {prompt_tokens}, cached {cached_tokens}".format_map(tokens))
        parts.append("generated {generated_tokens}".format_map(tokens))
    if not record.complete:
        parts.append("client left" if record.status < 500 else "not answered to the end")
    parts.append(f"id {record.request_id}")
    log.info(
        '%s "%s %s" %d, %s',
        record.client,
        record.method,
        quote(record.path, SAFE),
        record.status,
        ", ".join(parts),
    )


def log_as_json(record: Record) -> None:
    """Log it for a program to read."""
    if not log.isEnabledFor(logging.INFO):
        return
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "route": record.route,
        "status": record.status,
        "complete": record.complete,
        "seconds": round(record.seconds, 6),
        **record.tokens(),
        "request_id": record.request_id,
    }
    log.info("%s", json.dumps(entry, ensure_ascii=True))
