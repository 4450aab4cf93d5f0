"""Metrics: exact counts after known work, and no label that a client could make grow."""

from __future__ import annotations

import asyncio

import httpx
from observing import GREEDY, Samples, scrape, value, with_app

from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.engine import TokenDelta
from radixkv.llm import LLM
from radixkv.server.metrics.watch import EngineWatch
from radixkv.server.service import Service

SHARED = bytes(range(65, 97))  # two blocks


def test_counts_after_known_work(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        before = await scrape(client)
        assert value(before, "prefix_cache_queries_total") == 0
        assert value(before, "kv_blocks", state="free") == 64
        for end in (b"abcdefgh", b"abcdWXYZ", b"abcdefgh"):
            answer = await client.post("/chat/x", content=SHARED + end)
            assert answer.status_code == 200
        after = await scrape(client)
        counts = {
            "prefix_cache_queries_total": 120,
            # Of the second two blocks and four tokens, of the third all.
            "prefix_cache_hits_total": 36 + 40,
            "prompt_tokens_total": 120,
            "prefilled_tokens_total": 40 + 4,
            "generation_tokens_total": 36,
            "num_requests_total": 3,
            "recomputed_tokens_total": 0,
            "num_preemptions_total": 0,
            "evicted_tokens_total": 0,
            "kv_events_dropped_total": 0,
            "kv_event_batches_total": 0,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            "kv_blocks_shared": 0,
        }
        assert {name: value(after, name) for name in counts} == counts
        sources = {s: value(after, "cached_tokens_total", source=s) for s in ("tree", "copied")}
        assert sum(sources.values()) == 76
        assert sources["copied"] >= 4
        assert value(after, "cached_tokens_total", source="held") == 0
        assert value(after, "request_success_total", finished_reason="length") == 3
        assert value(after, "request_success_total", finished_reason="abort") == 0
        for name in (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_time_per_output_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
        ):
            assert value(after, f"{name}_count") == 3, name
            assert value(after, f"{name}_bucket", le="+Inf") == 3, name
        assert value(after, "inter_token_latency_seconds_count") == 3 * 11
        assert value(after, "request_prompt_tokens_sum") == 120
        assert value(after, "request_prompt_tokens_bucket", le="20.0") == 0
        assert value(after, "request_prompt_tokens_bucket", le="50.0") == 3
        assert value(after, "request_generation_tokens_sum") == 36
        counters = service.llm.engine.counters
        assert value(after, "engine_step_seconds_count") == counters.steps
        assert value(after, "kv_tokens_read_total") == counters.kv_tokens_read
        # Found again: two blocks, then three (the first of the second request's, four tokens).
        assert value(after, "kv_block_reuse_gap_seconds_count") > 0
        blocks = [value(after, "kv_blocks", state=s) for s in ("free", "held", "cached")]
        assert blocks[1] == 0
        assert sum(blocks) == 64
        assert blocks[2] == service.llm.cache.stats().cached_only
        http = {"method": "POST", "handler": "/chat/{name}", "status": "200"}
        assert value(after, "http_requests_total", **http) == 3
        http = {"method": "GET", "handler": "/metrics", "status": "200"}
        assert value(after, "http_requests_total", **http) == 1

    with_app(make_llm(64), use)


def test_the_parts_of_a_request_add_up(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/chat/x", content=SHARED)
        after = await scrape(client)
        parts = sum(
            value(after, f"request_{part}_time_seconds_sum")
            for part in ("queue", "prefill", "decode")
        )
        whole = value(after, "e2e_request_latency_seconds_sum")
        assert 0 < parts <= whole * 1.0001
        assert abs(parts - whole) < 1e-6
        first = value(after, "time_to_first_token_seconds_sum")
        assert first < whole

    with_app(make_llm(64), use)


def test_what_a_context_holds_and_what_eviction_takes(make_llm) -> None:
    def talk(llm: LLM) -> None:
        context = llm.context(list(SHARED))
        llm.run([context.generate(GREEDY)])
        # 32 + 12 tokens, of which the last was never computed.
        context.append(list(b"more"))
        llm.run([context.generate(GREEDY)])
        context.close()

    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await service.worker.call(talk)
        after = await scrape(client)
        assert value(after, "cached_tokens_total", source="held") == 43
        assert value(after, "cached_tokens_total", source="tree") == 0
        assert value(after, "prefix_cache_queries_total") == 32 + 48
        for begin in (100, 150, 200):
            await client.post("/chat/x", content=bytes(range(begin, begin + 50)))
        after = await scrape(client)
        evicted = value(after, "evicted_tokens_total")
        stats = service.llm.cache.stats()
        assert evicted == stats.counters.tokens_evicted > 0
        assert value(after, "kv_block_lifetime_seconds_count") > 0
        count = value(after, "kv_block_lifetime_seconds_count")
        assert value(after, "kv_block_idle_before_evict_seconds_count") == count
        assert count <= stats.counters.blocks_evicted

    with_app(make_llm(8), use)


def test_what_is_shared_while_it_runs(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        params = SamplingParams(max_tokens=200, n=4, temperature=0, ignore_eos=True)
        answer = await service.worker.submit(SHARED, params)
        async for _ in answer:
            break
        during = await scrape(client)
        assert value(during, "num_requests_running") == 1
        # Four tables name the prompt's two blocks; one more of each is needed otherwise.
        assert value(during, "kv_blocks_shared") >= 6
        held = value(during, "kv_blocks", state="held")
        assert value(during, "kv_cache_usage_perc") == held / 64
        answer.cancel()
        await answer.end()
        after = await scrape(client)
        assert value(after, "request_success_total", finished_reason="abort") == 4
        assert value(after, "kv_blocks", state="held") == 0
        assert not service.observed._watch._last
        tokens = value(after, "generation_tokens_total")
        assert value(after, "inter_token_latency_seconds_count") <= tokens - 4

    with_app(make_llm(64), use)


def test_a_search_gives_its_tokens_at_once(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        params = BeamSearchParams(beam_width=2, max_tokens=5)
        await (await service.worker.submit(SHARED, params)).end()
        after = await scrape(client)
        assert value(after, "time_to_first_token_seconds_count") == 1
        assert value(after, "e2e_request_latency_seconds_count") == 1
        assert value(after, "inter_token_latency_seconds_count") == 0
        assert value(after, "request_decode_time_seconds_count") == 0
        assert not service.observed._watch._last

    with_app(make_llm(64), use)


def test_labels_are_bounded(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        async def series() -> Samples:
            samples = await scrape(client)
            return {key: n for key, n in samples.items() if not key[0].startswith("process_")}

        await client.get("/nothing")
        await client.request("BREW", "/nothing")
        await client.post("/chat/x", content=SHARED)
        await series()
        before = await series()
        for name in range(20):
            await client.get(f"/nothing/{name}?x={name}")
            await client.request(f"BREW{name}", "/nothing")
            await client.post(f"/chat/{name}", content=SHARED)
        after = await series()
        assert after.keys() == before.keys()
        http = {"method": "OTHER", "handler": "unmatched", "status": "404"}
        assert value(after, "http_requests_total", **http) == 21

    with_app(make_llm(64), use)


def test_metrics_of_a_stopped_engine_are_its_last(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/chat/x", content=SHARED)
        await service.worker.stop()
        after = await scrape(client)
        assert value(after, "prefix_cache_queries_total") == 32

    with_app(make_llm(64), use)


def test_two_services_share_nothing(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        assert value(await scrape(client), "num_requests_total") == 0
        await client.post("/chat/x", content=SHARED)
        assert value(await scrape(client), "num_requests_total") == 1

    with_app(make_llm(64), use)
    with_app(make_llm(64), use)


def test_metrics_can_be_kept_from_strangers(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        assert (await client.get("/metrics")).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert (await client.get("/metrics", headers=key)).status_code == 200

    with_app(make_llm(64), use, api_keys=("secret",), protect_page=True)


def test_time_between_tokens_is_that_of_each_continuation() -> None:
    now = 0.0
    watch = EngineWatch(lambda: now)

    def step(*deltas: tuple[str, int, str | None]) -> None:
        said = [TokenDelta(name, index, 5, "x", reason) for name, index, reason in deltas]
        watch.stepped(None, said, 0.5)  # type: ignore[arg-type]

    step(("a", 0, None), ("a", 1, None))
    now = 2.0
    step(("a", 0, None), ("b", 0, None))
    now = 3.0
    step(("a", 0, "stop"), ("a", 1, "length"), ("b", 0, "stop"))
    # a/0: 2 and 1 seconds; a/1: 3; b: 1.
    assert watch.inter_token.count == 4
    assert watch.inter_token.total == 2 + 1 + 3 + 1
    assert (watch.step.count, watch.step.total) == (3, 1.5)
    assert not watch._last


def test_a_scrape_is_not_answered_in_one_piece(make_llm) -> None:
    """Its text takes milliseconds: others have their turn in between."""

    async def use(client: httpx.AsyncClient, service: Service) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        snapshot = await service.observed.snapshot()
        counting = asyncio.create_task(count())
        await service.observed.metrics.render(snapshot)
        counting.cancel()
        assert turns > 30

    with_app(make_llm(64), use)
