// The two products of attention, and what turns the one's results into the other's input.
//
// Query rows lie side by side in the lanes of vectors, keys below each other: keys are read as they
// lie in their blocks, a maximum or a sum over keys never crosses a vector, and weights come out in
// the order in which the next product reads them. Accumulation is in float32.

#pragma once

#include <algorithm>

#include "tasks.h"

namespace radixkv {

constexpr int64_t SQUARE = TILE * TILE;      // values of a tile of float32
constexpr int64_t DOUBLE = TILE * PAIR;      // values of a tile of bfloat16
constexpr int64_t LINE = PAIR * sizeof(bf16);

// Sixteen rows side by side: tiles of (dimension pairs, rows).
inline void pack_rows(const bf16* const* rows, int64_t dim, bf16* packed) {
  for (int64_t d = 0; d < dim; d += PAIR, packed += DOUBLE) {
    __m512i block[TILE];
    for (int i = 0; i < TILE; ++i) block[i] = _mm512_loadu_si512(rows[i] + d);
    transpose(block);
    for (int i = 0; i < TILE; ++i) _mm512_store_si512(packed + i * PAIR, block[i]);
  }
}

// Values turned round: for every PAIR keys, tiles of (dimensions, keys).
inline void pack_values(const bf16* const* rows, int64_t count, int64_t dim, bf16* packed) {
  alignas(64) uint16_t even[PAIR], odd[PAIR];
  for (int i = 0; i < PAIR; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  const __m512i take_even = _mm512_load_si512(even), take_odd = _mm512_load_si512(odd);
  for (int64_t key = 0; key < count; key += PAIR) {
    for (int64_t d = 0; d < dim; d += PAIR, packed += 2 * DOUBLE) {
      __m512i low[TILE], high[TILE];
      for (int i = 0; i < TILE; ++i) low[i] = _mm512_loadu_si512(rows[key + i] + d);
      for (int i = 0; i < TILE; ++i) high[i] = _mm512_loadu_si512(rows[key + TILE + i] + d);
      transpose(low);
      transpose(high);
      for (int i = 0; i < TILE; ++i) {
        const __m512i first = _mm512_permutex2var_epi16(low[i], take_even, high[i]);
        const __m512i second = _mm512_permutex2var_epi16(low[i], take_odd, high[i]);
        _mm512_store_si512(packed + 2 * i * PAIR, first);
        _mm512_store_si512(packed + (2 * i + 1) * PAIR, second);
      }
    }
  }
}

// Tiles of sixteen keys of one head.
struct Keys {
  const bf16* tiles[CHUNK / TILE];
  int64_t bytes;  // from a key to the next
};

// scores = keys x a tile of rows, for count keys rounded up to four tiles.
inline void score(const Keys& keys, const bf16* query, int64_t count, int64_t dim, float* scores) {
  for (int64_t key = 0; key < count; key += 4 * TILE, scores += 4 * SQUARE) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* const* from = keys.tiles + key / TILE;
    for (int64_t d = 0; d < dim; d += PAIR) {
      _tile_loadd(6, query + d * TILE, LINE);
      _tile_loadd(4, from[0] + d, keys.bytes);
      _tile_loadd(5, from[1] + d, keys.bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, from[2] + d, keys.bytes);
      _tile_loadd(5, from[3] + d, keys.bytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, scores, LINE);
    _tile_stored(1, scores + SQUARE, LINE);
    _tile_stored(2, scores + 2 * SQUARE, LINE);
    _tile_stored(3, scores + 3 * SQUARE, LINE);
  }
}

// out += values x weights, for two or four tiles of dimensions.
template <int TILES>
inline void accumulate_tiles(
    const bf16* values, const bf16* weights, int64_t count, int64_t dim, float* out) {
  _tile_loadd(0, out, LINE);
  _tile_loadd(1, out + SQUARE, LINE);
  if constexpr (TILES == 4) {
    _tile_loadd(2, out + 2 * SQUARE, LINE);
    _tile_loadd(3, out + 3 * SQUARE, LINE);
  }
  for (int64_t key = 0; key < count; key += PAIR) {
    const bf16* tile = values + key * dim;
    _tile_loadd(6, weights + key * TILE, LINE);
    _tile_loadd(4, tile, LINE);
    _tile_loadd(5, tile + DOUBLE, LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (TILES == 4) {
      _tile_loadd(4, tile + 2 * DOUBLE, LINE);
      _tile_loadd(5, tile + 3 * DOUBLE, LINE);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, out, LINE);
  _tile_stored(1, out + SQUARE, LINE);
  if constexpr (TILES == 4) {
    _tile_stored(2, out + 2 * SQUARE, LINE);
    _tile_stored(3, out + 3 * SQUARE, LINE);
  }
}

// out += values x weights; (dim, 16).
inline void accumulate(
    const bf16* values, const bf16* weights, int64_t count, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 2 * PAIR <= dim; d += 2 * PAIR)
    accumulate_tiles<4>(values + d * PAIR, weights, count, dim, out + d * TILE);
  if (d < dim) accumulate_tiles<2>(values + d * PAIR, weights, count, dim, out + d * TILE);
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

}  // namespace radixkv
