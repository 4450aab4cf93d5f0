"""Which tokens a grammar allows, against a naive oracle; and when a text ends by its grammar."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from grammars import (
    Regex,
    allowed_ids,
    behind,
    compiler_of,
    either,
    letter,
    star,
    then,
    tokenizer_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from radixkv.decoding import (
    Constraint,
    GrammarCompiler,
    GrammarState,
    SamplingParams,
    SamplingRow,
    TextStream,
    sample,
)
from radixkv.decoding.grammar import forbid_all_but
from radixkv.decoding.vocabulary import token_texts
from radixkv.errors import UnsupportedParameterError

TOKENS = ("a", "b", "c", "ab", "ba", "abc", "cc", "bab")
END = len(TOKENS)
COMPILER = compiler_of(*TOKENS)

LANGUAGES: st.SearchStrategy[Regex] = st.recursive(
    st.sampled_from("abc").map(letter),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: then(*parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: either(*parts)),
        inner.map(star),
    ),
    max_leaves=8,
)


def state_of(pattern: str, compiler: GrammarCompiler = COMPILER) -> GrammarState:
    constraint = SamplingParams(regex=pattern).constraint
    assert constraint is not None
    return compiler.compile(constraint).start([compiler._vocab_size - 1])


def naively_allowed(language: Regex, text: str) -> set[int]:
    found = {place for place, token in enumerate(TOKENS) if behind(language, text + token)}
    return found | ({END} if may_end(language, text) else set())


def may_end(language: Regex, text: str) -> bool:
    return any(rest.may_end for rest in behind(language, text))


@settings(deadline=None, max_examples=300)
@given(LANGUAGES, st.randoms(use_true_random=False))
def test_allowed_tokens_are_those_that_can_be_gone_on_from(
    language: Regex, rng: random.Random
) -> None:
    state, text = state_of(language.pattern), ""
    for _ in range(12):
        allowed = allowed_ids(state)
        assert allowed == naively_allowed(language, text)
        assert state.complete == may_end(language, text)
        if len(text) < 10:  # Python's own matcher takes exponential time.
            assert state.complete == (re.fullmatch(language.pattern, text) is not None)
        assert state.ended == (allowed == {END})
        if not (going := sorted(allowed - {END})):
            break
        chosen = rng.choice(going)
        state.push(chosen)
        text += TOKENS[chosen]


@settings(deadline=None, max_examples=100)
@given(LANGUAGES, st.randoms(use_true_random=False))
def test_copies_go_their_own_ways(language: Regex, rng: random.Random) -> None:
    states = [(state_of(language.pattern), "")]
    for _ in range(10):
        state, text = rng.choice(states)
        if going := sorted(allowed_ids(state) - {END}):
            twin, chosen = state.copy(), rng.choice(going)
            twin.push(chosen)
            states.append((twin, text + TOKENS[chosen]))
    for state, text in states:
        assert allowed_ids(state) == naively_allowed(language, text)


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    state = state_of("ab")
    with pytest.raises(RuntimeError, match="does not allow token 1 here"):
        state.push(1)
    assert allowed_ids(state) == {0, 3}


def test_padding_and_special_tokens_are_never_allowed() -> None:
    """A model's vocabulary is larger than its tokenizer's, to the word and beyond."""
    for size in (4, 31, 32, 33, 64, 100):
        compiler = GrammarCompiler(tokenizer_of("a", "b"), size)
        grammar = compiler.compile(Constraint("regex", "regex", "(?:.|\n)*"))
        assert allowed_ids(grammar.start()) == {0, 1}
        assert allowed_ids(grammar.start([2])) == {0, 1, 2}
        logits = torch.zeros(3, size)
        token = sample(
            logits + torch.arange(size),
            [SamplingRow(SamplingParams(temperature=0), allowed=grammar.start().allowed)] * 3,
        ).token_ids
        assert token.tolist() == [1, 1, 1]


def test_a_vocabulary_smaller_than_the_tokenizer_s() -> None:
    compiler = GrammarCompiler(tokenizer_of("a", "b", "c"), 2)
    assert allowed_ids(compiler.compile(Constraint("regex", "regex", "[abc]+")).start()) == {0, 1}


# -- rows of a batch ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_rows_without_a_grammar_are_what_they_are_without_the_others(temperature: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, END + 1)
    params = SamplingParams(temperature=temperature, logprobs=2)
    free = [SamplingRow(params, seed=3, branch=index) for index in range(6)]
    mask = state_of("b+").allowed
    mixed = [row._replace(allowed=mask) if index % 2 else row for index, row in enumerate(free)]
    before, after = sample(logits, free), sample(logits, mixed)
    assert after.token_ids[::2].tolist() == before.token_ids[::2].tolist()
    assert after.token_ids[1::2].tolist() == [1, 1, 1]
    assert after.logprobs[::2] == before.logprobs[::2]
    # The model's own, whatever the grammar forbids.
    listed = [line.top for line in after.logprobs if line is not None]
    assert listed == [line.top for line in before.logprobs if line is not None]


def test_nothing_is_written_behind_the_last_row() -> None:
    """xgrammar 0.2.9's operator wrote one float behind it, where 6 tokens were masked to one."""
    for vocab in range(3, 40):
        compiler = compiler_of(*(chr(97 + i) for i in range(26)), vocab_size=vocab)
        grammar = compiler.compile(Constraint("regex", "regex", "[abc]"))
        memory = torch.full((3 * vocab + 64,), 7.0)
        logits = memory[32:-32].view(3, vocab)
        forbid_all_but(logits, [(0, grammar.start().allowed), (2, grammar.start().allowed)])
        assert (memory == 7).nonzero()[:, 0].tolist() == [
            *range(32 + 3),
            *range(32 + vocab, 32 + 2 * vocab + 3),
            *range(32 + 3 * vocab, len(memory)),
        ]


def test_logits_beyond_the_vocabulary_are_forbidden_too() -> None:
    row = SamplingRow(SamplingParams(temperature=0), allowed=state_of("a").allowed)
    assert sample(torch.arange(100.0)[None], [row]).token_ids.tolist() == [0]


def test_what_other_edits_leave_of_a_grammar() -> None:
    from radixkv.decoding import logit_edits

    def token(pattern: str, **given: object) -> int:
        params = SamplingParams(temperature=0, regex=pattern, **given)  # type: ignore[arg-type]
        edits = logit_edits(params, np.zeros(1, np.int32), vocab_size=END + 1)
        row = SamplingRow(params, edits=edits, allowed=state_of(pattern).allowed)
        return int(sample(torch.arange(END + 1.0)[None], [row]).token_ids[0])

    assert token("[abc]+") == 7
    assert token("[abc]+", allowed_token_ids=[0, 2, END]) == 2
    assert token("a[bc]*", logit_bias={7: 100, 5: -100}) == 3
    assert token("a[bc]*", bad_words_ids=[[5]]) == 3
    assert token("a", allowed_token_ids=[1]) == -1


# -- when a text ends --------------------------------------------------------------------------


def stream_of(pattern: str, **given: object) -> TextStream:
    params = SamplingParams(regex=pattern, **given)  # type: ignore[arg-type]
    assert params.constraint is not None
    grammar = COMPILER.compile(params.constraint)
    tokenizer = tokenizer_of(*TOKENS)
    return TextStream(params, tokenizer, eos_token_ids=[END], grammar=grammar)


def pushed(stream: TextStream, *tokens: int) -> tuple[str, str | None, str | int | None]:
    for token in tokens:
        stream.push(token)
    return stream.text, stream.finish_reason, stream.stop_reason


def test_the_end_of_the_grammar_ends_the_text_without_an_end_token() -> None:
    stream = stream_of("abc?")
    assert pushed(stream, 0) == ("a", None, None)
    assert pushed(stream, 1) == ("ab", None, None)
    assert stream.grammar is not None
    assert allowed_ids(stream.grammar) == {2, END}
    assert pushed(stream.copy(), 2) == ("abc", "stop", None)
    assert pushed(stream, END) == ("ab", "stop", None)
    assert (stream.stopped_by_token, stream.token_ids) == (True, [0, 1, END])


def test_max_tokens_at_the_end_of_the_grammar() -> None:
    """The last token that fits: "stop" where nothing may follow, "length" where something may."""
    assert pushed(stream_of("ab", max_tokens=2), 0, 1) == ("ab", "stop", None)
    assert pushed(stream_of("abc?", max_tokens=2), 0, 1) == ("ab", "length", None)
    assert pushed(stream_of("abc", max_tokens=2), 0, 1) == ("ab", "length", None)


def test_min_tokens_bans_end_tokens_but_the_grammar_s_end_comes_first() -> None:
    stream = stream_of("ab*", min_tokens=4)
    pushed(stream, 0)
    assert stream.banned_tokens == (END,)
    assert pushed(stream_of("ab", min_tokens=4), 0, 1) == ("ab", "stop", None)


def test_stop_tokens_stop_where_the_grammar_may_end_and_stand_nowhere_else() -> None:
    stream = stream_of("a[bc]*", stop_token_ids=[2])
    assert stream.grammar is not None
    assert allowed_ids(stream.grammar) == {0, 3, 5}
    pushed(stream, 0)
    assert allowed_ids(stream.grammar) == {1, 2, 6, END}
    assert pushed(stream, 2) == ("a", "stop", 2)
    nothing_else = stream_of("ac", stop_token_ids=[2])
    pushed(nothing_else, 0)
    assert nothing_else.grammar is not None
    assert allowed_ids(nothing_else.grammar) == set()


def test_stop_strings_cut_a_text_wherever_it_stands() -> None:
    assert pushed(stream_of("abc", stop="b"), 3) == ("a", "stop", "b")
    assert pushed(stream_of("abc", stop="c"), 5) == ("ab", "stop", "c")


def test_ignore_eos_leaves_the_grammar_s_own_end() -> None:
    stream = stream_of("ab?", ignore_eos=True)
    pushed(stream, 0)
    assert stream.grammar is not None
    assert allowed_ids(stream.grammar) == {1}
    assert pushed(stream, 1) == ("ab", "stop", None)


# -- vocabularies ------------------------------------------------------------------------------


def test_each_token_has_the_text_that_it_decodes_to(
    byte_level: PreTrainedTokenizerFast,
    byte_fallback: PreTrainedTokenizerFast,
    metaspace: PreTrainedTokenizerFast,
) -> None:
    """Also of a SentencePiece vocabulary without byte tokens, which xgrammar alone reads as raw."""
    for tokenizer, word, text in (
        (byte_level, "Ġthe", b" the"),
        (byte_fallback, "▁t", b" t"),
        (metaspace, "▁The", b" The"),
    ):
        texts = token_texts(tokenizer, len(tokenizer))
        assert texts[tokenizer.convert_tokens_to_ids(word)] == text
        assert [texts[token] for token in tokenizer.all_special_ids] == [b"", b"", b""]
    assert token_texts(byte_fallback, 259)[3 + 0xC3] == b"\xc3"


def test_added_tokens_are_text_unless_they_are_special() -> None:
    tokenizer = tokenizer_of("a", "b")
    tokenizer.add_tokens(["<x> y"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<z>"]})
    assert token_texts(tokenizer, 6) == [b"a", b"b", b"", b"<x> y", b"", b""]


def test_a_vocabulary_that_decodes_otherwise_is_refused() -> None:
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    with pytest.raises(UnsupportedParameterError, match=r"token 1 would be b'play'.* otherwise"):
        token_texts(tokenizer, 3)


def test_what_is_no_tokenizer_of_transformers_is_refused() -> None:
    for tokenizer, reason in ((object(), "get_vocab"), (None, "the model has no tokenizer")):
        compiler = GrammarCompiler(tokenizer, 3)
        with pytest.raises(UnsupportedParameterError, match=reason):
            compiler.compile(Constraint("regex", "regex", "a"))


def test_characters_may_be_cut_between_tokens(
    byte_level: PreTrainedTokenizerFast, byte_id: Callable[[int], int]
) -> None:
    compiler = GrammarCompiler(byte_level, len(byte_level))
    state = compiler.compile(Constraint("regex", "regex", "[äß]")).start()
    state.push(byte_id(0xC3))
    assert allowed_ids(state) == {byte_id(0xA4), byte_id(0x9F)}
    state.push(byte_id(0x9F))
    assert state.ended
