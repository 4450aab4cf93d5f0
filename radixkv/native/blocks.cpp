// What lies between the matrix products of a decoder block, each in one pass: bfloat16 and float32.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "elements.h"

namespace {

using namespace radixkv;

constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a thread

int64_t grain(int64_t row) { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(row, 1)); }

template <typename Value, typename Body>
void each_row(int64_t rows, int64_t width, const Body& body) {
  at::parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

template <typename Body>
void for_type(const at::Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kBFloat16) {
    body(static_cast<bf16*>(nullptr));
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "bfloat16 or float32 is needed");
    body(static_cast<float*>(nullptr));
  }
}

// hidden + alpha * added, and its RMSNorm over the last axis.
std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& hidden, const std::optional<at::Tensor>& added, double alpha,
    const at::Tensor& weight, double eps) {
  TORCH_CHECK(weight.dim() == 1 && weight.numel() > 0, "weight");
  const int64_t width = weight.size(0), rows = hidden.numel() / width;
  TORCH_CHECK(hidden.size(-1) == width, "a weight for each element of a row");
  TORCH_CHECK(hidden.is_contiguous() && weight.is_contiguous(), "contiguous tensors are needed");
  if (added) {
    TORCH_CHECK(added->is_contiguous() && added->sizes() == hidden.sizes(), "added");
    TORCH_CHECK(added->scalar_type() == hidden.scalar_type(), "added");
  }
  at::Tensor sum = added ? at::empty_like(hidden) : hidden, out = at::empty_like(hidden);
  for_type(hidden, [&](auto* kind) {
    using Value = std::remove_pointer_t<decltype(kind)>;
    const auto go = [&](const auto* factors) {
      each_row<Value>(rows, width, [&](int64_t row) {
        normalise(
            hidden.const_data_ptr<Value>() + row * width,
            added ? added->const_data_ptr<Value>() + row * width : nullptr,
            static_cast<float>(alpha), factors, static_cast<float>(eps), width,
            sum.mutable_data_ptr<Value>() + row * width,
            out.mutable_data_ptr<Value>() + row * width);
      });
    };
    if (weight.scalar_type() == hidden.scalar_type()) {
      go(weight.const_data_ptr<Value>());
    } else {
      go(weight.const_data_ptr<float>());
    }
  });
  return {sum, out};
}

// silu(gate) * up, of rows that hold gate and up side by side.
at::Tensor silu_mul(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous() && gate_up.size(1) % 2 == 0, "gate_up");
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  at::Tensor out = at::empty({rows, width}, gate_up.options());
  for_type(gate_up, [&](auto* kind) {
    using Value = std::remove_pointer_t<decltype(kind)>;
    each_row<Value>(rows, width, [&](int64_t row) {
      const Value* gate = gate_up.const_data_ptr<Value>() + 2 * row * width;
      const Value* up = gate + width;
      Value* to = out.mutable_data_ptr<Value>() + row * width;
      gated(gate, up, width, to);
    });
  });
  return out;
}

// Rotate the halves of each head against each other by the token's angles, in place.
void rotate_(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin) {
  TORCH_CHECK(heads.dim() == 3 && heads.stride(2) == 1, "heads");
  TORCH_CHECK(heads.stride(1) == heads.size(2), "the heads of a token must lie side by side");
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.sizes() == sin.sizes(), "angles");
  TORCH_CHECK(cos.size(-1) <= heads.size(2) && cos.size(-1) % 2 == 0, "angles");
  TORCH_CHECK(cos.numel() == heads.size(0) * cos.size(-1), "angles for each token");
  TORCH_CHECK(cos.scalar_type() == heads.scalar_type() && sin.scalar_type() == heads.scalar_type());
  const int64_t count = heads.size(1), dim = heads.size(2), width = cos.size(-1), half = width / 2;
  for_type(heads, [&](auto* kind) {
    using Value = std::remove_pointer_t<decltype(kind)>;
    each_row<Value>(heads.size(0), count * dim, [&](int64_t token) {
      Value* head = heads.mutable_data_ptr<Value>() + token * heads.stride(0);
      const Value* c = cos.const_data_ptr<Value>() + token * width;
      const Value* s = sin.const_data_ptr<Value>() + token * width;
      for (int64_t h = 0; h < count; ++h) turn(head + h * dim, c, s, half);
    });
  });
}

// Store tokens' keys and values in their slots.
void write_kv(
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys,
    const at::Tensor& values, const at::Tensor& slots) {
  const int64_t tokens = slots.size(0);
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots");
  const auto write = [&](const at::Tensor& from, const at::Tensor& to) {
    const int64_t width = to.size(2) * to.size(3), bytes = width * to.element_size();
    TORCH_CHECK(to.is_contiguous() && from.scalar_type() == to.scalar_type(), "store");
    TORCH_CHECK(from.size(0) == tokens && from.size(1) == to.size(2), "a row of heads a token");
    TORCH_CHECK(from.size(2) == to.size(3), "heads of the store's width");
    // The stride of an axis of one means nothing.
    const bool together = from.size(1) == 1 || from.stride(1) == to.size(3);
    TORCH_CHECK(from.stride(2) == 1 && together, "heads side by side");
    const int64_t most = to.size(0) * to.size(1), step = from.stride(0) * from.element_size();
    const char* source = static_cast<const char*>(from.const_data_ptr());
    char* target = static_cast<char*>(to.mutable_data_ptr());
    const int64_t* slot = slots.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < tokens; ++t) {
      TORCH_CHECK(0 <= slot[t] && slot[t] < most, "slot ", slot[t], " of ", most);
      std::memcpy(target + slot[t] * bytes, source + t * step, bytes);
    }
  };
  write(key, keys);
  write(value, values);
}

// Copy blocks within each of a store's tensors; all sources are read first.
void copy_blocks(at::TensorList stores, const at::Tensor& sources, const at::Tensor& targets) {
  const int64_t pairs = sources.numel();
  TORCH_CHECK(targets.numel() == pairs, "a target a source");
  for (const at::Tensor* list : {&sources, &targets})
    TORCH_CHECK(list->scalar_type() == at::kLong && list->is_contiguous(), "blocks");
  const int64_t *from = sources.const_data_ptr<int64_t>(), *to = targets.const_data_ptr<int64_t>();
  for (const at::Tensor& store : stores) {
    TORCH_CHECK(store.dim() > 1 && store.is_contiguous(), "store");
    for (int64_t i = 0; i < pairs; ++i)
      TORCH_CHECK(
          0 <= std::min(from[i], to[i]) && std::max(from[i], to[i]) < store.size(0), "block of ",
          store.size(0));
  }
  at::parallel_for(0, stores.size(), 1, [&](int64_t begin, int64_t end) {
    std::vector<char> read;
    for (int64_t index = begin; index < end; ++index) {
      const at::Tensor& store = stores[index];
      const int64_t bytes = store.stride(0) * store.element_size();
      char* data = static_cast<char*>(store.mutable_data_ptr());
      read.resize(pairs * bytes);
      for (int64_t i = 0; i < pairs; ++i)
        std::memcpy(read.data() + i * bytes, data + from[i] * bytes, bytes);
      for (int64_t i = 0; i < pairs; ++i)
        std::memcpy(data + to[i] * bytes, read.data() + i * bytes, bytes);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(radixkv, library) {
  library.def(
      "add_rms_norm(Tensor hidden, Tensor? added, float alpha, Tensor weight, float eps) "
      "-> (Tensor, Tensor)");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def("rotate_(Tensor(a!) heads, Tensor cos, Tensor sin) -> ()");
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots) -> ()");
  library.def("copy_blocks(Tensor(a!)[] stores, Tensor sources, Tensor targets) -> ()");
}

TORCH_LIBRARY_IMPL(radixkv, CPU, library) {
  library.impl("add_rms_norm", &add_rms_norm);
  library.impl("silu_mul", &silu_mul);
  library.impl("rotate_", &rotate_);
  library.impl("write_kv", &write_kv);
  library.impl("copy_blocks", &copy_blocks);
}
