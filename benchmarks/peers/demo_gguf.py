"""The demo model as a GGUF of unquantised weights, for llama.cpp.

The model is published as Q4_1. What the others load is its dequantised values, so llama.cpp is
given the same: the published file with each matrix dequantised, and rounded to bfloat16 if that is
the type asked for. Vectors stay in float32, as llama.cpp's own converter leaves them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from radixkv.model import demo

TYPES = {"float32": GGMLQuantizationType.F32, "bfloat16": GGMLQuantizationType.BF16}
FILE_TYPES = {"float32": 0, "bfloat16": 32}  # general.file_type: all F32, mostly BF16


def unquantised(source: Path, target: Path, dtype: str) -> None:
    """Write a GGUF's model again, its matrices in float32 or bfloat16."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = FILE_TYPES[dtype] if name == "general.file_type" else field.contents()
        inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = TYPES[dtype] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def demo_gguf(folder: Path, dtype: str) -> Path:
    """The demo model in a type, made in ``folder`` if it is not there."""
    target = folder / f"{demo.DEMO_NAME}-{dtype}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source = demo._fetch_demo(Path(scratch), print)
            made = Path(scratch) / target.name
            unquantised(source, made, dtype)
            made.rename(target)
    return target
