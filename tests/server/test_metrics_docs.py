"""The dashboard and the documentation name the metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
from observing import scrape, with_app

import radixkv
from radixkv.server.metrics.catalogue import METRICS
from radixkv.server.service import Service

DOCS = Path(radixkv.__file__).parents[1] / "docs"


def names_of(make_llm: Any) -> set[str]:
    """Every name of a sample that a server shows, and its labels as name{label}."""
    names: set[str] = set()

    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.get("/health")
        for name, labels in await scrape(client):
            names.add(name)
            names.update(f"{name}{{{label}}}" for label, _ in labels)

    with_app(make_llm(8), use)
    return names


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """All queries of the panels and variables."""
    queries = [variable["query"] for variable in dashboard["templating"]["list"]]
    for panel in dashboard["panels"]:
        queries += [target["expr"] for target in panel.get("targets", ())]
    return queries


def test_every_metric_of_the_dashboard_exists(make_llm) -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    there = names_of(make_llm)
    queries = expressions(dashboard)
    named = {name for query in queries for name in re.findall(r"radixkv:(\w+)", query)}
    named |= {name for query in queries for name in re.findall(r"\bprocess_\w+", query)}
    assert len(named) > 25
    assert named <= there
    for query in queries:
        for label, name in re.findall(r"sum by \((\w+)\) \((?:rate\()?radixkv:(\w+)", query):
            assert f"{name}{{{label}}}" in there, query


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)
            for target in panel["targets"]:
                assert target["expr"].count("(") == target["expr"].count(")")
    # All of the catalogue that matters to somebody who watches is on it.
    shown = " ".join(expressions(dashboard))
    for metric in METRICS:
        if metric.name not in ("request_time_per_output_token_seconds", "num_requests"):
            assert f"radixkv:{metric.name}" in shown, metric.name


def test_the_documentation_has_every_metric_and_no_other(make_llm) -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    text = text[: text.index("## The log")]
    rows = re.findall(r"^\| `([a-z_0-9]+)`", text, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == {metric.name for metric in METRICS} | {"http_requests"}
    assert set(rows) <= {
        re.sub(r"_(total|bucket|count|sum|created)$", "", name) for name in names_of(make_llm)
    } | {metric.name for metric in METRICS}
