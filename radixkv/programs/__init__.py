"""Programs over the cache: contexts that grow, branch and join, with every block shared.

context   Context: append, generate, score, choose, fork, join, checkpoint, rollback
pending   what generate, score and choose return: run, await or iterate it
joining   which branch is the best: by log-probability, by a function, by majority
endings   which tokens of a finished generation a context goes on from
turns     messages behind messages, in the model's own chat format
host      Host: what lies below, and the one loop that all generations share
"""

from radixkv.programs.context import Checkpoint, Context, ContextStats
from radixkv.programs.host import Host
from radixkv.programs.joining import Majority, majority
from radixkv.programs.pending import Choice, Generation, Pending, Score, run

__all__ = [
    "Checkpoint",
    "Choice",
    "Context",
    "ContextStats",
    "Generation",
    "Host",
    "Majority",
    "Pending",
    "Score",
    "majority",
    "run",
]
