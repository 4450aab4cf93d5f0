"""From logits to tokens to text: parameters, sampling, detokenisation and stop conditions.

    params        SamplingParams: what a request asks for, checked when it is made
    beam_params   BeamSearchParams: what a beam search asks for
    beam          BeamSearch: beams and ended sequences from step to step; propose: its candidates
    sampler       sample: one token for each row of a batch of logits
    edits, apply  LogitEdits: penalties, biases and bans, and what they change in a batch
    counts        how often each token was generated
    constraint    Constraint: the JSON schema, regex or grammar that a request's text must obey
    schema, regex what of a schema or an expression a grammar can promise
    vocabulary    the text of each token
    compiler      GrammarCompiler: constraints to grammars, within limits, each compiled once
    grammar       Grammar, GrammarState: which tokens may follow a text, and whether it may end
    badwords      sequences of tokens that must not be generated
    biases        TokenBiases: an immutable mapping from token ids to numbers
    filters       temperature, top_k, top_p and min_p, as transformers defines them
    rng, draw     one counter-based uniform number a row, and the token it picks
    logprobs      what is reported beside a token
    detokenizer   Detokenizer: tokens to text, one token at a time, by decoding a window of them
    byte_level    ByteLevelDetokenizer: the same by look-ups; detokenizer_for: whichever fits
    stopping      TextStream: text that may be shown, and when a continuation ends

Nothing here knows of blocks, caches or models.
"""
# ruff: noqa: E402 -- where the modules are looked for comes before the first of them

from radixkv.compiled import DECODING as _DECODING
from radixkv.compiled import use_compiled as _use_compiled

IS_COMPILED = _use_compiled(_DECODING, __path__)

from radixkv.decoding.beam import Beam, BeamSearch, Candidates, Hypothesis, propose
from radixkv.decoding.beam_params import BeamSearchParams
from radixkv.decoding.byte_level import ByteLevelDetokenizer, detokenizer_for
from radixkv.decoding.compiler import GrammarCompiler, GrammarLimits
from radixkv.decoding.constraint import Constraint
from radixkv.decoding.detokenizer import Detokenizer, Tokenizer
from radixkv.decoding.edits import LogitEdits, logit_edits
from radixkv.decoding.grammar import Grammar, GrammarState
from radixkv.decoding.logprobs import TokenLogprobs
from radixkv.decoding.params import SamplingParams
from radixkv.decoding.rng import resolve_seed
from radixkv.decoding.sampler import SampledTokens, SamplingBatch, SamplingRow, sample
from radixkv.decoding.stopping import Added, FinishReason, TextDelta, TextStream, add_each

__all__ = [
    "IS_COMPILED",
    "Added",
    "Beam",
    "BeamSearch",
    "BeamSearchParams",
    "ByteLevelDetokenizer",
    "Candidates",
    "Constraint",
    "Detokenizer",
    "FinishReason",
    "Grammar",
    "GrammarCompiler",
    "GrammarLimits",
    "GrammarState",
    "Hypothesis",
    "LogitEdits",
    "SampledTokens",
    "SamplingBatch",
    "SamplingParams",
    "SamplingRow",
    "TextDelta",
    "TextStream",
    "TokenLogprobs",
    "Tokenizer",
    "add_each",
    "detokenizer_for",
    "logit_edits",
    "propose",
    "resolve_seed",
    "sample",
]
