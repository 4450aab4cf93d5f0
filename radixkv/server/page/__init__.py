"""The page at ``/``: the tree, the pool and the requests, live.

clocks       ClockTimes: when a reading of the tree's logical clock was
pulse        Pulse: delays and rates, from an observer of the engine
removals     RemovalLog: which blocks went, why, and how long nobody had used them
snapshot     Look: all the page shows, taken between two steps of the engine
texts        what tokens say
feed         Feed: snapshots as server-sent events, while somebody watches
routes       the page and what it asks for; install
static       the page itself, and the libraries it is drawn with
"""
