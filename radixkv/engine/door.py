"""The door: what could never be served is refused before it waits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from radixkv.cache import token_bytes
from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.decoding.checks import in_vocabulary
from radixkv.engine.beams import Params, num_branches
from radixkv.errors import PromptTooLongError, RequestError


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
