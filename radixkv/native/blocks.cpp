// What lies between the matrix products of a decoder block, each in one pass: bfloat16 and float32.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>

#include "vectors.h"

namespace {

using namespace radixkv;

constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a thread
constexpr float LOG2E = 1.4426950408889634f;

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

template <typename Value, typename Weight>
void normalise(
    const Value* inputs, const Value* added, float alpha, const Weight* weight, float eps,
    int64_t width, Value* sum, Value* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += LANES) {
    const __mmask16 mask = lanes(width - i);
    __m512 x = load(inputs + i, mask);
    if (added != nullptr) {
      x = rounded(_mm512_fmadd_ps(load(added + i, mask), _mm512_set1_ps(alpha), x), inputs);
      store(sum + i, mask, x);
    }
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  const Value* from = added != nullptr ? sum : inputs;
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
  const __m512 factor = _mm512_set1_ps(1.f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += LANES) {
    const __mmask16 mask = lanes(width - i);
    __m512 x = _mm512_mul_ps(load(from + i, mask), factor);
    // A weight in the model's own type is applied to what was rounded to it, as models do.
    if constexpr (std::is_same_v<Value, Weight>) x = rounded(x, inputs);
    store(out + i, mask, _mm512_mul_ps(x, load(weight + i, mask)));
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
      for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 mask = lanes(width - i);
        const __m512 x = load(gate + i, mask);
        // Bounded, for an infinite power is no number less its whole part; 2 to the 200 is
        // infinite, and the quotient 0.
        const __m512 power = _mm512_min_ps(
            _mm512_mul_ps(x, _mm512_set1_ps(-LOG2E)), _mm512_set1_ps(200.f));
        const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.f), exp2_of(power));
        const __m512 activated = rounded(_mm512_div_ps(x, below), gate);
        store(to + i, mask, _mm512_mul_ps(activated, load(up + i, mask)));
      }
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
      for (int64_t h = 0; h < count; ++h, head += dim) {
        for (int64_t i = 0; i < half; i += LANES) {
          const __mmask16 mask = lanes(half - i);
          const __m512 a = load(head + i, mask), b = load(head + half + i, mask);
          const __m512 first = _mm512_mul_ps(b, load(s + i, mask));
          const __m512 second = _mm512_mul_ps(a, load(s + half + i, mask));
          store(head + i, mask, _mm512_fmsub_ps(a, load(c + i, mask), first));
          store(head + half + i, mask, _mm512_fmadd_ps(b, load(c + half + i, mask), second));
        }
      }
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(radixkv, library) {
  library.def(
      "add_rms_norm(Tensor hidden, Tensor? added, float alpha, Tensor weight, float eps) "
      "-> (Tensor, Tensor)");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def("rotate_(Tensor(a!) heads, Tensor cos, Tensor sin) -> ()");
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(radixkv, CPU, library) {
  library.impl("add_rms_norm", &add_rms_norm);
  library.impl("silu_mul", &silu_mul);
  library.impl("rotate_", &rotate_);
  library.impl("write_kv", &write_kv);
}
