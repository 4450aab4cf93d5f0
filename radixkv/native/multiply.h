// Products of few rows with a weight that lies in tiles, so that it is read once and in order.
//
// A packed weight (outputs, inputs) is bfloat16 [outputs / 16][inputs / 32][16][32]: for 16 outputs
// after each other, tiles whose row r holds inputs 2r and 2r + 1 of each output.

#pragma once

#include <cstdint>
#include <cstring>

#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace radixkv {

constexpr int64_t TILE_VALUES = TILE * PAIR;
constexpr int64_t ROWS_AT_ONCE = 2 * TILE;  // rows that one pass over a weight serves
constexpr int64_t ROWS_IN_CACHE = 256;      // rows that are kept near while weights pass by
constexpr int64_t AHEAD = 8;                // tiles of a weight that are fetched early

struct Weight {
  const bf16* tiles;
  int64_t outputs, inputs;
  const bf16* column(int64_t index) const { return tiles + index * TILE * inputs; }
};

// sums (16 R, 32) = 16 R rows of x times 16 outputs of each column.
template <int R>
inline void multiply_tiles(
    const bf16* x, int64_t x_stride, const bf16* const* columns, int64_t inputs, bool fetch,
    float* sums) {
  constexpr int64_t WIDTH = 2 * TILE, TO = WIDTH * sizeof(float);
  const int64_t bytes = x_stride * static_cast<int64_t>(sizeof(bf16));
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (R > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < inputs; k += PAIR) {
    if (fetch) {
      for (int c = 0; c < 2; ++c) {
        const bf16* ahead = columns[c] + k * TILE + AHEAD * TILE_VALUES;
        for (int line = 0; line < TILE; ++line) _mm_prefetch(ahead + line * PAIR, _MM_HINT_T1);
      }
    }
    _tile_loadd(4, x + k, bytes);
    if constexpr (R > 1) _tile_loadd(5, x + k + TILE * x_stride, bytes);
    _tile_loadd(6, columns[0] + k * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, columns[1] + k * TILE, 64);
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

// Rows times 32 outputs, of which two columns hold 16 each: finish(row, sums) for each row.
template <typename Finish>
void multiply_pair(
    const bf16* x, int64_t x_stride, const bf16* const* columns, int64_t inputs, int64_t rows,
    const Finish& finish) {
  constexpr int64_t WIDTH = 2 * TILE;
  alignas(64) float sums[ROWS_AT_ONCE * WIDTH];
  for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
    const bf16* from = x + row * x_stride;
    const int64_t left = std::min(rows - row, ROWS_AT_ONCE);
    if (left <= TILE) {
      multiply_tiles<1>(from, x_stride, columns, inputs, row == 0, sums);
    } else {
      multiply_tiles<2>(from, x_stride, columns, inputs, row == 0, sums);
    }
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
      const bf16* columns[] = {weight.column(pair * step), weight.column(pair * step + apart)};
      multiply_pair(
          x + first * x_stride, x_stride, columns, weight.inputs,
          std::min(rows - first, ROWS_IN_CACHE),
          [&](int64_t row, const float* sums) { finish(first + row, pair, sums); });
    }
  });
}

}  // namespace radixkv
