"""A peer that computes nothing: continues each prompt by counting on from its last token.

Its argument says how it misbehaves: ``fails`` answers runs with an error, ``dies`` ends at a run,
``hangs`` never answers one, ``babbles`` begins with what is no JSON; ``unloadable`` cannot load.
Prints of libraries must not disturb the protocol, so it prints, too.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))

from driver import Clock, Driver, Reply, Request, serve

HOW = sys.argv[1] if len(sys.argv) > 1 else ""


class Fake(Driver):
    def load(self, request: Request) -> Reply:
        print("a library says hello")
        if HOW == "unloadable":
            raise OSError("there is no such model")
        self.cached: set[int] = set()
        return {"note": f"{request['dtype']}, {request['threads']} threads"}

    def reset(self) -> None:
        self.cached.clear()

    def run(self, request: Request) -> Reply:
        if HOW == "fails":
            raise ValueError("cannot do this")
        if HOW == "dies":
            print("something broke", file=sys.stderr, flush=True)
            os._exit(3)
        if HOW == "hangs":
            time.sleep(60)
        prompts = request["prompts"]
        clock = Clock(len(prompts))
        cached = [len(prompt) if prompt[-1] in self.cached else 0 for prompt in prompts]
        self.cached.update(prompt[-1] for prompt in prompts)
        clock.note_all()
        clock.note_all()
        width = request["width"]
        tokens = [
            [[prompt[-1] + 1 + i for i in range(request["max_tokens"])]] * width
            for prompt in prompts
        ]
        return {"tokens": tokens, "times": clock.times, "cached_tokens": cached}


if __name__ == "__main__":
    if HOW == "babbles":
        print("hello", flush=True)
    serve(Fake)
