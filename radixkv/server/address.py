"""Where a server listens: taken before anything is loaded, let in to once all is."""

from __future__ import annotations

import socket

from radixkv.errors import RadixKVError


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, on which nobody is let in yet.

    Raises
    ------
    RadixKVError
        If the address is taken, or none of this machine's.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise taken(f"{host}:{port}", error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise taken(f"{host}:{port}", error) from None
    return listener


def taken(where: str, error: OSError) -> RadixKVError:
    """What to say where nobody can listen."""
    reason = error.strerror or str(error)
    return RadixKVError(f"cannot serve at {where}: {reason}; choose another --host or --port")


def url_of(listener: socket.socket, host: str) -> str:
    """Where clients find a server, by the name that it was told."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"
