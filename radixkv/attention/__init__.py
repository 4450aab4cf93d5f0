"""How a batch reads shared blocks: the store, the plan, and the backends."""

from radixkv.attention.backend import AttentionBackend, LayerAttention
from radixkv.attention.batch import FULL, AttentionBatch, Row, Span, make_batch
from radixkv.attention.native_backend import NativeBackend, choose_backend
from radixkv.attention.plan import AttentionPlan, SharedRun, plan_attention
from radixkv.attention.reference import ReferenceBackend
from radixkv.attention.store import KVStore, LayerShape
from radixkv.attention.torch_backend import TorchBackend

__all__ = [
    "FULL",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionPlan",
    "KVStore",
    "LayerAttention",
    "LayerShape",
    "NativeBackend",
    "ReferenceBackend",
    "Row",
    "SharedRun",
    "Span",
    "TorchBackend",
    "choose_backend",
    "make_batch",
    "plan_attention",
]
