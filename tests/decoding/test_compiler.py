"""Compiling: what is wrong, too large or too slow is refused, and the next grammar is served."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from grammars import compiler_of, tokenizer_of

from radixkv.decoding import Constraint, GrammarCompiler, GrammarLimits
from radixkv.decoding import compiler as module
from radixkv.errors import RequestError


def regex(text: str) -> Constraint:
    return Constraint("regex", "regex", text)


def limited(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_of("a", "b"), 3, GrammarLimits(**limits))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "regex: Regex parsing error at position 3: The parenthesis is not closed."),
        ("regex", "(?=a)b", "regex: Regex parsing error at position 3: Lookahead is not supported"),
        ("regex", r"(a)\1", "Backreference is not supported"),
        ("regex", "(" * 3000 + "a" + ")" * 3000, "Nest layer exceeded the maximum limit"),
        ("regex", "()", "regex allows the empty text only"),
        ("regex", "xa", "regex allows no text of this model's tokens"),
        ("grammar", "root ::= word", 'at line 1, column 10: Rule "word" is not defined'),
        ("grammar", 'start ::= "a"', 'The root rule with name "root" is not found'),
        ("grammar", "root ::= root", "grammar allows no text of this model's tokens"),
        ("json_schema", '{"type": "nope"}', 'json_schema: Unsupported type "nope"'),
        ("json_schema", '{"$ref": "#/$defs/x"}', "json_schema: Cannot find field '$defs'"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_wrong_is_named(kind: Any, text: str, message: str) -> None:
    compiler = compiler_of("a", "b")
    with pytest.raises(RequestError) as caught:
        compiler.compile(Constraint(kind, kind, text))
    assert message in str(caught.value)
    assert str(caught.value).startswith(kind)
    assert "/project/" not in str(caught.value)
    assert compiler.num_cached == 0
    assert compiler.compile(regex("a")).start().complete is False


def test_a_text_that_is_too_large_is_not_even_looked_at() -> None:
    compiler = limited(max_size=10)
    compiler.compile(regex("a" * 10))
    with pytest.raises(RequestError, match=r"regex has 11 bytes, and a grammar may have 10"):
        compiler.compile(regex("(" * 11))
    with pytest.raises(RequestError, match=r"regex has 12 bytes"):
        compiler.compile(regex("é" * 6))


def test_a_grammar_that_becomes_too_large() -> None:
    with pytest.raises(RequestError, match=r"bytes once it is compiled, and a grammar may take 50"):
        limited(max_compiled_bytes=50).compile(regex("[ab]{1,9}a"))


def test_one_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = limited(max_seconds=0.05)
    known = compiler.compile(regex("a"))
    gate, compile_ = threading.Event(), module._compile

    def slow(*given: Any) -> Any:
        assert gate.wait(30)
        return compile_(*given)

    monkeypatch.setattr(module, "_compile", slow)
    with pytest.raises(RequestError, match=r"takes longer to compile than the 0.05 seconds"):
        compiler.compile(regex("b"))
    with pytest.raises(RequestError, match=r"an earlier grammar .* is not through yet"):
        compiler.compile(regex("ab"))
    assert compiler.compile(regex("a")) is known
    gate.set()
    deadline = time.monotonic() + 30
    while compiler._thread is not None and compiler._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    monkeypatch.undo()
    assert compiler.compile(regex("b")).start().allowed.tolist() == [2]


def test_the_cache_is_bounded_by_bytes_and_the_one_used_longest_ago_goes() -> None:
    size = compiler_of("a", "b").compile(regex("aaa")).num_bytes
    compiler = limited(cache_bytes=3 * size)
    first, second = compiler.compile(regex("aaa")), compiler.compile(regex("aab"))
    compiler.compile(regex("aba"))
    assert compiler.compile(regex("aaa")) is first
    compiler.compile(regex("abb"))
    assert compiler.num_cached == 3
    assert compiler.compile(regex("aaa")) is first
    assert compiler.compile(regex("aab")) is not second
    none = limited(cache_bytes=0)
    assert none.compile(regex("a")).start().ended is False
    assert none.num_cached == 0


def test_threads_that_ask_for_one_grammar_get_the_same() -> None:
    compiler, found = compiler_of("a", "b"), []
    threads = [
        threading.Thread(target=lambda: found.append(compiler.compile(regex("[ab]+"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
