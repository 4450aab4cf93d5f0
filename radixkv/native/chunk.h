// The two products of attention with AMX, and the orders in which they read.
//
// Keys are read as they lie in their blocks, and scores are (keys, rows). Of values and weights one
// has to be turned round for the second product: values, once for all tiles of rows, or weights, where
// there are so few rows that this is less. Accumulation is in float32.

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

// Values as they are, two keys' side by side: for every PAIR keys, tiles of (key pairs, dimensions). Of 32
// dimensions those in even quarters of a vector's lanes come first, then those in odd ones.
template <typename Between>
inline void interleave_values(
    const bf16* const* rows, int64_t count, int64_t dim, bf16* packed, const Between& between) {
  for (int64_t key = 0; key < count; key += PAIR) {
    for (int64_t d = 0; d < dim; d += PAIR, packed += 2 * DOUBLE) {
      between();
      for (int i = 0; i < TILE; ++i) {
        const __m512i even = _mm512_loadu_si512(rows[key + 2 * i] + d);
        const __m512i odd = _mm512_loadu_si512(rows[key + 2 * i + 1] + d);
        _mm512_store_si512(packed + i * PAIR, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(packed + DOUBLE + i * PAIR, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }
}

// Tiles of (key pairs, rows) become tiles of (rows, keys), where they lie.
inline void turn_weights(int64_t count, bf16* weights) {
  for (int64_t key = 0; key < count; key += PAIR, weights += DOUBLE) {
    __m512i block[TILE];
    for (int i = 0; i < TILE; ++i) block[i] = _mm512_load_si512(weights + i * PAIR);
    transpose(block);
    for (int i = 0; i < TILE; ++i) _mm512_store_si512(weights + i * PAIR, block[i]);
  }
}

// Tiles of sixteen keys of one head.
struct Keys {
  const bf16* tiles[CHUNK / TILE];
  int64_t bytes;  // from a key to the next
};

// Scores of two or four tiles of keys are gathered in tiles of float32: first zeros,
template <int TILES>
inline void begin_scores() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TILES == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// then keys x a tile of rows,
template <int TILES, typename Between>
inline void add_scores(
    const Keys& keys, const bf16* query, int64_t dim, const Between& between) {
  for (int64_t d = 0; d < dim; d += PAIR) {
    between();
    _tile_loadd(6, query + d * TILE, LINE);
    _tile_loadd(4, keys.tiles[0] + d, keys.bytes);
    _tile_loadd(5, keys.tiles[1] + d, keys.bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (TILES == 4) {
      _tile_loadd(4, keys.tiles[2] + d, keys.bytes);
      _tile_loadd(5, keys.tiles[3] + d, keys.bytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
}

// and in the end they are (keys, rows).
template <int TILES>
inline void end_scores(float* scores) {
  _tile_stored(0, scores, LINE);
  _tile_stored(1, scores + SQUARE, LINE);
  if constexpr (TILES == 4) {
    _tile_stored(2, scores + 2 * SQUARE, LINE);
    _tile_stored(3, scores + 3 * SQUARE, LINE);
  }
}

// Which of two is turned round: the result is (dimensions, rows) or (rows, dimensions).
enum class Turned { values, weights };

// out += values x weights, or out = that if nothing was there; two or four tiles of dimensions.
template <int TILES, Turned turned>
inline void accumulate_tiles(
    const bf16* values, const bf16* weights, int64_t count, int64_t dim, bool first, float* out) {
  if (first) {
    begin_scores<TILES>();
  } else {
    _tile_loadd(0, out, LINE);
    _tile_loadd(1, out + SQUARE, LINE);
    if constexpr (TILES == 4) {
      _tile_loadd(2, out + 2 * SQUARE, LINE);
      _tile_loadd(3, out + 3 * SQUARE, LINE);
    }
  }
  for (int64_t key = 0; key < count; key += PAIR) {
    const bf16* tile = values + key * dim;
    _tile_loadd(6, weights + key * TILE, LINE);
    _tile_loadd(4, tile, LINE);
    _tile_loadd(5, tile + DOUBLE, LINE);
    if constexpr (turned == Turned::values) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    } else {
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
    }
    if constexpr (TILES == 4) {
      _tile_loadd(4, tile + 2 * DOUBLE, LINE);
      _tile_loadd(5, tile + 3 * DOUBLE, LINE);
      if constexpr (turned == Turned::values) {
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
      } else {
        _tile_dpbf16ps(2, 6, 4);
        _tile_dpbf16ps(3, 6, 5);
      }
    }
  }
  end_scores<TILES>(out);
}

template <Turned turned>
inline void accumulate(
    const bf16* values, const bf16* weights, int64_t count, int64_t dim, bool first, float* out) {
  int64_t d = 0;
  for (; d + 2 * PAIR <= dim; d += 2 * PAIR)
    accumulate_tiles<4, turned>(values + d * PAIR, weights, count, dim, first, out + d * TILE);
  if (d < dim)
    accumulate_tiles<2, turned>(values + d * PAIR, weights, count, dim, first, out + d * TILE);
}

}  // namespace radixkv
