"""What operations give to contexts, tokenized before they reach the engine's thread.

What a text's tokens are depends on whether its context is empty, and what messages' are on the
messages before them. It is noted how each context was left, so this can be told as long as a
client's operations follow each other; if others came between, the engine's thread finds the tokens
itself. Behind a rollback or a join in the same list it cannot be told: texts are tokenized both
ways there, and messages on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.llm import LLM
from radixkv.programs import Context, Host, Prepared
from radixkv.programs.turns import are_messages
from radixkv.server.contexts import bodies
from radixkv.server.contexts.registry import Standing

Ready = Sequence[tuple[Standing | None, Prepared]]
"""What was prepared, each for a context that stands so, or for any."""


def standing_of(context: Context) -> Standing:
    """How a context stands now; on the engine's thread."""
    return Standing(not len(context), context.messages)


def fitting(ready: Ready, context: Context, content: Any) -> Any:
    """What was prepared for a context that stands as this one does; else the content as it is."""
    standing = standing_of(context)
    for wanted, prepared in ready:
        if wanted is None or _matters(wanted, content) == _matters(standing, content):
            return prepared
    return content


def _matters(standing: Standing, content: Any) -> Standing:
    """A text's tokens, and ids, do not depend on messages."""
    return standing if are_messages(content) else Standing(standing.first)


class Ahead:
    """Prepares a list of operations in order; on the thread for texts.

    Parameters
    ----------
    llm : LLM
        Of which the tokenizer is used.
    standings : mapping of str to Standing
        Of the contexts that are known, by their ids.
    """

    def __init__(self, llm: LLM, standings: Mapping[str, Standing]) -> None:
        self._host = Host(llm.engine, llm.loaded)
        self._standings = dict(standings)

    def prepared(self, context: str, body: bodies.Operand) -> Ready:
        """What an operation gives, with its tokens, and note what it makes of its context.

        Raises
        ------
        RequestError
            If its content cannot be tokenized.
        """
        standing = self._standings.pop(context, None)  # Until this has gone well.
        ready: Ready = ()
        match body:
            case bodies.Open():
                standing = Standing(True)
                ready = [(None, self._with_tokens(body.content, standing))]
                standing = _behind(standing, body.content)
            case bodies.Append():
                ready = self._appended(body.content, standing)
                standing = standing and _behind(standing, body.content)
            case bodies.Score():
                ready = [(None, self._with_tokens(body.content, Standing(False)))]
            case bodies.Choose():
                ready = [(None, self._with_tokens(each, Standing(False))) for each in body.options]
            case bodies.Fork() if standing is not None:
                self._standings |= dict.fromkeys(body.ids or (), standing)
            case bodies.Rollback() | bodies.Join():
                standing = None
        if standing is not None:
            self._standings[context] = standing
        return ready

    def _appended(self, content: Any, standing: Standing | None) -> Ready:
        if standing is not None:
            guesses = [standing]
        elif isinstance(content, str):
            guesses = [Standing(True), Standing(False)]
        else:
            guesses = [] if are_messages(content) else [Standing(True), Standing(False)]
        return [(guess, self._with_tokens(content, guess)) for guess in guesses]

    def _with_tokens(self, content: Any, standing: Standing) -> Prepared:
        first, history = standing
        return Prepared(content, self._host.tokens_behind(content, first=first, history=history))


def _behind(standing: Standing, content: Any) -> Standing:
    """How a context stands once this was appended."""
    said = tuple(content) if are_messages(content) else ()
    return Standing(standing.first and not content, standing.history + said)
