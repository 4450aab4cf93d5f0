"""The command line: ``radixkv demo | chat | generate | serve | bench | inspect | lint``."""

from radixkv.cli.app import main

__all__ = ["main"]
