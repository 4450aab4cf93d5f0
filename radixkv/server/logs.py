"""Where a server's logs go: requests to stdout, all else to stderr."""

from __future__ import annotations

import logging
import sys
from typing import Literal

WHEN = "%Y-%m-%d %H:%M:%S"


def show_logs(access_log: bool | Literal["json"]) -> None:
    """Show what radixkv logs; for who runs a server as a process of its own.

    Parameters
    ----------
    access_log : bool or "json"
        As in `ServerConfig`: JSON's lines have nothing before them.
    """
    rest = logging.StreamHandler(sys.stderr)
    rest.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", WHEN))
    requests = logging.StreamHandler(sys.stdout)
    plain = "%(message)s" if access_log == "json" else "%(asctime)s %(message)s"
    requests.setFormatter(logging.Formatter(plain, WHEN))
    for name, handler in (("radixkv", rest), ("radixkv.access", requests)):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers[:] = [handler]
        logger.propagate = False
