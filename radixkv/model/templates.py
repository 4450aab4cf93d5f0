"""What a chat template reads: whoever is told what it does not read is told in vain."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from jinja2 import Environment, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Generation(Extension):
    """The tag by which templates mark what the assistant says; transformers' own."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


def template_source(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> str:
    """The template that renders conversations; some models have another one for tools."""
    source: str = tokenizer.get_chat_template(tools=[] if with_tools else None)
    return source


def template_variables(
    tokenizer: PreTrainedTokenizerBase, with_tools: bool = False
) -> frozenset[str]:
    """Names that a tokenizer's chat template reads, whether or not they are set.

    Parameters
    ----------
    tokenizer
        With a ``chat_template``.
    with_tools : bool
        Of the template that is used when tools are given.

    Raises
    ------
    Exception
        Of jinja, if the template cannot be read.
    """
    return _variables(template_source(tokenizer, with_tools))
