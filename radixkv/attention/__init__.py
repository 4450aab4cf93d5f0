"""How a batch reads shared blocks: the store, the plan, and the backends."""

from radixkv.attention.backend import AttentionBackend, LayerAttention
from radixkv.attention.batch import FULL, AttentionBatch, Row, Span, make_batch
from radixkv.attention.choose import choose_backend
from radixkv.attention.cost import ON_A_CPU, CostModel
from radixkv.attention.native_backend import NativeBackend
from radixkv.attention.placement import send
from radixkv.attention.plan import AttentionPlan, SharedRun, plan_attention
from radixkv.attention.reads import Reads, plan_reads
from radixkv.attention.reference import ReferenceBackend
from radixkv.attention.store import KVStore, LayerShape, parse_kv_dtype
from radixkv.attention.torch_backend import TorchBackend
from radixkv.attention.triton_backend import TritonBackend

__all__ = [
    "FULL",
    "ON_A_CPU",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionPlan",
    "CostModel",
    "KVStore",
    "LayerAttention",
    "LayerShape",
    "NativeBackend",
    "Reads",
    "ReferenceBackend",
    "Row",
    "SharedRun",
    "Span",
    "TorchBackend",
    "TritonBackend",
    "choose_backend",
    "make_batch",
    "parse_kv_dtype",
    "plan_attention",
    "plan_reads",
    "send",
]
