"""Log-probabilities of tokens that were given, from the logits of the step that reads them."""

from __future__ import annotations

import math

import torch

from radixkv.decoding.logprobs import describe
from radixkv.engine.decodes import ScheduledRow
from radixkv.engine.scheduler import Step

# Rows of logits that are normalised at once: each may be some 150,000 float32 numbers.
PORTION = 64


@torch.inference_mode()
def score_prompts(step: Step, logits: torch.Tensor) -> torch.Tensor:
    """Add what a step found to its requests' ``prompt_logprobs``.

    Parameters
    ----------
    step : Step
    logits : tensor (wanted, vocabulary)
        As `ModelRunner.run` returned them.

    Returns
    -------
    tensor (rows that sample, vocabulary)
        The logits to sample from. A row whose prompt had NaN logits anywhere is NaN here.
    """
    if not any(row.num_scored for row in step.prompts):
        return logits
    sampled, offset = [], 0
    for row in step.rows:
        behind = offset + row.num_scored
        _score(row, logits[offset:behind])
        offset += row.num_logits
        if row.samples:
            known = row.branch.request.prompt_logprobs
            failed = any(math.isnan(entry.logprob) for entry in known)
            last = logits[behind:offset]
            sampled.append(torch.full_like(last, torch.nan) if failed else last)
    return torch.cat(sampled) if sampled else logits[:0]


def _score(row: ScheduledRow, logits: torch.Tensor) -> None:
    """Describe the tokens behind the row's queries from ``logits_from`` on."""
    request, first = row.branch.request, row.logits_from + 1
    tokens = request.prompt[first : first + len(logits)].tolist()
    top = request.params.prompt_logprobs or 0
    for start in range(0, len(tokens), PORTION):
        table = logits[start : start + PORTION].float().log_softmax(dim=-1).cpu().numpy()
        portion = zip(table, tokens[start : start + PORTION], strict=True)
        request.prompt_logprobs += [describe(line, token, top) for line, token in portion]
