"""TokenBiases: a mapping from token ids to numbers that never changes, so that it can be hashed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from radixkv.decoding import checks
from radixkv.errors import RequestError

BAN = -100.0
"""The bias that forbids a token altogether, as OpenAI has it; also the smallest."""


class TokenBiases(Mapping[int, float]):
    """What is added to some tokens' logits; equal to a dict with the same items, and hashable.

    Parameters
    ----------
    biases : mapping of int to float
        Token ids of at least 0, and biases in [-100, 100].

    Raises
    ------
    RequestError
        If ``biases`` is no mapping, or holds an id or a bias that cannot be one.
    """

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float]) -> None:
        if not isinstance(biases, Mapping):
            raise RequestError(
                "logit_bias must be a mapping of token ids to biases, like {42: -100}, "
                f"got {biases!r}"
            )
        checked = {
            checks.integer("each token id of logit_bias", token, low=0): checks.number(
                "each bias of logit_bias", bias, BAN, -BAN, hint="-100 forbids the token"
            )
            for token, bias in biases.items()
        }
        self._biases = dict(sorted(checked.items()))

    def __getitem__(self, token_id: int) -> float:
        return self._biases[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(tuple(self._biases.items()))

    def __repr__(self) -> str:
        return repr(self._biases)
