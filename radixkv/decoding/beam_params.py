"""What a beam search asks of the decoder, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from radixkv.decoding import checks
from radixkv.decoding.biases import TokenBiases
from radixkv.decoding.params import SamplingParams
from radixkv.decoding.unknown import names_unknown_keywords
from radixkv.errors import RequestError

# What each sequence obeys by itself, checked where sampled ones have it checked.
OF_EACH = (
    "max_tokens",
    "min_tokens",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "bad_words_ids",
    "allowed_token_ids",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logprobs",
)

EarlyStopping = bool | Literal["never"]

MAX_PENALTY = 5.0
"""Beyond it a context of 100,000 tokens to this power is no float32."""


@names_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How one prompt is searched. Immutable; derive another with `dataclasses.replace`.

    The search is that of transformers' ``generate(num_beams=beam_width, do_sample=False)``, with
    its names where they do not speak of beams.

    Parameters
    ----------
    beam_width : int
        Beams that are kept from step to step.
    max_tokens : int
        Most tokens of each sequence; the end token counts.
    min_tokens : int
        Tokens before which no end token is taken, and no stop string ends a sequence.
    length_penalty : float
        A sequence's score is the sum of its tokens' log-probabilities (after penalties and biases)
        over its number of tokens to this power: above 0 favours long ones, 0 leaves the sum, below
        0 favours short ones.
    early_stopping : True, False or "never"
        When to stop, once ``beam_width`` sequences have ended. True: at once. False: when the best
        beam, were it to end now, would not beat the worst of them. "never": when it could not at
        any length up to ``max_tokens``.
    num_return_sequences : int
        Sequences returned, best first; at most ``beam_width``.
    repetition_penalty : float
        The log-probability of each token in the prompt or generated so far is multiplied by it; 1
        changes nothing.
    logit_bias : mapping of int to float
        Added to the log-probabilities of these token ids: in [-100, 100], and -100 forbids the
        token. Kept as an immutable mapping.
    bad_words : str or sequence of str
        Words never generated, at a text's beginning or behind a space; kept as a tuple.
    bad_words_ids : sequence of sequence of int
        The same by token ids: the last of each is forbidden where the others stand just before it,
        in the prompt too.
    allowed_token_ids : sequence of int or None
        The only tokens that may come, so add the end token if it shall be one of them; None: all.
    stop : str or sequence of str
        Text that ends a sequence, as an end token does; kept as a tuple.
    stop_token_ids : sequence of int
        Tokens that end a sequence, besides the model's own; kept as a tuple.
    ignore_eos : bool
        Go on after the model's end token.
    include_stop_str_in_output : bool
        Leave the stop string that matched at the end of the text.
    skip_special_tokens : bool
        Leave special tokens out of the texts.
    logprobs : int or None
        None: none. 0: log-probability and rank of each token. k: also the k likeliest. They are
        the model's own, before penalties, biases and bans.

    Raises
    ------
    RequestError
        A value that cannot work; the message says what would.
    UnsupportedParameterError
        A keyword that is not a parameter; the message names the nearest one that is.
    """

    beam_width: int
    max_tokens: int = 16
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = TokenBiases({})
    bad_words: str | Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every value and bring it to its plain type (numpy scalars are welcome)."""
        hint = "0 leaves the length out"
        plain: dict[str, object] = {
            "beam_width": checks.integer("beam_width", self.beam_width, low=1),
            "length_penalty": checks.number(
                "length_penalty", self.length_penalty, -MAX_PENALTY, MAX_PENALTY, hint=hint
            ),
        }
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r}'
            )
        hint = "at most beam_width"
        plain["num_return_sequences"] = checks.integer(
            "num_return_sequences", self.num_return_sequences, low=1, hint=hint
        )
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.num_return_sequences > self.beam_width:
            raise RequestError(
                f"num_return_sequences ({self.num_return_sequences}) must not exceed beam_width "
                f"({self.beam_width}); a search keeps no more sequences than beams"
            )
        branches = self.for_branches()
        for name in OF_EACH:
            object.__setattr__(self, name, getattr(branches, name))

    def for_branches(self) -> SamplingParams:
        """The part of it that each sequence obeys by itself, as a greedy request's."""
        return SamplingParams(
            n=self.num_return_sequences,
            temperature=0,
            seed=0,
            **{name: getattr(self, name) for name in OF_EACH},
        )
