"""What importing may need, and what the folder `kernels/` must not be."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, radixkv_kernels
from radixkv_kernels import torch_twins, unshared_work_list
rows, slots = torch.ones(2, 1, 4), torch.tensor([1, -1])
cache = torch.zeros(2, 1, 1, 4)
torch_twins.write_kv(rows, rows, cache, cache.clone(), slots)
torch_twins.copy_blocks([cache], [1], [0])
assert cache.eq(1).all()
table, position = torch.zeros(1, 1).int(), torch.zeros(2).int()
attention = (rows, cache, cache, table, unshared_work_list([2]), position)
assert torch_twins.paged_attention(*attention, scale=1.0).eq(1).all()
for call in (
    lambda: radixkv_kernels.paged_attention(*attention, scale=1.0),
    lambda: radixkv_kernels.write_kv(rows, rows, cache, cache.clone(), slots),
    lambda: radixkv_kernels.copy_blocks([cache], [1], [0]),
):
    try:
        call()
    except ImportError as error:
        assert "radixkv[triton]" in str(error) and "torch_twins" in str(error), error
    else:
        raise AssertionError("no ImportError")
"""

ON_THE_CPU = """
import sys, torch, radixkv_kernels
assert "triton" not in sys.modules
rows, cache = torch.ones(1, 1, 4), torch.zeros(1, 1, 1, 4)
try:
    radixkv_kernels.write_kv(rows, rows, cache, cache.clone(), torch.tensor([0]))
except RuntimeError as error:
    assert "TRITON_INTERPRET" in str(error), error
else:
    raise AssertionError("no RuntimeError")
"""


def run(code: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_twins_work_without_triton():
    run(WITHOUT_TRITON)


def test_a_launch_on_the_cpu_says_what_to_do():
    run(ON_THE_CPU)


def test_kernels_does_not_shadow_hugging_faces_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    # The class pulls in transformers.integrations.hub_kernels, which tries to import `kernels`.
    run("import transformers; from transformers import LlamaForCausalLM")


def test_imports_nothing_of_radixkv():
    run(
        "import sys, radixkv_kernels.kv_jit, radixkv_kernels.report, radixkv_kernels.variants; "
        "assert 'radixkv' not in sys.modules"
    )
