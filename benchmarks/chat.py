"""How fast are chats over a shared prompt: cold, warm, and at their second turn?

    python benchmarks/chat.py [--short] [--prefixes 0,1500] [--users 64] [--engines radixkv,vllm]

Users ask at once, each behind the same prefix, greedy, with a fixed number of new tokens. *Cold*:
nothing is cached. *Warm*: the same again. *Second turn*: each user goes on from the answer that
this engine gave. Prefixes of 0 to 4,000 tokens with all users, then 1 to 64 users with one prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plots
import serving
from peers.engines import ENGINES, Field
from peers.process import PeerProcess
from serving import Prompts, Reply, Report, Results, Run, Texts

PREFIXES = (0, 128, 512, 1500, 4000)
USERS = (1, 4, 16, 64)
MIDDLE = 1500  # the prefix with which the number of users varies


def cases(
    short: bool, prefixes: list[int] | None, users: list[int] | None
) -> list[tuple[int, int]]:
    """(prefix, users) of each case."""
    if prefixes or users:
        return [(p, u) for p in prefixes or [MIDDLE] for u in users or [max(USERS)]]
    if short:
        return [(0, 4), (128, 4)]
    most = max(USERS)
    return [(p, most) for p in PREFIXES] + [(MIDDLE, u) for u in USERS if u != most]


def next_turn(texts: Texts, prompts: Prompts, run: Run) -> Callable[..., Reply]:
    """The phase in which each user goes on from the answer of the phase before."""

    def phase(process: PeerProcess, before: dict[str, Any]) -> Reply:
        answers = before["warm"]["tokens"]
        longer = [
            [*prompt, *answer[0], *texts.follow_up(user)]
            for user, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        return run(process, longer)

    return phase


def title_of(prefix: int, users: int) -> str:
    return f"prefix {prefix}, {users} users"


def measure_case(
    field: Field, texts: Texts, report: Report, prefix: int, users: int, new_tokens: int
) -> None:
    """Turns of all engines with one prefix and number of users."""
    prompts = [texts.prefix(prefix) + texts.question(user) for user in range(users)]
    run = Run(new_tokens)
    phases = {
        "cold": run.cold(prompts),
        "warm": run.again(prompts),
        "second turn": next_turn(texts, prompts, run),
    }
    serving.warm_up(field, prompts, run)
    outcomes = field.turns(phases, report.options.turns, report.options.slow_turns)
    # All answers have the same length, so everyone's second turn has as many tokens.
    second = [
        prompt + [0] * (new_tokens + len(texts.follow_up(user)))
        for user, prompt in enumerate(prompts)
    ]
    given = {"cold": prompts, "warm": prompts, "second turn": second}
    report.case(title_of(prefix, users), outcomes, given)


def draw(results: Results, path: Path) -> None:
    """Output tokens/s, warm, over the prefix or, with one prefix, over the users."""
    at = {tuple(int(w) for w in t.replace(",", "").split() if w.isdigit()): t for t in results}
    most = max(users for _, users in at)
    by_prefix = {p: at[p, users] for p, users in at if users == most}
    by_users = {users: title for (_, users), title in at.items()}
    places, axis = (
        (by_prefix, "shared tokens") if len(by_prefix) > 1 else (by_users, "users at once")
    )
    names = {name for case in results.values() for name in case["warm"]}
    series = {
        ENGINES[name].title: [
            serving.tokens_per_second(results[title]["warm"].get(name, {}))
            for title in places.values()
        ]
        for name in sorted(names)
    }
    plots.lines(path, "Chats over a cached prefix", "tokens/s", axis, list(places), series)


def main() -> None:
    parser = serving.parser_of(__doc__)
    parser.add_argument("--prefixes", type=serving.numbers, help="like 0,1500")
    parser.add_argument("--users", type=serving.numbers, help="like 1,64")
    parser.add_argument("--new-tokens", type=int, help="64, or 8 if short")
    options = parser.parse_args()
    if options.short:
        options.turns = 1
    new_tokens = options.new_tokens or (8 if options.short else 64)
    wanted = cases(options.short, options.prefixes, options.users)

    def measure(field: Field, texts: Texts, report: Report) -> None:
        for prefix, users in wanted:
            measure_case(field, texts, report, prefix, users, new_tokens)

    longest = max(prefix for prefix, _ in wanted) + 2 * new_tokens + 200
    serving.run_benchmark(options, longest, max(users for _, users in wanted), measure, draw)


if __name__ == "__main__":
    main()
