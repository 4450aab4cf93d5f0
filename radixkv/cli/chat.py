"""``radixkv chat``: a conversation in the terminal, with branches."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module

from radixkv.decoding import SamplingParams
from radixkv.engine import TokenDelta
from radixkv.errors import RadixKVError
from radixkv.llm import LLM

HELP = """\
/fork        open a second branch from here and go on in it
/switch N    go on in branch N
/branches    list the branches
/tree        show the cache's tree: what is shared, by how many
/stats       counters of the cache and the engine
/reset       start this branch again
/help        this list
/quit        leave (as Ctrl-D does)"""

Messages = list[dict[str, str]]


@dataclass
class Session:
    """Branches of one conversation, and which of them is spoken to."""

    llm: LLM
    params: SamplingParams
    opening: Messages
    branches: list[Messages] = field(default_factory=list)
    current: int = 0

    def __post_init__(self) -> None:
        self.branches = self.branches or [list(self.opening)]

    @property
    def messages(self) -> Messages:
        return self.branches[self.current]

    def say(self, text: str) -> None:
        """Send a user's turn and stream the answer; a turn that fails leaves no trace."""
        turn = [*self.messages, {"role": "user", "content": text}]
        (output,) = self.llm.chat(turn, self.params, on_token=_show)
        print()
        if output.error is not None:
            raise output.error
        self.branches[self.current] = [*turn, {"role": "assistant", "content": output.text}]

    def command(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                print(HELP)
            case "/tree":
                print(self.llm.render_tree())
            case "/stats":
                self._print_stats()
            case "/fork":
                self.branches.append(list(self.messages))
                self.current = len(self.branches) - 1
                print(f"branch {self.current + 1}, from here on its own")
            case "/branches":
                for index, messages in enumerate(self.branches):
                    mark = "*" if index == self.current else " "
                    last = next((m["content"] for m in messages[::-1]), "")
                    print(f"{mark} {index + 1}  {len(messages)} messages  {last[:60]!r}")
            case "/switch":
                self._switch(rest)
            case "/reset":
                self.branches[self.current] = list(self.opening)
            case _:
                print(f"there is no {name}; /help lists the commands")
        return True

    def _switch(self, number: str) -> None:
        if number.isdigit() and 1 <= int(number) <= len(self.branches):
            self.current = int(number) - 1
            print(f"branch {self.current + 1}")
        else:
            print(f"give a branch from 1 to {len(self.branches)}")

    def _print_stats(self) -> None:
        stats = self.llm.stats()
        cache, engine = stats.cache, stats.engine
        print(
            f"prompt tokens {cache.counters.query_tokens}, from the cache "
            f"{cache.counters.hit_tokens} ({cache.hit_rate:.0%}), prefilled "
            f"{engine.prefilled_tokens}, generated {engine.sampled_tokens}\n"
            f"blocks: {cache.num_blocks - cache.free} in use of {cache.num_blocks}, "
            f"copies on write {cache.counters.copies_on_write}, "
            f"evicted {cache.counters.blocks_evicted}"
        )


def _show(delta: TokenDelta) -> None:
    print(delta.text, end="", flush=True)


def run_chat(llm: LLM, params: SamplingParams, system: str) -> None:
    """Read lines until the end of input; Ctrl-C stops an answer, and leaves at the prompt."""
    opening = [{"role": "system", "content": system}] if system else []
    session = Session(llm, params, opening)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import_module("readline")  # which makes input() edit lines and remember them
        print(f"{llm.loaded.name}. /help lists the commands, Ctrl-D leaves.")
    while True:
        try:
            line = input(f"{session.current + 1}> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line.startswith("/"):
            if not session.command(line):
                return
        elif line:
            _answer(session, line)


def _answer(session: Session, line: str) -> None:
    try:
        session.say(line)
    except KeyboardInterrupt:
        print("\n(stopped; the turn is dropped)")
    except RadixKVError as error:
        print(f"({error}; the turn is dropped)")
