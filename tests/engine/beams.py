"""Beam search by Hugging Face ``generate``, to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from radixkv.decoding import BeamSearchParams
from radixkv.engine import RequestOutput

Answer = tuple[list[int], float]

PADDING = -1


@torch.inference_mode()
def hugging_face(
    model: Any,
    prompt: list[int],
    params: BeamSearchParams,
    eos_token_ids: Iterable[int],
    tokenizer: Any = None,
) -> list[Answer]:
    """Tokens and score of each returned sequence, best first; ``beam_width`` is at least 2."""
    ends = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
    allowed = params.allowed_token_ids
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.num_return_sequences,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=ends or None,
        pad_token_id=PADDING,
        repetition_penalty=params.repetition_penalty,
        bad_words_ids=[list(sequence) for sequence in params.bad_words_ids] or None,
        sequence_bias={(token,): bias for token, bias in params.logit_bias.items()} or None,
        prefix_allowed_tokens_fn=None if allowed is None else lambda *_: list(allowed),
        stop_strings=list(params.stop) or None,
        tokenizer=tokenizer if params.stop else None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = tokens.index(PADDING) if PADDING in tokens else len(tokens)
        answers.append((tokens[:end], score))
    return answers


def answers(output: RequestOutput) -> list[Answer]:
    """The same of ours."""
    assert output.error is None
    found = []
    for completion in output.outputs:
        assert completion.score is not None
        found.append((list(completion.token_ids), completion.score))
    return found


def assert_same(ours: list[Answer], theirs: list[Answer]) -> None:
    """The same tokens to the last, and the same scores but for rounding."""
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, score), (_, expected) in zip(ours, theirs, strict=True):
        assert abs(score - expected) < 1e-4 * max(1, abs(expected))
