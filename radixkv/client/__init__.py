"""Programs over a server's contexts, from elsewhere: the same interface as in the engine's process.

>>> from radixkv.client import Client
>>> with Client("http://127.0.0.1:8000") as client, client.context("Once upon a time") as ctx:
...     print(ctx.generate(max_tokens=16).text)

A program that runs on ``LLM.context()`` runs on ``Client.context()``, with or without ``await``.
Importing this imports no model library.

client       Client: one server, and the operations that wait to be sent
context      Context: as `radixkv.programs.Context`
pending      what generate, score and choose return: run, await or iterate it
results      what comes of them
said         what was generated in a context, as far as its client knows
wire         Python's objects as JSON
link         the connection: a thread with an event loop of its own
failures     the server's errors as the classes of `radixkv.errors`
"""

from radixkv.client.client import Client
from radixkv.client.context import Context
from radixkv.client.pending import Choosing, Generation, Pending, Scoring
from radixkv.client.results import Choice, ContextStats, Output, Score, TokenLogprobs
from radixkv.client.said import Checkpoint
from radixkv.client.wire import Majority, majority

__all__ = [
    "Checkpoint",
    "Choice",
    "Choosing",
    "Client",
    "Context",
    "ContextStats",
    "Generation",
    "Majority",
    "Output",
    "Pending",
    "Score",
    "Scoring",
    "TokenLogprobs",
    "majority",
]
