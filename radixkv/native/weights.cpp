// Weights in int8 tiles as plain ones, for products that are better made from those.

#ifdef __AMX_BF16__

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bytes.h"

namespace {

using namespace radixkv;

// Sixteen outputs by 32 inputs, scaled: rows of `to` lie `stride` values apart.
void dequantize_tile(const int8_t* from, const float* scales, bf16* to, int64_t stride) {
  const __m512 scale = _mm512_loadu_ps(scales);
  // A row of a tile has two inputs of each output after each other.
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 first = _mm512_permutexvar_ps(low, scale);
  const __m512 second = _mm512_permutexvar_ps(high, scale);
  __m512i rows[TILE];
  for (int row = 0; row < TILE; ++row) {
    const int8_t* pairs = from + row * PAIR;
    const __m512 later = _mm512_mul_ps(wide(pairs + LANES), second);
    rows[row] = (__m512i)_mm512_cvtne2ps_pbh(later, _mm512_mul_ps(wide(pairs), first));
  }
  transpose(rows);
  for (int row = 0; row < TILE; ++row) _mm512_storeu_si512(to + row * stride, rows[row]);
}

// A weight (outputs / 16, inputs / 32, 16, 32) as bfloat16 (outputs, inputs).
at::Tensor dequantize(const at::Tensor& weight, const at::Tensor& scales) {
  TORCH_CHECK(weight.scalar_type() == at::kChar && weight.is_contiguous(), "weight");
  TORCH_CHECK(weight.dim() == 4 && weight.size(2) == TILE && weight.size(3) == PAIR, "weight");
  const int64_t columns = weight.size(0), inputs = weight.size(1) * PAIR;
  TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.is_contiguous(), "scales");
  TORCH_CHECK(scales.numel() == columns * TILE, "a scale for each output");
  at::Tensor out = at::empty({columns * TILE, inputs}, weight.options().dtype(at::kBFloat16));
  const int8_t* from = weight.const_data_ptr<int8_t>();
  const float* scale = scales.const_data_ptr<float>();
  bf16* to = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, columns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      for (int64_t k = 0; k < inputs; k += PAIR) {
        dequantize_tile(
            from + (column * inputs + k) * TILE, scale + column * TILE,
            to + column * TILE * inputs + k, inputs);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(radixkv, library) {
  library.def("dequantize(Tensor weight, Tensor scales) -> Tensor");
}

TORCH_LIBRARY_IMPL(radixkv, CPU, library) { library.impl("dequantize", &dequantize); }

#endif  // __AMX_BF16__
