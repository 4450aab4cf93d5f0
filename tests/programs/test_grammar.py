"""Contexts under a grammar: it holds for the new text only, and for each branch by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from radixkv.errors import RequestError
from radixkv.llm import LLM

MakeLLM = Callable[..., LLM]
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}


def test_only_the_new_text_obeys_and_all_of_it_stays(make_llm: MakeLLM) -> None:
    with make_llm().context("no JSON: ") as context:
        first = context.generate(json_schema=PAIR, max_tokens=60, seed=1)
        assert set(json.loads(first.text)) == {"a", "b"}
        # It ended by its grammar, so its last token is text.
        assert context.text == "no JSON: " + first.text
        second = context.generate(regex="[0-9]{3}", max_tokens=9, seed=2)
        assert re.fullmatch("[0-9]{3}", second.text)
        assert context.text == "no JSON: " + first.text + second.text
        assert context.generated == first.text + second.text
        free = context.generate(max_tokens=5, seed=3)
        assert len(free.token_ids) == 5


def test_a_text_ended_by_the_end_token_goes_on_without_it(make_llm: MakeLLM) -> None:
    llm = make_llm()
    end = llm.loaded.eos_token_ids[0]
    with llm.context("digits: ") as context:
        params = {"regex": "[0-9]{2,}", "max_tokens": 40, "logit_bias": {end: 100}}
        generation = context.generate(seed=1, **params)  # type: ignore[arg-type]
        assert generation.token_ids[-1] == end
        assert len(generation.token_ids) == 3
        assert context.text == "digits: " + generation.text
        assert re.fullmatch("[0-9]{2}", generation.text)


def test_branches_go_on_by_grammars_of_their_own(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with llm.context("one prompt for all of them: ") as context:
        branches = context.fork(4)
        pending = [
            branch.generate(json_schema=PAIR, max_tokens=60, seed=index)
            for index, branch in enumerate(branches[:2])
        ]
        pending.append(branches[2].generate(regex="(ab|c)+d", max_tokens=30, seed=2))
        pending.append(branches[3].generate(max_tokens=8, seed=3))
        found = [output.text for output in llm.run(pending)]
        assert found[0] != found[1]
        for text in found[:2]:
            assert set(json.loads(text)) == {"a", "b"}
        assert re.match("(ab|c)+", found[2])
        assert context.join(branches, mode="all") == found


def test_a_grammar_refused_leaves_the_context_as_it_was(make_llm: MakeLLM) -> None:
    with make_llm().context("text") as context:
        with pytest.raises(RequestError, match="The parenthesis is not closed"):
            context.generate(regex="(a")
        place = context.checkpoint()
        assert context.generate(regex="yes|no", max_tokens=5, seed=1).text in ("yes", "no")
        context.rollback(place)
        assert context.text == "text"
        pending = context.generate(regex="[ab]{30}", max_tokens=30)
        pending.cancel()
        assert context.text == "text"
