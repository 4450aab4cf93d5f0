// What attention reads, out of tensors that have been checked.

#pragma once

#include <ATen/core/Tensor.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "paged.h"

namespace radixkv {

inline bool allow_tiles() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return allowed;
}

// The store of a layer, and a step's reads of it.
struct Store {
  const at::Tensor &keys, &values, &items, &tables, &positions, &first;
};

// All of the inputs but the query.
inline Inputs store_inputs(const Store& from, int64_t tokens, int64_t heads, double scale) {
  const at::Tensor &keys = from.keys, &values = from.values;
  TORCH_CHECK(keys.dim() == 4 && values.dim() == 4, "dimensions");
  TORCH_CHECK(keys.sizes().slice(0, 3) == values.sizes().slice(0, 3), "a value a key");
  TORCH_CHECK(keys.size(1) > 0 && keys.size(2) > 0, "an empty store");
  Inputs in{};
  in.block_size = keys.size(1);
  in.kv_heads = keys.size(2);
  in.groups = heads / in.kv_heads;
  in.key_dim = keys.size(3);
  in.value_dim = values.size(3);
  for (const at::Tensor* tensor : {&keys, &values}) {
    TORCH_CHECK(tensor->scalar_type() == at::kBFloat16, "keys and values must be bfloat16");
    TORCH_CHECK(tensor->is_contiguous(), "strides");
  }
  TORCH_CHECK(in.key_dim % PAIR == 0 && in.key_dim <= MAX_DIM, "key_dim");
  TORCH_CHECK(in.value_dim % PAIR == 0 && in.value_dim <= MAX_DIM, "value_dim");
  TORCH_CHECK(heads % in.kv_heads == 0 && in.groups <= HEAD_ROWS, "heads");
  TORCH_CHECK(from.items.scalar_type() == at::kInt && from.tables.scalar_type() == at::kInt, "int32");
  TORCH_CHECK(from.items.is_contiguous() && from.items.size(1) == ITEM_FIELDS, "items");
  for (const at::Tensor* tensor : {&from.tables, &from.positions, &from.first})
    TORCH_CHECK(tensor->dim() == 1 && tensor->is_contiguous(), "lists must be contiguous");
  for (const at::Tensor* tensor : {&from.positions, &from.first})
    TORCH_CHECK(tensor->scalar_type() == at::kLong && tensor->size(0) == tokens, "a position a token");
  TORCH_CHECK(scale > 0, "scale");
  in.keys = keys.const_data_ptr<bf16>();
  in.values = values.const_data_ptr<bf16>();
  in.key_slot = in.kv_heads * in.key_dim;
  in.value_slot = in.kv_heads * in.value_dim;
  in.tables = from.tables.const_data_ptr<int32_t>();
  in.positions = from.positions.const_data_ptr<int64_t>();
  in.first = from.first.const_data_ptr<int64_t>();
  in.scale = static_cast<float>(scale) * LOG2E;
  return in;
}

}  // namespace radixkv
