// One task of many query rows: values are turned round, once for all tiles of a head's rows.

#pragma once

#include "gather.h"
#include "softmax.h"

namespace radixkv {

// Which keys each row of a head sees; rows that are none see what the last one sees.
inline void find_ranges(const Inputs& in, const Task& task, Scratch& s) {
  int64_t row = 0;
  for (int64_t token = task.token; token < task.token + task.tokens; ++token)
    for (int64_t group = 0; group < in.groups; ++group, ++row) {
      s.begins[row] = static_cast<int32_t>(std::max(in.first[token], task.first_key));
      s.ends[row] = static_cast<int32_t>(std::min(in.positions[token] + 1, task.end_key));
    }
  for (; row % TILE != 0; ++row) {
    s.begins[row] = s.begins[row - 1];
    s.ends[row] = s.ends[row - 1];
  }
}

// All KV heads' queries of a task; zeros up to a whole tile.
inline void load_query(const Inputs& in, const Task& task, Scratch& s) {
  const int64_t rows = task.tokens * in.groups;
  bf16* to = s.query;
  for (int64_t head = task.head; head < task.end_head; ++head) {
    for (int64_t row = 0; row < rows; row += TILE, to += TILE * in.key_dim) {
      const bf16* from[TILE];
      int64_t token = task.token + row / in.groups, group = row % in.groups;
      for (int64_t i = 0; i < TILE; ++i) {
        from[i] = row + i < rows
            ? in.query + token * in.query_token + (head * in.groups + group) * in.query_head
            : ZEROS;
        if (++group == in.groups) {
          group = 0;
          ++token;
        }
      }
      pack_rows(from, in.key_dim, to);
    }
  }
}

// Attend from a tile of a head's rows to one chunk. `place` is the first of them in the buffers.
inline void attend_tile(
    const Inputs& in, const Keys& keys, int64_t start, int64_t count, int64_t row, int64_t place,
    Scratch& s) {
  const int32_t *begins = s.begins + row, *ends = s.ends + row;
  const int64_t last = _mm512_reduce_max_epi32(_mm512_loadu_si512(ends)) - start;
  const int64_t reach = std::min(count, last);
  if (reach <= 0 || _mm512_reduce_min_epi32(_mm512_loadu_si512(begins)) >= start + count) return;
  const int64_t used = (reach + PAIR - 1) / PAIR * PAIR;
  begin_scores<4>();
  add_scores<4>(keys, s.query + place * in.key_dim, in.key_dim, [] {});
  end_scores<4>(s.scores);
  hide(begins, ends, start, used, s.scores);
  float* out = s.out + place * in.value_dim;
  const Shrink shrink =
      soften(s.scores, used, in.scale, s.tops + place, s.totals + place, s.weights);
  if (shrink.grown != 0)
    for (int64_t d = 0; d < in.value_dim; ++d)
      _mm512_store_ps(out + d * TILE, _mm512_mul_ps(shrink.factors, _mm512_load_ps(out + d * TILE)));
  accumulate<Turned::values>(s.values, s.weights, used, in.value_dim, false, out);
}

// A task's result, turned back: for each head and row its dimensions.
inline void write_out(const Inputs& in, const Task& task, const Scratch& s, float* out, Sums* sums) {
  const int64_t rows = task.tokens * in.groups, heads = task.end_head - task.head;
  const int64_t dim = in.value_dim;
  for (int64_t head = 0; head < heads; ++head, out += rows * dim, sums += rows) {
    for (int64_t row = 0; row < rows; row += TILE) {
      const int64_t place = head * padded(rows) + row, count = std::min<int64_t>(TILE, rows - row);
      for (int64_t d = 0; d < dim; d += TILE) {
        const float* from = s.out + place * dim + d * TILE;
        __m512i block[TILE];
        for (int i = 0; i < TILE; ++i) block[i] = _mm512_load_si512(from + i * TILE);
        transpose(block);
        for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(out + (row + i) * dim + d, block[i]);
      }
      for (int64_t i = 0; i < count; ++i) sums[row + i] = {s.tops[place + i], s.totals[place + i]};
    }
  }
}

inline void run_wide(
    const Inputs& in, const Task& task, const Task* following, bool fetched, Scratch& s, float* out,
    Sums* sums) {
  const int64_t rows = padded(task.tokens * in.groups), heads = task.end_head - task.head;
  load_query(in, task, s);
  find_ranges(in, task, s);
  std::fill_n(s.out, heads * rows * in.value_dim, 0.f);
  std::fill_n(s.tops, heads * rows, NONE);
  std::fill_n(s.totals, heads * rows, 0.f);
  const auto attend = [&](int64_t start, const Rows& now, Ahead& ahead) {
    for (int64_t head = 0; head < heads; ++head) {
      const Keys keys = keys_of(in, task, head, start, now, s);
      const bf16* own[CHUNK];
      pack_values(own, find_values(in, head, now, own), in.value_dim, s.values);
      for (int64_t row = 0; row < rows; row += TILE) {
        attend_tile(in, keys, start, now.count, row, head * rows + row, s);
        ahead.step();
      }
    }
  };
  walk(in, task, following, fetched, heads * rows / TILE, s, attend);
  write_out(in, task, s, out, sums);
}

}  // namespace radixkv
