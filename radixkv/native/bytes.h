// Columns of int8 weights, which become bfloat16 or float32 as they are read; both hold every int8.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "arena.h"
#include "tiles.h"
#include "vectors.h"

namespace radixkv {

constexpr int64_t TILE_VALUES = TILE * PAIR;
constexpr int64_t BYTES_AHEAD = 2048;  // of a column, fetched early
constexpr int64_t RING = 4;            // tiles of a column that are expanded at one time

// Sixteen bytes as numbers.
inline __m512 wide(const int8_t* from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Fetch the line that is wanted some time after this one. One at a time between other work: many at
// once take all places for lines under way, and what is near has to wait for them too.
inline void fetch_after(const int8_t* from) { _mm_prefetch(from + BYTES_AHEAD, _MM_HINT_T1); }

inline void expand_tile(const int8_t* from, bf16* to) {
  for (int row = 0; row < TILE; ++row, from += PAIR, to += PAIR) {
    if (row % 2 == 0) fetch_after(from);
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(wide(from + LANES), wide(from)));
  }
}

// Two columns whose tiles are expanded one step before they are wanted.
struct Bytes {
  const int8_t* columns[2];
  bf16* room[2];  // for a ring of tiles, or for all of them to stay
  float* rows;    // two rows of inputs
  int64_t mask;   // of an input's number in the room

  void make_room(int64_t inputs, bool stay) {
    static thread_local Arena arena;
    const int64_t size = stay ? TILE * inputs : RING * TILE_VALUES;
    arena.reserve(2 * Arena::size_of<bf16>(size) + Arena::size_of<float>(2 * inputs));
    for (bf16*& each : room) each = arena.take<bf16>(size);
    rows = arena.take<float>(2 * inputs);
    mask = stay ? -1 : RING * PAIR - 1;
  }
  void begin() const { expand(0); }
  void before(int64_t k, int64_t inputs) const {
    if (k + PAIR < inputs) expand(k + PAIR);
  }
  void expand(int64_t k) const {
    for (int c = 0; c < 2; ++c)
      expand_tile(columns[c] + k * TILE, room[c] + (k & mask) * TILE);
  }
  const bf16* tile(int c, int64_t k) const { return room[c] + (k & mask) * TILE; }
};

// sums (R, 32) = R rows of x times two columns: without tiles, which so few rows do not pay for.
template <int R>
inline void multiply_few(
    const bf16* x, int64_t x_stride, const Bytes& bytes, int64_t inputs, float* sums) {
  for (int r = 0; r < R; ++r) {
    for (int64_t i = 0; i < inputs; i += LANES)
      _mm512_store_ps(bytes.rows + r * inputs + i, load(x + r * x_stride + i, 0xffff));
  }
  __m512 sum[R][2][2] = {};  // of two inputs for each of eight outputs
  for (int64_t k = 0; k < inputs; k += 2) {
    for (int c = 0; c < 2; ++c) {
      const int8_t* from = bytes.columns[c] + k * TILE;
      if (k % 4 == 0) fetch_after(from);
      for (int half = 0; half < 2; ++half) {
        const __m512 weights = wide(from + half * LANES);
        for (int r = 0; r < R; ++r) {
          const __m128i both = _mm_loadl_epi64(
              reinterpret_cast<const __m128i*>(bytes.rows + r * inputs + k));
          const __m512 two = _mm512_castsi512_ps(_mm512_broadcastq_epi64(both));
          sum[r][c][half] = _mm512_fmadd_ps(weights, two, sum[r][c][half]);
        }
      }
    }
  }
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) {
      const __m512 low = sum[r][c][0], high = sum[r][c][1];
      const __m512 one = _mm512_permutex2var_ps(low, even, high);
      const __m512 other = _mm512_permutex2var_ps(low, odd, high);
      _mm512_store_ps(sums + (2 * r + c) * TILE, _mm512_add_ps(one, other));
    }
  }
}

}  // namespace radixkv
