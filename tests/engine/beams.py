"""Beam search by Hugging Face ``generate``, to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from radixkv.decoding import BeamSearchParams
from radixkv.engine import RequestOutput

Answer = tuple[list[int], float]


@torch.inference_mode()
def hugging_face(
    model: Any, prompt: list[int], params: BeamSearchParams, eos_token_ids: Iterable[int]
) -> list[Answer]:
    """Tokens and score of each returned sequence, best first; ``beam_width`` is at least 2."""
    ends = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
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
        pad_token_id=ends[0] if ends else 0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        # What stands behind the first end token is padding.
        end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append((tokens[: end + 1], score))
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
