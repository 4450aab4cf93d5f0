"""Prometheus metrics: what the engine counts, and how long things take.

snapshot     Snapshot: all that is counted, at one moment between two steps
watch        EngineWatch: the observer whose histograms a snapshot copies
catalogue    METRICS: names, meanings, and what each reads from a snapshot
exposition   Metrics: a registry of one service's, and its text
route        GET /metrics
"""
