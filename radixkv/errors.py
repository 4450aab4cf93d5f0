"""Every exception a user of radixkv can meet.

RadixKVError
├── ConfigError (ValueError)              a setting that cannot work
├── RequestError (ValueError)             a request refused at the door
│   ├── PromptTooLongError                longer than the model or the pool allows
│   ├── UnsupportedParameterError         a parameter we do not know or do not have
│   └── ModelNotFoundError                a model that the server does not serve
├── OutOfBlocksError                      the pool cannot give that many blocks now
├── SequenceClosedError                   a released sequence was used again
├── ContextError                          a context cannot do that now
│   ├── ContextClosedError                it was closed, or joined
│   ├── ContextNotFoundError              the server knows no context by that name
│   ├── ContextBusyError                  a generation of it is not finished
│   └── JoinError                         branches that cannot be joined so
├── GenerationCancelledError              what was cancelled has no result
├── ModelLoadError                        a model that could not be found, read or stored
│   └── ModelNotSupportedError            a model class whose state a paged KV cache cannot hold
├── NativeBuildError                      the compiled operators could not be built here
├── NumericalError                        NaN logits: the request fails, the engine goes on
├── QueueFullError                        the server has as many requests as it may; try later
├── TooManyContextsError                  the server has as many contexts as it may; close some
├── ServerUnreachableError                no connection to a server, or it was lost
├── EngineStoppedError                    the engine was shut down, or its step failed
└── CacheInvariantError                   a law of the cache was broken; never caught
"""

from __future__ import annotations


class RadixKVError(Exception):
    """Base of every error that radixkv raises on purpose."""


class ConfigError(RadixKVError, ValueError):
    """A setting that cannot work; raised when the configuration is made."""


class RequestError(RadixKVError, ValueError):
    """A request that was refused at the door; nothing was lost and the engine goes on."""


class PromptTooLongError(RequestError):
    """The prompt does not fit the model's context or the pool of blocks."""


class UnsupportedParameterError(RequestError):
    """A parameter that is not known here; the message names the nearest one that is."""


class ModelNotFoundError(RequestError):
    """A request for a model that is not served here; the message names the one that is."""


class OutOfBlocksError(RadixKVError):
    """The pool cannot hand out that many blocks, even after evicting all that nobody holds.

    Parameters
    ----------
    needed, free, evictable, held : int
        Blocks asked for, on the free list, cached but unheld, and held by sequences.
    """

    def __init__(self, needed: int, free: int, evictable: int, held: int) -> None:
        super().__init__(
            f"{needed} blocks are needed, but only {free} are free and {evictable} can be evicted "
            f"({held} are held by sequences); release sequences or make the pool larger"
        )
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.held = held


class SequenceClosedError(RadixKVError):
    """A sequence that was released (or never belonged to this cache) was used again."""


class ContextError(RadixKVError):
    """A context was asked for what it cannot do in its state; it stays as it was."""


class ContextClosedError(ContextError):
    """The context was closed, or joined into another; open or fork a new one."""


class ContextNotFoundError(ContextError):
    """No context of the caller has that id; another API key's are not told apart from none."""


class ContextBusyError(ContextError):
    """A generation of the context is not finished; run, await or cancel it first."""


class JoinError(ContextError):
    """These branches cannot be joined into this context, or not in this mode."""


class GenerationCancelledError(RadixKVError):
    """The generation was cancelled, or its context closed, before it had a result."""


class ModelLoadError(RadixKVError):
    """A model that could not be found, read, converted or stored."""


class ModelNotSupportedError(ModelLoadError):
    """A model whose state cannot live in a paged KV cache; the message gives the reason."""


class NativeBuildError(RadixKVError):
    """The compiled operators could not be built here; everything works without them, slower."""


class NumericalError(RadixKVError):
    """The model produced NaN logits for a request."""


class QueueFullError(RadixKVError):
    """As many requests are unfinished as the server takes; one that comes later may be served.

    Parameters
    ----------
    unfinished, limit : int
        Requests that run or wait, and that may.
    """

    def __init__(self, unfinished: int, limit: int) -> None:
        super().__init__(
            f"{unfinished} of at most {limit} requests are unfinished; try again later"
        )
        self.unfinished = unfinished
        self.limit = limit


class TooManyContextsError(RadixKVError):
    """As many contexts are open as the server takes; close some, or come later."""


class ServerUnreachableError(RadixKVError):
    """A client has no connection to its server, or lost it; what ran on it was cancelled there."""


class EngineStoppedError(RadixKVError):
    """The engine was shut down or the step that carried the request failed."""


class CacheInvariantError(RadixKVError):
    """A law of the cache was broken. This is a bug in radixkv: nothing should catch it."""
