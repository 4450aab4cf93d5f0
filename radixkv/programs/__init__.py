"""Programs over the cache: contexts that grow, branch and join, with every block shared.

    context      Context: append, generate, score, choose, fork, join, checkpoint, rollback
    view         what a context says and holds, and whether it is free
    transcript   what a context says, and the places to go back to
    content      what they are given, perhaps with its tokens
    pending      what these return: run, await or iterate it
    scoring      log-probabilities of given texts, and the choice of the likeliest
    joining      which branch is the best: by log-probability, by a function, by majority
    endings      which tokens of a finished generation a context goes on from
    turns        messages behind messages, in the model's own chat format
    host         Host: what lies below, and the one loop that all generations share

What a program costs is what the engine below computes for it; nothing is computed here.
"""

from radixkv.programs.content import Prepared
from radixkv.programs.context import Context
from radixkv.programs.host import Host
from radixkv.programs.joining import Majority, majority
from radixkv.programs.pending import Generation, Pending, run
from radixkv.programs.scoring import Choice, Score
from radixkv.programs.transcript import Checkpoint
from radixkv.programs.view import ContextStats

__all__ = [
    "Checkpoint",
    "Choice",
    "Context",
    "ContextStats",
    "Generation",
    "Host",
    "Majority",
    "Pending",
    "Prepared",
    "Score",
    "majority",
    "run",
]
