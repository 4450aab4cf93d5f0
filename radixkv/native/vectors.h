// Sixteen values at a time: bfloat16 and float32 in memory, float32 in registers.

#pragma once

#include <ATen/core/Tensor.h>
#include <immintrin.h>

#include <cstdint>

namespace radixkv {

using bf16 = at::BFloat16;

constexpr int LANES = 16;

inline __mmask16 lanes(int64_t left) {
  return left >= LANES ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline __m512 load(const bf16* from, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* to, __mmask16 mask, __m512 value) { _mm512_mask_storeu_ps(to, mask, value); }

inline void store(bf16* to, __mmask16 mask, __m512 value) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

// As if stored and loaded again.
inline __m512 rounded(__m512 value, const float*) { return value; }

inline __m512 rounded(__m512 value, const bf16*) {
  const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// 2 to the power of x, within 3e-6 of it; 0 where that is no normal number, NaN for NaN.
inline __m512 exp2_of(__m512 x) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(9.5700994e-3f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5917859e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.24024744f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.69312179f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.99999928f));
  return _mm512_maskz_scalef_ps(kept, y, whole);
}

// The same within 8e-5 of it, which is more than a bfloat16 can tell, at half the cost.
inline __m512 exp2_roughly(__m512 x) {
  const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 y = _mm512_set1_ps(7.802454e-2f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.2260672f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.69583349f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.99992523f));
  return _mm512_scalef_ps(y, x);
}

}  // namespace radixkv
