// Scores of a chunk become weights. Query rows lie in the lanes of vectors, keys below each other, so a
// maximum or a sum over keys never crosses a vector.

#pragma once

#include <algorithm>

#include "merge.h"

namespace radixkv {

// Scores of keys that a row does not see.
inline void hide(const int32_t* begins, const int32_t* ends, int64_t start, int64_t used, float* scores) {
  const __m512i begin = _mm512_loadu_si512(begins), end = _mm512_loadu_si512(ends);
  const int64_t all_begun = std::clamp<int64_t>(_mm512_reduce_max_epi32(begin) - start, 0, used);
  const int64_t none_ended = std::clamp<int64_t>(_mm512_reduce_min_epi32(end) - start, 0, used);
  const auto blend = [&](int64_t key) {
    const __m512i at = _mm512_set1_epi32(static_cast<int32_t>(start + key));
    const __mmask16 seen = _mm512_cmple_epi32_mask(begin, at) & _mm512_cmpgt_epi32_mask(end, at);
    float* score = scores + key * TILE;
    _mm512_store_ps(score, _mm512_mask_blend_ps(seen, _mm512_set1_ps(NONE), _mm512_load_ps(score)));
  };
  for (int64_t key = 0; key < all_begun; ++key) blend(key);
  for (int64_t key = std::max(all_begun, none_ended); key < used; ++key) blend(key);
}

inline __m512 maxima(const float* scores, int64_t used) {
  __m512 top[4];
  for (int i = 0; i < 4; ++i) top[i] = _mm512_load_ps(scores + i * TILE);
  for (int64_t key = 4; key < used; key += 4)
    for (int i = 0; i < 4; ++i)
      top[i] = _mm512_max_ps(top[i], _mm512_load_ps(scores + (key + i) * TILE));
  return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

alignas(64) constexpr uint16_t SIDE_BY_SIDE[PAIR] = {
    0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Scores become weights, 2 to the power of how far they lie below the base; their sum.
inline __m512 exponentials(const float* scores, int64_t used, __m512 factor, __m512 base, bf16* weights) {
  constexpr int PAIRS = 4;  // pairs of keys side by side, so that none waits for itself
  const __m512i order = _mm512_load_si512(SIDE_BY_SIDE);
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  for (int64_t key = 0; key < used; key += 2 * PAIRS) {
    const float* from = scores + key * TILE;
    __m512 own[2 * PAIRS];
    for (int i = 0; i < 2 * PAIRS; ++i)
      own[i] = _mm512_fmsub_ps(_mm512_load_ps(from + i * TILE), factor, base);
    for (int i = 0; i < 2 * PAIRS; ++i) own[i] = exp2_roughly(own[i]);
    for (int i = 0; i < 2 * PAIRS; i += 2) {
      even = _mm512_add_ps(even, own[i]);
      odd = _mm512_add_ps(odd, own[i + 1]);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(own[i + 1], own[i]);
      _mm512_store_si512(
          weights + (key + i) * TILE, _mm512_permutexvar_epi16(order, both));
    }
  }
  return _mm512_add_ps(even, odd);
}

// What earlier results of sixteen rows are to be multiplied by, where `grown` has a bit.
struct Shrink {
  __mmask16 grown;
  __m512 factors;
};

// A tile of rows' scores become weights: tiles of (key pairs, rows).
inline Shrink soften(
    const float* scores, int64_t used, float scale, float* tops, float* totals, bf16* weights) {
  const __m512 factor = _mm512_set1_ps(scale), before = _mm512_load_ps(tops);
  // Of scaled scores; a scale is positive.
  const __m512 now = _mm512_max_ps(before, _mm512_mul_ps(maxima(scores, used), factor));
  Shrink shrink{_mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ), _mm512_set1_ps(1.f)};
  __m512 total = _mm512_load_ps(totals);
  if (shrink.grown != 0) {
    shrink.factors = _mm512_mask_blend_ps(
        shrink.grown, shrink.factors, exp2_of(_mm512_sub_ps(before, now)));
    total = _mm512_mul_ps(total, shrink.factors);
    _mm512_store_ps(tops, now);
  }
  const __mmask16 nothing = _mm512_cmp_ps_mask(now, _mm512_set1_ps(NONE), _CMP_EQ_OQ);
  const __m512 base = _mm512_mask_blend_ps(nothing, now, _mm512_setzero_ps());
  _mm512_store_ps(totals, _mm512_add_ps(total, exponentials(scores, used, factor, base, weights)));
  return shrink;
}

}  // namespace radixkv
