"""The command line: ``radixkv demo | chat | generate``."""

from radixkv.cli.app import main

__all__ = ["main"]
