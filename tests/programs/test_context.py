"""Contexts over a real tiny model: what they say, and what it costs in blocks and tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv.errors import (
    ContextBusyError,
    ContextClosedError,
    ContextError,
    GenerationCancelledError,
    JoinError,
    PromptTooLongError,
    RequestError,
    UnsupportedParameterError,
)
from radixkv.llm import LLM
from radixkv.programs import Context, majority

MakeLLM = Callable[..., LLM]
Reference = Callable[[list[int], int], list[int]]

PROMPT = "You are careful and you answer in few words. Question: what is it? "


def greedy(context: Context, max_tokens: int = 8) -> tuple[int, ...]:
    return context.generate(max_tokens=max_tokens, temperature=0, ignore_eos=True).token_ids


def test_a_context_goes_on_from_where_it_stands(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    with llm.context(PROMPT) as context:
        before = list(llm.tokenize(PROMPT))
        first = list(greedy(context))
        assert first == reference(before, 8)
        context.append(" And?")
        second = list(greedy(context))
        history = [*before, *first, *llm.tokenize(" And?")]
        assert second == reference(history, 8)
        assert context.tokens == (*history, *second)
        assert context.generated == llm.loaded.tokenizer.decode(
            first
        ) + llm.loaded.tokenizer.decode(second)
        assert len(context.logprobs) == 16
        # Each token was computed once: but for the last, which is sampled only.
        engine = llm.stats().engine
        assert engine.prefilled_tokens + engine.decoded_tokens == len(context) - 1
        assert llm.stats().cache.sequences == 1
    assert context.closed
    assert llm.stats().cache.sequences == 0


def test_four_drafts_share_every_block(make_llm: MakeLLM) -> None:
    llm = make_llm(seed=4)
    with llm.context(PROMPT, namespace="tenant-1") as context:
        drafts = context.fork(4)
        outputs = llm.run([d.generate(max_tokens=9, temperature=0.9) for d in drafts])
        assert len({output.token_ids for output in outputs}) == 4
        stats = llm.stats()
        assert stats.engine.prefilled_tokens == len(context)
        means = [sum(d.logprobs) / len(d.logprobs) for d in drafts]
        computed = stats.engine.prefilled_tokens + stats.engine.decoded_tokens
        sequence = drafts[means.index(max(means))]._hold.sequence
        table = sequence.block_table.tolist() if sequence else []
        best = context.join(drafts)
        assert best is drafts[means.index(max(means))]
        assert all(draft.closed for draft in drafts)
        assert context.tokens == best.tokens
        assert context.generated == best.generated
        assert context.logprobs == best.logprobs
        assert context._hold.sequence is sequence
        assert sequence is not None
        assert sequence.block_table.tolist() == table
        assert llm.stats().cache.sequences == 1
        context.append("!")
        greedy(context)
        engine = llm.stats().engine
        # The draft's last token, the mark, and all but the last token of the answer.
        assert engine.prefilled_tokens + engine.decoded_tokens - computed == 1 + 1 + 7


def test_what_was_appended_before_a_fork_is_computed_once(make_llm: MakeLLM) -> None:
    llm = make_llm(seed=1)
    with llm.context(PROMPT) as context:
        greedy(context)
        context.append(" Now think about it, all of you, each in its own way.")
        before = llm.stats().engine
        missing = len(context) - context.stats.num_computed
        drafts = context.fork(3)
        llm.run([d.generate(max_tokens=1) for d in drafts])
        now = llm.stats().engine
        assert now.prefilled_tokens - before.prefilled_tokens == missing


def test_forks_of_a_computed_context_share_all(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with llm.context(PROMPT) as context:
        greedy(context)
        blocks = context.stats.own_blocks
        assert blocks == -(-context.stats.num_computed // 16)
        held = llm.stats().cache
        (one, two) = context.fork(2)
        (three,) = one.fork(1)
        now = llm.stats().cache
        assert (now.free, now.held_only) == (held.free, held.held_only)
        for each in (context, one, two, three):
            assert (each.stats.shared_blocks, each.stats.own_blocks) == (blocks, 0)
        two.append("x")
        greedy(two, 1)
        assert two.stats.own_blocks == 1


def test_a_context_goes_on_from_the_text_that_came_out(make_llm: MakeLLM) -> None:
    """Stop strings, also within a token, and end tokens are no part of it."""
    llm = make_llm()
    with llm.context(PROMPT) as context:
        (probe,) = context.fork(1)
        greedy(probe, 30)
        whole = probe.generated
        stop = whole[-2:]
        assert whole.index(stop) == len(whole) - 2
        text = whole[:-2]
        output = context.generate(max_tokens=30, temperature=0, stop=stop, ignore_eos=True).result()
        assert output.text == text == context.generated
        assert context.tokens == (*llm.tokenize(PROMPT), *output.token_ids[: -len(stop.encode())])
        assert len(context.logprobs) == len(output.token_ids)
        assert context.text == PROMPT + text
        (other,) = context.fork(1)
        start = other.tokens
        stopped = other.generate(max_tokens=30, temperature=0, stop_token_ids=range(259)).result()
        assert (stopped.text, other.tokens) == ("", start)


@pytest.mark.parametrize("by", ["total_logprob", "function", "majority"])
def test_what_best_means(make_llm: MakeLLM, by: str) -> None:
    llm = make_llm(seed=2)
    with llm.context(PROMPT) as context:
        drafts = context.fork(5)
        for draft, answer in zip(drafts, "ababc", strict=True):
            draft.append(answer)
        llm.run([d.generate(max_tokens=3 + i, ignore_eos=True) for i, d in enumerate(drafts)])
        totals = [sum(d.logprobs) for d in drafts]
        means = [sum(d.logprobs) / len(d.logprobs) for d in drafts]

        def letter(branch: Context) -> str | None:
            found = branch.text[len(PROMPT)]
            return None if found == "c" else found

        if by == "total_logprob":
            assert context.join(drafts, by="total_logprob") is drafts[totals.index(max(totals))]
        elif by == "function":
            assert context.join(drafts, by=lambda d: -len(d)) is drafts[0]
        else:
            ahead = means.index(max(means[:4]))
            assert context.join(drafts, by=majority(letter)) is drafts[ahead]


def test_append_and_all(make_llm: MakeLLM) -> None:
    llm = make_llm(seed=3)
    with llm.context(PROMPT) as context:
        greedy(context)
        start = context.text
        for mode in ("all", "append"):
            drafts = context.fork(2)
            llm.run([d.generate(max_tokens=4) for d in drafts])
            texts = [draft.generated for draft in drafts]
            found = context.join(drafts, mode, template="<{index}: {text}>")  # type: ignore[call-overload]
            assert found == texts
            assert all(draft.closed for draft in drafts)
            expected = start if mode == "all" else start + f"<0: {texts[0]}><1: {texts[1]}>"
            assert context.text == expected
        before = llm.stats().engine
        greedy(context, 1)
        now = llm.stats().engine
        written = len(llm.tokenize(expected[len(start) :]))
        # The last token of its own generation has been computed by the branches.
        assert now.prefilled_tokens - before.prefilled_tokens == written


def test_joining_a_branch_of_a_branch(make_llm: MakeLLM) -> None:
    llm = make_llm(seed=5)
    with llm.context(PROMPT) as context:
        (child,) = context.fork(1)
        greedy(child, 3)
        (grandchild,) = child.fork(1)
        greedy(grandchild, 4)
        assert context.join([grandchild], by=lambda d: len(d.logprobs)) is grandchild
        assert context.tokens == grandchild.tokens
        assert len(context.logprobs) == 7
        assert context.generated == child.generated + grandchild.generated
        assert not child.closed
    assert child.closed


def test_errors_leave_everything_as_it_was(make_llm: MakeLLM) -> None:
    llm = make_llm()
    context, other = llm.context(PROMPT), llm.context(PROMPT)
    one, two = context.fork(2)
    (stranger,) = other.fork(1)
    with pytest.raises(JoinError, match="not forked"):
        context.join([one, stranger])
    with pytest.raises(JoinError, match="not forked"):
        one.join([context])
    with pytest.raises(JoinError, match="only once"):
        context.join([one, one], "all")
    with pytest.raises(JoinError, match="generated nothing"):
        context.join([one, two])
    with pytest.raises(JoinError, match="no branches"):
        context.join([])
    with pytest.raises(JoinError, match="mode must be"):
        context.join([one], "worst")  # type: ignore[call-overload]
    with pytest.raises(JoinError, match="by must be"):
        context.join([one], by="luck")  # type: ignore[arg-type]
    with pytest.raises(JoinError, match="can hold"):
        context.join([one], "append", template="{nothing}")
    for bad in (None, 5, [None], ["a"], [1.5]):
        with pytest.raises(RequestError):
            context.append(bad)  # type: ignore[arg-type]
    with pytest.raises(JoinError, match="for all of them"):
        context.join([one], by=majority(lambda d: None))
    with pytest.raises(ZeroDivisionError):
        context.join([one], by=lambda d: 1 / 0)
    running = one.generate(max_tokens=4, temperature=0)
    for use in (one.generate, one.checkpoint, one.rollback, lambda: one.fork(1)):
        with pytest.raises(ContextBusyError, match="not finished"):
            use()
    with pytest.raises(ContextBusyError):
        context.join([one, two], "all")
    assert (one.closed, two.closed) == (False, False)
    running.result()
    context.append("more")
    with pytest.raises(JoinError, match="has changed"):
        context.join([one])
    assert context.join([one], "all") == [one.generated]
    with pytest.raises(ContextClosedError):
        context.join([one], "all")
    with pytest.raises(ContextClosedError):
        one.generate()
    with pytest.raises(RequestError, match="at least 1"):
        context.fork(0)
    with pytest.raises(UnsupportedParameterError, match="fork"):
        context.generate(n=2)
    with pytest.raises(RequestError, match="vocabulary"):
        context.append([259])
    with llm.context([1] * 512) as full, pytest.raises(PromptTooLongError):
        full.generate()
    with pytest.raises(RequestError, match="empty"):
        llm.context().generate()
    with pytest.raises(ContextError, match="no such checkpoint"):
        context.rollback()
    context.close()
    other.close()
    context.close()
    assert (two.closed, stranger.closed) == (True, True)


def test_going_back(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    with llm.context(PROMPT) as context:
        greedy(context, 5)
        first = context.checkpoint()
        tokens = context.tokens
        context.append(" Or else? ")
        greedy(context, 20)
        second = context.checkpoint()
        context.rollback(first)
        assert context.tokens == tokens
        assert len(context.logprobs) == 5
        with pytest.raises(ContextError, match="no such checkpoint"):
            context.rollback(second)
        before = llm.stats().engine
        assert list(greedy(context, 6)) == reference(list(tokens), 6)
        now = llm.stats().engine
        assert now.prefilled_tokens - before.prefilled_tokens <= 1
        context.rollback()
        assert context.tokens == tokens


def test_streaming_and_cancelling(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with llm.context(PROMPT) as context:
        (twin,) = context.fork(1)
        pieces = list(twin.generate(max_tokens=40, temperature=0, ignore_eos=True))
        assert len(pieces) > 1
        assert "".join(pieces) == twin.generated
        start = context.tokens
        generation = context.generate(max_tokens=40, temperature=0, ignore_eos=True)
        assert next(iter(generation)) == pieces[0]
        assert not generation.done
        generation.cancel()
        with pytest.raises(GenerationCancelledError):
            generation.result()
        assert context.tokens == start
        assert (
            context.generate(max_tokens=40, temperature=0, ignore_eos=True).text == twin.generated
        )
        left = twin.generate(max_tokens=5)
    with pytest.raises(GenerationCancelledError):
        left.result()


def test_chat_turns(make_llm: MakeLLM) -> None:
    llm = make_llm()
    first = [{"role": "user", "content": "Hello"}]
    second = [{"role": "user", "content": "And now?"}]
    with llm.context(first) as context:
        assert context.tokens == tuple(llm.render_chat(first))
        answer = context.generate(max_tokens=6, temperature=0, ignore_eos=True).text
        context.append(second)
        whole = [*first, {"role": "assistant", "content": answer}, *second]
        assert context.text == llm.loaded.tokenizer.decode(llm.render_chat(whole))
    with llm.context("plain") as context, pytest.raises(RequestError, match="plain text"):
        context.append(first)
