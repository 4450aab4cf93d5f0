"""The door: what could never be served is refused; of the rest requests are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache import Namespace, Retention, token_bytes
from radixkv.cache.hashing import check_namespace
from radixkv.decoding import (
    BeamSearchParams,
    Grammar,
    GrammarCompiler,
    LogitEdits,
    SamplingParams,
    TextStream,
    Tokenizer,
    logit_edits,
    resolve_seed,
)
from radixkv.decoding.checks import in_vocabulary
from radixkv.engine.beams import Params, make_group, num_branches
from radixkv.engine.holds import Hold
from radixkv.engine.request import NOTHING, Branch, Request
from radixkv.errors import PromptTooLongError, RequestError

# Prompt tokens behind which the first generated ones are turned into text.
CONTEXT_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Door:
    """Checks what an engine is asked for, and makes requests of it; knows none of the others.

    Attributes
    ----------
    vocab_size, max_model_len, max_num_seqs : int
        The engine's.
    pool : (int, int)
        Blocks, and tokens in a block.
    tokenizer : Tokenizer or None
    eos_token_ids : tuple of int
    grammars : GrammarCompiler
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    pool: tuple[int, int]
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler

    def check(self, prompt: Iterable[int], params: Params) -> npt.NDArray[np.int32]:
        """The prompt's tokens, if a request can be made of it; raises what `make` would raise."""
        check_params(params, self.vocab_size)
        tokens = checked_prompt(prompt, self.vocab_size)
        check_size(
            len(tokens),
            params,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            pool=self.pool,
        )
        self._edits(tokens[:0], params)  # What it refuses does not depend on the prompt.
        self._grammar(params)
        return tokens

    def room(self, prompt: int, branches: int) -> int:
        """The largest ``max_tokens`` that `check` lets a prompt of so many tokens have, 1 or more.

        Where there is no room at all, `check` refuses that one token and says why.
        """
        num_blocks, size = self.pool
        shared = prompt // size if branches > 1 else 0
        longest = (shared + (num_blocks - shared) // branches) * size
        return max(min(longest + 1, self.max_model_len) - prompt, 1)

    def make(
        self,
        prompt: Iterable[int],
        params: Params,
        *,
        request_id: str,
        serial: int,
        namespace: Namespace,
        retention: Retention,
        hold: Hold | None,
        scored_from: int | None,
    ) -> Request:
        """A request that waits nowhere yet, with its branches; see `Engine.add_request`."""
        if not isinstance(retention, Retention):
            raise RequestError(f"retention must be a Retention, not {retention!r}")
        tokens = self.check(prompt, params)
        each = params.for_branches()
        if hold is not None and num_branches(params) > 1:
            raise RequestError(
                "a request of several branches cannot run on a kept sequence; fork it"
            )
        if scored_from is None:
            scored_from = NOTHING if each.prompt_logprobs is None else 0
        request = Request(
            request_id=request_id,
            serial=serial,
            prompt=tokens,
            params=each,
            seed=resolve_seed(each.seed),
            reports_logprobs=params.logprobs is not None,
            namespace=check_namespace(namespace),
            retention=retention,
            hold=hold,
            scored_from=scored_from,
        )
        request.score_from_where_it_stands()
        self._make_branches(request, params)
        return request

    def _make_branches(self, request: Request, params: Params) -> None:
        room = self.max_model_len - len(request.prompt)
        searches = isinstance(params, BeamSearchParams)
        stream = TextStream(
            request.params,
            self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            context=request.prompt[-CONTEXT_TOKENS:].tolist(),
            edits=self._edits(request.prompt, params),
            grammar=self._grammar(params),
            room=None if searches else room,  # A search ends its beams itself.
        )
        branches = range(num_branches(params))
        request.branches = [Branch(request, index, stream.copy()) for index in branches]
        if isinstance(params, BeamSearchParams):
            request.beams = make_group(params, self.eos_token_ids, stream, room)

    def _edits(self, prompt: npt.NDArray[np.int32], params: Params) -> LogitEdits | None:
        return logit_edits(
            params.for_branches(),
            prompt,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            words_begin_in_prompt=isinstance(params, BeamSearchParams),
        )

    def _grammar(self, params: Params) -> Grammar | None:
        constraint = None if isinstance(params, BeamSearchParams) else params.constraint
        return None if constraint is None else self.grammars.compile(constraint)


def checked_prompt(prompt: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """The prompt's tokens; int32 (tokens,).

    Raises
    ------
    RequestError
        If it is a text, no list of ids, empty, or has ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        raise RequestError("the engine takes token ids; tokenize the text first")
    if not isinstance(prompt, np.ndarray):
        try:
            prompt = list(prompt)
        except TypeError:
            raise RequestError(f"a prompt is a list of token ids, not {prompt!r}") from None
    tokens = np.frombuffer(token_bytes(prompt), np.int32)
    if not len(tokens):
        raise RequestError("the prompt is empty; it needs at least one token")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} tokens"
        )
    return tokens


def check_params(params: object, vocab_size: int) -> None:
    """Refuse what is not parameters, or stops at tokens that the model does not have.

    Raises
    ------
    RequestError
    """
    if not isinstance(params, SamplingParams | BeamSearchParams):
        raise RequestError(f"params must be SamplingParams or BeamSearchParams, not {params!r}")
    in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)


def check_size(
    prompt: int, params: Params, *, max_model_len: int, max_num_seqs: int, pool: tuple[int, int]
) -> None:
    """Refuse what could never run, even alone: it would wait for ever.

    Parameters
    ----------
    prompt : int
        Tokens of the prompt.
    params : SamplingParams or BeamSearchParams
    max_model_len, max_num_seqs : int
        The engine's.
    pool : (int, int)
        Blocks, and tokens in a block.

    Raises
    ------
    PromptTooLongError
        If it needs more than the model's context or the whole pool.
    RequestError
        If it has more continuations than may run at a time.
    """
    if prompt >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {prompt} tokens, which leaves no room to generate within the "
            f"model's context of {max_model_len}"
        )
    count = num_branches(params)
    if isinstance(params, BeamSearchParams):
        name = "beam_width"
    else:
        name = "n" if params.best_of is None else "best_of"
    if count > max_num_seqs:
        raise RequestError(f"{name}={count} continuations exceed max_num_seqs={max_num_seqs}")
    num_blocks, size = pool
    # The last token is sampled, but never computed.
    longest = min(prompt + params.max_tokens, max_model_len) - 1
    shared = prompt // size if count > 1 else 0
    needed = shared + count * (-(-longest // size) - shared)
    if needed > num_blocks:
        raise PromptTooLongError(
            f"the request may need {needed} blocks of {size} tokens "
            f"(prompt {prompt}, max_tokens {params.max_tokens}, {name} {count}), and the pool "
            f"has {num_blocks}; lower max_tokens, {name}, or add kv_memory"
        )
