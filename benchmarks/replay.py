"""How close to the offline optimum does the cache come on real traces, and what does it cost?

    python benchmarks/replay.py [--short] [--parts cache,engine] [--traces ...] [--output FILE]

Each trace is replayed, a request at a time, against a cache of 5, 10, 25 and 50 % of the trace's
unique blocks, once with each eviction policy, and once with a program's hint: requests that nobody
will go on from are marked ephemeral. Hits are prompt tokens; those of the optimum, and ours beside
it, are counted in full blocks, and ours once more to the token. A request that is larger than the
whole cache finds nothing in ours. The optimum is Belady's rule, see
`optimum.py`. CPU time is that of acquire, commit and release, by the process clock.

"engine": the first requests of each trace, all lengths divided by a number that the table names,
against the whole engine with a tiny random model (`--model demo` for the real one), LRU: one after
the other, and 16 at once. Beside it the cache alone is replayed with the same prompts and answers:
what the engine prefills one after the other must be what that says, to the token. "again" is what
was computed twice because a request had to give way.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_replay
import optimum
import plots
import traces
from measure import print_head, print_table, write_json

from radixkv.cache import DEFAULT_RETENTION, EPHEMERAL, PrefixCache
from radixkv.cache.policies import POLICIES
from radixkv.config import CacheConfig
from radixkv.errors import OutOfBlocksError

SHARES = (0.05, 0.10, 0.25, 0.50)
BLOCK_SIZE = 16  # or the trace's unit, where that is larger
HINTED = "lru, hinted"


@dataclass
class Replay:
    """One pass over a trace: prompt tokens, hits, time."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    block_hit_tokens: int = 0  # hits rounded down to full blocks
    too_large: int = 0  # requests that do not fit into the cache
    cpu_s: float = 0.0
    requests: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "hit_rate": self.hit_tokens / self.prompt_tokens,
            "block_hit_rate": self.block_hit_tokens / self.prompt_tokens,
            "too_large": self.too_large,
            "cpu_us": self.cpu_s / self.requests * 1e6,
        }


def replay(trace: traces.Trace, block_size: int, num_blocks: int, policy: str) -> Replay:
    """Replay a trace against a fresh cache."""
    eviction = "lru" if policy == HINTED else policy
    cache = PrefixCache(
        CacheConfig(num_blocks=num_blocks, block_size=block_size, eviction=eviction)
    )
    done, clock = Replay(), time.process_time
    for request in trace.requests():
        ends = policy == HINTED and not request.goes_on
        done.requests += 1
        done.prompt_tokens += request.prompt_length
        begin = clock()
        try:
            sequence = cache.acquire(
                request.tokens, retention=EPHEMERAL if ends else DEFAULT_RETENTION
            )
        except OutOfBlocksError:
            done.too_large += 1
            done.cpu_s += clock() - begin
            continue
        cached = min(sequence.num_cached, request.prompt_length)
        cache.commit(sequence)
        cache.release(sequence)
        done.cpu_s += clock() - begin
        cache.take_copies()
        done.hit_tokens += cached
        done.block_hit_tokens += cached // block_size * block_size
    return done


def measure(
    trace: traces.Trace, block_size: int, shares: tuple[float, ...], policies: list[str]
) -> dict[str, dict[str, Any]]:
    """By share of the unique blocks: the optimum, and each policy."""
    requests = list(trace.requests())
    data = (request.tokens.tobytes() for request in requests)
    blocks = optimum.block_ids(data, 4 * block_size)
    prompts = [request.prompt_length // block_size for request in requests]
    tokens = sum(request.prompt_length for request in requests)
    unique = len({block for ids in blocks for block in ids})
    del requests, data
    found: dict[str, dict[str, Any]] = {}
    for share in shares:
        capacity = max(int(unique * share), 1)
        best = sum(optimum.hits(blocks, capacity, prompts)) * block_size / tokens
        found[f"{share:.0%}"] = {"blocks": capacity, "optimum": {"block_hit_rate": best}} | {
            policy: replay(trace, block_size, capacity, policy).as_dict() for policy in policies
        }
    return found


def rows_of(found: dict[str, dict[str, Any]], policies: list[str]) -> list[list[Any]]:
    """Lines of the table of one trace."""
    rows: list[list[Any]] = []
    for share, by_policy in found.items():
        best = 100 * by_policy["optimum"]["block_hit_rate"]
        rows.append([f"{share}: optimum", by_policy["blocks"], best, "-", "-", "-"])
        for policy in policies:
            kept = by_policy[policy]
            rates = 100 * kept["block_hit_rate"], 100 * kept["hit_rate"]
            rows.append([f"{share}: {policy}", "", *rates, kept["cpu_us"], kept["too_large"]])
    return rows


def draw(results: dict[str, Any], policies: list[str], path: Path) -> None:
    """Hit rates of the first trace over the capacity."""
    name, found = next(iter(results.items()))
    series = {
        policy: [100 * by_policy[policy]["block_hit_rate"] for by_policy in found.values()]
        for policy in ["optimum", *policies]
    }
    places = [float(share.rstrip("%")) for share in found]
    plots.lines(path, name, "hit rate, %", "capacity, % of the unique blocks", places, series)


def replay_cache(options: argparse.Namespace) -> dict[str, Any]:
    """Every trace against the cache, by every policy."""
    limit = options.requests or (1000 if options.short else None)
    shares = SHARES[:2] if options.short else SHARES
    policies = policies_of(options)
    results = {}
    for name in options.traces.split(","):
        trace = traces.load(name, limit)
        block_size = max(BLOCK_SIZE, trace.unit)
        results[name] = measure(trace, block_size, shares, policies)
        print_table(
            f"{name}, {len(trace.rows):,} requests, blocks of {block_size} tokens",
            ["capacity", "blocks", "hits in blocks %", "hits %", "CPU us a request", "too large"],
            rows_of(results[name], policies),
        )
    return results


def replay_engine(options: argparse.Namespace) -> dict[str, Any]:
    """The beginning of every trace against the engine, at reduced size.

    Raises
    ------
    SystemExit
        If the engine prefills anything else than the cache alone says.
    """
    limit = options.engine_requests or (40 if options.short else 200)
    results = {}
    for name in options.traces.split(","):
        trace, factor = traces.load(name, limit), engine_replay.FACTORS[name]
        found = engine_replay.measure(trace, factor, BLOCK_SIZE, options.model)
        print_table(
            f"{name}, {len(trace.rows):,} requests, lengths / {factor}, {options.model} model",
            engine_replay.HEAD,
            engine_replay.rows_of(found),
        )
        for share, each in found.items():
            said, done = each["cache alone"]["prefilled"], each["engine, in order"]["prefilled"]
            if said != done:
                raise SystemExit(f"{name} at {share}: {done} tokens prefilled, not {said}")
        results[f"{name}, engine"] = found
    return results


def policies_of(options: argparse.Namespace) -> list[str]:
    """The policies by their names in tables."""
    return [
        HINTED if name == HINTED.replace(", ", "-") else name
        for name in options.policies.split(",")
    ]


PARTS = {"cache": replay_cache, "engine": replay_engine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="few requests, two capacities")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, of cache and engine")
    parser.add_argument("--traces", default=",".join(traces.NAMES))
    parser.add_argument("--policies", default=",".join([*POLICIES, HINTED.replace(", ", "-")]))
    parser.add_argument("--requests", type=int, help="only the first so many, of the cache")
    parser.add_argument("--engine-requests", type=int, help="of the engine: 200, or 40 if short")
    parser.add_argument("--model", default="tiny", help="of the engine: tiny, demo, or a folder")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    parser.add_argument("--plot", type=Path, help="draw the first trace there, as SVG or PNG")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.plot is not None and "cache" not in parts:
        parser.error("--plot draws the cache's part")
    print_head()
    results: dict[str, Any] = {}
    for part in parts:
        results |= PARTS[part](options)
    write_json(options.output, results)
    if options.plot is not None:
        draw(results, policies_of(options), options.plot)


if __name__ == "__main__":
    main()
