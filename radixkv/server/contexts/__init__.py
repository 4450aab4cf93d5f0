"""Contexts over HTTP: the same operations as `radixkv.programs.Context`, for who is elsewhere.

bodies       what a client sends, operation by operation
registry     Contexts: ids, owners, and the time that contexts live without a call
operations   operations, carried out in order on the engine's thread
running      Run: what of them goes on, followed to its end or until its client has left
answers      what a client gets
routes       the routes
"""
