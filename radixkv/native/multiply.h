// Products of few rows with a weight that lies in tiles, so that it is read once and in order.
//
// A packed weight (outputs, inputs) is [outputs / 16][inputs / 32][16][32]: for 16 outputs after each
// other, tiles whose row r holds inputs 2r and 2r + 1 of each output. It is bfloat16, or int8 with a
// float32 scale for each output.

#pragma once

#include <cstdint>
#include <cstring>

#include "bytes.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace radixkv {

constexpr int64_t ROWS_AT_ONCE = 2 * TILE;  // rows that one pass over a weight serves
constexpr int64_t ROWS_IN_CACHE = 256;      // rows that are kept near while weights pass by
constexpr int64_t AHEAD = 8;                // tiles of a weight that are fetched early

struct Weight {
  const bf16* tiles;    // either these,
  const int8_t* bytes;  // or these with their
  const float* scales;  // scales
  int64_t outputs, inputs;
};

// Two columns of tiles that are read where they lie.
struct Tiles {
  const bf16* columns[2];
  bool fetch;  // They come from memory.
  void begin() const {}
  void before(int64_t k, int64_t) const {
    if (!fetch) return;
    for (int c = 0; c < 2; ++c) {
      const bf16* ahead = columns[c] + k * TILE + AHEAD * TILE_VALUES;
      for (int line = 0; line < TILE; ++line) _mm_prefetch(ahead + line * PAIR, _MM_HINT_T1);
    }
  }
  const bf16* tile(int c, int64_t k) const { return columns[c] + k * TILE; }
};

// sums (16 R, 32) = 16 R rows of x times 16 outputs of each column.
template <int R, typename Columns>
inline void multiply_tiles(
    const bf16* x, int64_t x_stride, const Columns& columns, int64_t inputs, float* sums) {
  constexpr int64_t WIDTH = 2 * TILE, TO = WIDTH * sizeof(float);
  const int64_t bytes = x_stride * static_cast<int64_t>(sizeof(bf16));
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (R > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  columns.begin();
  for (int64_t k = 0; k < inputs; k += PAIR) {
    columns.before(k, inputs);
    _tile_loadd(4, x + k, bytes);
    if constexpr (R > 1) _tile_loadd(5, x + k + TILE * x_stride, bytes);
    _tile_loadd(6, columns.tile(0, k), 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, columns.tile(1, k), 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (R > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, TO);
  _tile_stored(1, sums + TILE, TO);
  if constexpr (R > 1) {
    _tile_stored(2, sums + TILE * WIDTH, TO);
    _tile_stored(3, sums + TILE * WIDTH + TILE, TO);
  }
}

template <typename Columns>
inline void multiply_rows(
    const bf16* x, int64_t x_stride, const Columns& columns, int64_t inputs, int64_t rows,
    float* sums) {
  if (rows <= TILE) {
    multiply_tiles<1>(x, x_stride, columns, inputs, sums);
  } else {
    multiply_tiles<2>(x, x_stride, columns, inputs, sums);
  }
}

// The same over bytes, which all rows are waiting for.
inline void multiply_bytes(
    const bf16* x, int64_t x_stride, const Bytes& bytes, int64_t inputs, int64_t rows,
    float* sums) {
  if (rows == 1) {
    multiply_few<1>(x, x_stride, bytes, inputs, sums);
  } else if (rows == 2) {
    multiply_few<2>(x, x_stride, bytes, inputs, sums);
  } else {
    multiply_rows(x, x_stride, bytes, inputs, rows, sums);
  }
}

// sums (rows, 32) by the scales of two columns.
inline void scale_rows(const float* first, const float* second, int64_t rows, float* sums) {
  const __m512 one = _mm512_loadu_ps(first), other = _mm512_loadu_ps(second);
  for (int64_t row = 0; row < rows; ++row, sums += 2 * TILE) {
    _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), one));
    _mm512_store_ps(sums + TILE, _mm512_mul_ps(_mm512_load_ps(sums + TILE), other));
  }
}

// Rows times 32 outputs, of which two columns hold 16 each: finish(row, sums) for each row.
template <typename Finish>
void multiply_pair(
    const bf16* x, int64_t x_stride, const Weight& weight, const int64_t* columns, int64_t rows,
    const Finish& finish) {
  constexpr int64_t WIDTH = 2 * TILE;
  alignas(64) float sums[ROWS_AT_ONCE * WIDTH];
  const int64_t inputs = weight.inputs;
  const int64_t first = columns[0] * TILE, second = columns[1] * TILE;
  const bool in_bytes = weight.bytes != nullptr;
  Tiles tiles{};
  Bytes bytes{};
  if (in_bytes) {
    bytes.columns[0] = weight.bytes + first * inputs;
    bytes.columns[1] = weight.bytes + second * inputs;
    bytes.make_room(inputs, rows > ROWS_AT_ONCE);
    tiles = {{bytes.room[0], bytes.room[1]}, false};
  } else {
    tiles = {{weight.tiles + first * inputs, weight.tiles + second * inputs}, true};
  }
  for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
    const bf16* from = x + row * x_stride;
    const int64_t left = std::min(rows - row, ROWS_AT_ONCE);
    if (in_bytes && row == 0) {
      multiply_bytes(from, x_stride, bytes, inputs, left, sums);
    } else {
      multiply_rows(from, x_stride, tiles, inputs, left, sums);
      tiles.fetch = false;
    }
    if (in_bytes) scale_rows(weight.scales + first, weight.scales + second, left, sums);
    for (int64_t r = 0; r < left; ++r) finish(row + r, sums + r * WIDTH);
  }
}

// One thread's part in a product with a whole weight; rows of x must be there up to a multiple of
// 16. Pair number i has the columns i * step and i * step + apart: finish(row, i, sums).
template <typename Finish>
void multiply(
    const Member& member, Portions& portions, const bf16* x, int64_t x_stride, const Weight& weight,
    int64_t step, int64_t apart, int64_t rows, const Finish& finish) {
  const int64_t pairs = weight.outputs / (2 * TILE);
  const int64_t blocks = (rows + ROWS_IN_CACHE - 1) / ROWS_IN_CACHE;
  const int64_t portion = std::max<int64_t>(1, blocks * pairs / (member.size * 8));
  portions.deal(blocks * pairs, portion, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t pair = index % pairs, first = index / pairs * ROWS_IN_CACHE;
      const int64_t columns[] = {pair * step, pair * step + apart};
      multiply_pair(
          x + first * x_stride, x_stride, weight, columns, std::min(rows - first, ROWS_IN_CACHE),
          [&](int64_t row, const float* sums) { finish(first + row, pair, sums); });
    }
  });
}

}  // namespace radixkv
