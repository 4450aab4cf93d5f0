"""GrammarCompiler: constraints to grammars, within limits of size and time, and a cache of them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.decoding.constraint import Constraint
from radixkv.decoding.grammar import Grammar
from radixkv.decoding.vocabulary import Vocabulary, token_texts
from radixkv.errors import RequestError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar
    from xgrammar import GrammarCompiler as Compiler

# Where in xgrammar's own sources an error was raised is no news to a user.
LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .* is false: )?")
LONGEST_MESSAGE = 400


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """What a grammar may cost.

    Parameters
    ----------
    max_size : int
        UTF-8 bytes of its text; a schema's as JSON.
    max_seconds : float
        Time to compile it.
    max_compiled_bytes : int
        Memory that it may take once it is compiled.
    cache_bytes : int
        Memory of the compiled grammars that are kept for requests to come.
    """

    max_size: int = 65_536
    max_seconds: float = 10.0
    max_compiled_bytes: int = 128 << 20
    cache_bytes: int = 256 << 20


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each once. Thread-safe.

    A compilation cannot be interrupted, so one that takes too long is left to itself on a thread
    of its own. Until it is through, grammars that are not cached yet are refused.

    Parameters
    ----------
    tokenizer : tokenizer of transformers, Vocabulary, or None
        Read with the first grammar; see `token_texts`. None refuses every grammar.
    vocab_size : int
        The model's.
    limits : GrammarLimits
    """

    def __init__(
        self, tokenizer: object, vocab_size: int, limits: GrammarLimits | None = None
    ) -> None:
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Compiler | None = None
        self._vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else None
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def num_cached(self) -> int:
        """Grammars in the cache."""
        return len(self._cache)

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint, from the cache if it is there.

        Raises
        ------
        RequestError
            If it is wrong, allows no text, or is larger or slower than the limits allow.
        UnsupportedParameterError
            If the tokenizer cannot be used.
        """
        if (grammar := self._cached(constraint)) is not None:
            return grammar
        self._check_size(constraint)
        with self._compiling:
            # Another thread may have had the same wish.
            if (grammar := self._cached(constraint)) is not None:
                return grammar
            grammar = self._checked(constraint, self._compiled(constraint))
            with self._lock:
                self._cache[constraint] = grammar
                while sum(its.num_bytes for its in self._cache.values()) > self.limits.cache_bytes:
                    self._cache.popitem(last=False)
            return grammar

    def _cached(self, constraint: Constraint) -> Grammar | None:
        with self._lock:
            if constraint in self._cache:
                self._cache.move_to_end(constraint)
            return self._cache.get(constraint)

    def _check_size(self, constraint: Constraint) -> None:
        size = len(constraint.text.encode())
        if size > self.limits.max_size:
            raise RequestError(
                f"{constraint.name} has {size} bytes, and a grammar may have "
                f"{self.limits.max_size}; make it smaller"
            )

    def _compiled(self, constraint: Constraint) -> CompiledGrammar:
        """Compile on a thread, so that it can be given up."""
        if self._thread is not None and self._thread.is_alive():
            raise RequestError(
                f"{constraint.name} cannot be compiled now: an earlier grammar that took longer "
                "than it may is not through yet; try again later"
            )
        compiler = self._ready()
        outcome: list[CompiledGrammar | Exception] = []

        def work() -> None:
            try:
                outcome.append(_compile(compiler, constraint))
            except Exception as error:
                outcome.append(error)

        self._thread = threading.Thread(target=work, name="radixkv-grammar", daemon=True)
        self._thread.start()
        self._thread.join(self.limits.max_seconds)
        if not outcome:
            raise RequestError(
                f"{constraint.name} takes longer to compile than the {self.limits.max_seconds:g} "
                "seconds that a grammar may take; make it simpler"
            )
        if isinstance(outcome[0], Exception):
            raise RequestError(f"{constraint.name}: {_reason(outcome[0])}") from outcome[0]
        return outcome[0]

    def _checked(self, constraint: Constraint, compiled: CompiledGrammar) -> Grammar:
        vocabulary = self._vocabulary
        assert vocabulary is not None
        # JSON on one line has no control characters, but for strings of limited length xgrammar
        # allows them.
        json = constraint.kind == "json_schema"
        grammar = Grammar(compiled, vocabulary, vocabulary.printable if json else vocabulary.all)
        if grammar.num_bytes > self.limits.max_compiled_bytes:
            raise RequestError(
                f"{constraint.name} takes {grammar.num_bytes} bytes once it is compiled, and a "
                f"grammar may take {self.limits.max_compiled_bytes}; make it simpler"
            )
        state = grammar.start()
        if not state.allowed.any():
            what = "the empty text only" if state.complete else "no text of this model's tokens"
            raise RequestError(f"{constraint.name} allows {what}")
        return grammar

    def _ready(self) -> Compiler:
        if self._compiler is None:
            from xgrammar import GrammarCompiler as Compiler
            from xgrammar import TokenizerInfo, VocabType

            if self._vocabulary is None:
                self._vocabulary = Vocabulary(token_texts(self._tokenizer, self._vocab_size))
            # One token more, which ends a text: see `Grammar`.
            texts = [*self._vocabulary.texts, b""]
            info = TokenizerInfo(texts, VocabType.RAW, stop_token_ids=[self._vocab_size])
            self._compiler = Compiler(info, max_threads=1, cache_enabled=False)
        return self._compiler


def _compile(compiler: Compiler, constraint: Constraint) -> CompiledGrammar:
    text = constraint.text
    ways: dict[str, Callable[[], Any]] = {
        # One form: else small models write white space without end.
        "json_schema": lambda: compiler.compile_json_schema(text, any_whitespace=False),
        "regex": lambda: compiler.compile_regex(text),
        "grammar": lambda: compiler.compile_grammar(text),
    }
    compiled: CompiledGrammar = ways[constraint.kind]()
    return compiled


def _reason(error: Exception) -> str:
    said = LOCATION.sub("", str(error).strip()) or type(error).__name__
    return said if len(said) <= LONGEST_MESSAGE else said[:LONGEST_MESSAGE] + " ..."
