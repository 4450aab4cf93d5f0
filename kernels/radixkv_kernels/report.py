"""What the kernels cost on each GPU, by the compiler's word: ``python -m radixkv_kernels.report``.

Needs Triton but no GPU, so it says nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

COLUMNS = {
    "registers": "registers",
    "spills": "spills",
    "scalar_spills": "scalar",
    "shared": "shared",
    "shared_limit": "limit",
    "buffers": "buffers",
    "wide": "16-byte",
    "narrow": "narrower",
}


def measure(names: Sequence[str], targets: Sequence[str], every: bool) -> list[dict[str, Any]]:
    """Compile variants whose name contains any of `names` (or all); one record for each target."""
    from radixkv_kernels.variants import covering, everything

    records = []
    for variant in everything() if every else covering():
        if names and not any(name in variant.name for name in names):
            continue
        for target in targets:
            tile = None if variant.tile is None else variant.tile(target)
            record = {"variant": variant.name, "target": target} | asdict(variant.compile(target))
            record["tile"] = None if tile is None else asdict(tile)
            record["tile_bytes"] = variant.tile_bytes
            records.append(record)
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text, a line for each variant and target."""
    width = max((len(record["variant"]) for record in records), default=0)
    lines = [f"{'':{width}}  target  {'  '.join(COLUMNS.values())}  tile"]
    for record in records:
        figures = [f"{record[name]:>{len(title)}}" for name, title in COLUMNS.items()]
        tile = record["tile"]
        shape = "{rows}x{tokens}, {warps} warps, {stages} stages".format(**tile) if tile else ""
        line = [f"{record['variant']:{width}}", f"{record['target']:6}", *figures, shape]
        lines.append("  ".join(line).rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, and print a table or JSON."""
    # Triton's default for this changes in 3.10, and with it the figures.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from radixkv_kernels.ahead import TARGETS

    parser = argparse.ArgumentParser(prog="python -m radixkv_kernels.report", description=__doc__)
    parser.add_argument("names", nargs="*", help="only variants whose name contains one of these")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--all", action="store_true", help="every variant; takes many minutes")
    parser.add_argument("--json", action="store_true", help="records instead of a table")
    options = parser.parse_args(arguments)
    records = measure(options.names, options.target, options.all)
    print(json.dumps(records) if options.json else table(records))


if __name__ == "__main__":
    main()
