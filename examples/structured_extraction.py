"""Structured extraction: records from several documents at once, over one shared instruction.

    python examples/structured_extraction.py [--model demo]

The instruction is computed once. Each document is a branch of it, and all of them are read and
answered in one batch, each under a grammar of its own: whatever the model writes is a record by
the schema. A record's context is then forked, to fill two more fields from it side by side.
"""

from __future__ import annotations

import argparse
import json
import time

from radixkv import LLM
from radixkv.programs import Context

INSTRUCTION = """\
Read the text and write what it says about the person as JSON, in one line.

Text: Maria Lopez, 41, runs a bakery in Seville.
{"name": "Maria Lopez", "age": 41, "city": "Seville", "job": "baker"}

Text: In Oslo we met Jonas Berg. He is 29 years old and teaches music at a school.
{"name": "Jonas Berg", "age": 29, "city": "Oslo", "job": "music teacher"}

"""
DOCUMENTS = [
    "Text: Anna Weber is a nurse from Hamburg. She turned 34 last week.\n",
    "Text: The fisherman Tom Hill, aged 58, has lived in Cork all his life.\n",
    "Text: Kenji Sato, an architect in Osaka, celebrated his 45th birthday.\n",
    "Text: At 23, Lucy Brown became the youngest pilot in Denver.\n",
]
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,12} [A-Z][a-z]{1,12}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
        "job": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city", "job"],
}
FIELDS = {
    "\nIs this person older than 40? Answer yes or no: ": {"regex": "yes|no"},
    "\nThe initials of the name are: ": {"regex": r"[A-Z]\. [A-Z]\."},
}


def fill(llm: LLM, context: Context) -> list[str]:
    """The fields, each on a branch of its own; the context stays as it is."""
    branches = context.fork(len(FIELDS))
    for branch, question in zip(branches, FIELDS, strict=True):
        branch.append(question)
    grammars = FIELDS.values()
    llm.run(
        [
            branch.generate(max_tokens=8, temperature=0, **grammar)
            for branch, grammar in zip(branches, grammars, strict=True)
        ]
    )
    for branch in branches:
        stats = branch.stats
        print(
            f"  a field shared {stats.shared_blocks} blocks and had {stats.own_blocks} of its own"
        )
    return context.join(branches, mode="all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args()
    with (
        LLM(arguments.model, dtype="bfloat16", seed=1) as llm,
        llm.context(INSTRUCTION) as instruction,
    ):
        started = time.perf_counter()
        readers = instruction.fork(len(DOCUMENTS))
        for reader, document in zip(readers, DOCUMENTS, strict=True):
            reader.append(document)
        records = [
            reader.generate(json_schema=RECORD, max_tokens=80, temperature=0) for reader in readers
        ]
        for output in llm.run(records):
            record = json.loads(output.text)
            print(f"{record['name']:>12}, {record['age']}, {record['city']}: {record['job']}")
        print(f"two fields of the first record: {fill(llm, readers[0])}\n")
        engine = llm.stats().engine
        alone = sum(map(len, readers)) - sum(len(record.token_ids) for record in records)
        print(f"instruction of {len(instruction)} tokens, shared by {len(readers)} documents")
        print(f"prefilled: {engine.prefilled_tokens} tokens; the documents alone would be {alone}")
        print(f"steps: {engine.steps}, seconds: {time.perf_counter() - started:.1f}")


if __name__ == "__main__":
    main()
