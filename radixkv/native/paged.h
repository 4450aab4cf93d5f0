// Paged attention on CPUs with AMX: one task, chunk by chunk, to its partial result.

#pragma once

#include <cstring>

#include "chunk.h"
#include "merge.h"
#include "team.h"

namespace radixkv {

// Where a chunk's keys and values lie, for a task's first KV head.
struct Rows {
  const bf16 *keys[CHUNK], *values[CHUNK];
  int64_t count;
};

// One thread's buffers. Query rows are in tiles of 16.
struct Scratch {
  alignas(64) bf16 query[MAX_ROWS * MAX_DIM];   // tiles of (dimension pairs, rows)
  alignas(64) bf16 keys[CHUNK * MAX_DIM];       // one head's, where blocks hold no whole tiles
  alignas(64) bf16 values[CHUNK * MAX_DIM];     // for every PAIR keys: tiles of (dimensions, keys)
  alignas(64) float scores[CHUNK * TILE];       // (keys, rows)
  alignas(64) bf16 weights[CHUNK * TILE];       // tiles of (key pairs, rows)
  alignas(64) float out[MAX_ROWS * MAX_DIM];    // for every tile of rows: (dimensions, rows)
  alignas(64) float tops[MAX_ROWS], totals[MAX_ROWS];
  alignas(64) int32_t begins[MAX_ROWS], ends[MAX_ROWS];  // the keys that each row of a head sees
  Rows rows[2];
};

inline Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

alignas(64) inline const bf16 ZEROS[MAX_DIM] = {};

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

// A tile of rows' scores become weights; earlier results of a row shrink where its top grows.
inline void soften(
    const float* scores, int64_t used, float scale, float* tops, float* totals, bf16* weights,
    float* out, int64_t dim) {
  const __m512 factor = _mm512_set1_ps(scale), before = _mm512_load_ps(tops);
  // Of scaled scores; a scale is positive.
  const __m512 now = _mm512_max_ps(before, _mm512_mul_ps(maxima(scores, used), factor));
  const __mmask16 grown = _mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ);
  __m512 total = _mm512_load_ps(totals);
  if (grown != 0) {
    const __m512 shrink = _mm512_mask_blend_ps(
        grown, _mm512_set1_ps(1.f), exp2_of(_mm512_sub_ps(before, now)));
    total = _mm512_mul_ps(total, shrink);
    for (int64_t d = 0; d < dim; ++d)
      _mm512_store_ps(out + d * TILE, _mm512_mul_ps(shrink, _mm512_load_ps(out + d * TILE)));
    _mm512_store_ps(tops, now);
  }
  const __mmask16 nothing = _mm512_cmp_ps_mask(now, _mm512_set1_ps(NONE), _CMP_EQ_OQ);
  const __m512 base = _mm512_mask_blend_ps(nothing, now, _mm512_setzero_ps());
  _mm512_store_ps(totals, _mm512_add_ps(total, exponentials(scores, used, factor, base, weights)));
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

// Walks along a block table without dividing.
struct Cursor {
  int64_t entry, offset;  // in the tables; in the block
  Cursor(const Inputs& in, int64_t table, int64_t position)
      : entry(table + position / in.block_size), offset(position % in.block_size) {}
  int64_t next(const Inputs& in) {
    const int64_t slot = in.tables[entry] * in.block_size + offset;
    if (++offset == in.block_size) {
      offset = 0;
      ++entry;
    }
    return slot;
  }
};

// Find the keys and values of a chunk, wherever their blocks lie; zeros before the task's first.
inline void find_rows(const Inputs& in, const Task& task, int64_t start, Rows& rows) {
  rows.count = std::min<int64_t>(CHUNK, task.end_key - start);
  int64_t i = std::max<int64_t>(0, task.first_key - start);
  std::fill_n(rows.keys, i, ZEROS);
  std::fill_n(rows.values, i, ZEROS);
  Cursor cursor(in, task.table, start + i);
  for (; i < rows.count; ++i) {
    const int64_t slot = cursor.next(in);
    rows.keys[i] = in.keys + slot * in.key_slot + task.head * in.key_dim;
    rows.values[i] = in.values + slot * in.value_slot + task.head * in.value_dim;
  }
}

// Rows that are fetched, a few at a time, while others are computed.
class Ahead {
 public:
  Ahead(const Inputs& in, const Task& task, const Rows& rows, int64_t steps)
      : rows_(rows),
        keys_((task.end_head - task.head) * in.key_dim),
        values_((task.end_head - task.head) * in.value_dim),
        portion_((rows.count + steps - 1) / steps) {}
  void step() { fetch(std::min(rows_.count, next_ + portion_)); }
  void finish() { fetch(rows_.count); }

 private:
  void fetch(int64_t end) {
    for (; next_ < end; ++next_) {
      for (int64_t d = 0; d < keys_; d += PAIR) _mm_prefetch(rows_.keys[next_] + d, _MM_HINT_T1);
      for (int64_t d = 0; d < values_; d += PAIR) _mm_prefetch(rows_.values[next_] + d, _MM_HINT_T1);
    }
  }
  const Rows& rows_;
  const int64_t keys_, values_, portion_;
  int64_t next_ = 0;
};

// One KV head's keys of a chunk: where they lie, if tiles of them lie in one block.
inline Keys keys_of(const Inputs& in, const Task& task, int64_t head, int64_t start, const Rows& rows, Scratch& s) {
  Keys keys{};
  const int64_t tiles = (rows.count + TILE - 1) / TILE, dim = in.key_dim;
  const bool whole = in.block_size % TILE == 0;
  keys.bytes = (whole ? in.key_slot : dim) * static_cast<int64_t>(sizeof(bf16));
  if (whole) {
    const int64_t skipped = std::max<int64_t>(0, task.first_key - start);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t key = std::max(tile * TILE, skipped);
      keys.tiles[tile] = rows.keys[key] - (key - tile * TILE) * in.key_slot + head * dim;
    }
  } else {
    for (int64_t key = 0; key < tiles * TILE; ++key) {
      const bool found = key < rows.count && rows.keys[key] != ZEROS;
      std::memcpy(s.keys + key * dim, found ? rows.keys[key] + head * dim : ZEROS, dim * sizeof(bf16));
    }
    for (int64_t tile = 0; tile < tiles; ++tile) keys.tiles[tile] = s.keys + tile * TILE * dim;
  }
  std::fill(keys.tiles + tiles, keys.tiles + CHUNK / TILE, keys.tiles[tiles - 1]);
  return keys;
}

// One KV head's values of a chunk; what is missing to whole tiles is zeros.
inline void values_of(const Inputs& in, int64_t head, const Rows& rows, Scratch& s) {
  const bf16* own[CHUNK];
  for (int64_t i = 0; i < rows.count; ++i)
    own[i] = rows.values[i] == ZEROS ? ZEROS : rows.values[i] + head * in.value_dim;
  const int64_t all = (rows.count + PAIR - 1) / PAIR * PAIR;
  std::fill(own + rows.count, own + all, ZEROS);
  pack_values(own, all, in.value_dim, s.values);
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
  score(keys, s.query + place * in.key_dim, reach, in.key_dim, s.scores);
  hide(begins, ends, start, used, s.scores);
  float* out = s.out + place * in.value_dim;
  soften(
      s.scores, used, in.scale, s.tops + place, s.totals + place, s.weights, out, in.value_dim);
  accumulate(s.values, s.weights, used, in.value_dim, out);
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

// One task. Meanwhile the first keys and values of the one that follows are fetched, if there is one.
inline void run(
    const Inputs& in, const Task& task, const Task* following, bool fetched, Scratch& s, float* out,
    Sums* sums) {
  const int64_t rows = padded(task.tokens * in.groups), heads = task.end_head - task.head;
  int64_t start = task.first_key / TILE * TILE;
  find_rows(in, task, start, s.rows[0]);
  if (!fetched) Ahead(in, task, s.rows[0], 1).finish();
  load_query(in, task, s);
  find_ranges(in, task, s);
  std::fill_n(s.out, heads * rows * in.value_dim, 0.f);
  std::fill_n(s.tops, heads * rows, NONE);
  std::fill_n(s.totals, heads * rows, 0.f);
  for (int current = 0; start < task.end_key; start += CHUNK, current ^= 1) {
    const Rows& now = s.rows[current];
    Rows& next = s.rows[current ^ 1];
    const Task* then = start + CHUNK < task.end_key ? &task : following;
    next.count = 0;
    if (then != nullptr)
      find_rows(in, *then, then == &task ? start + CHUNK : then->first_key / TILE * TILE, next);
    Ahead ahead(in, then != nullptr ? *then : task, next, heads * rows / TILE);
    for (int64_t head = 0; head < heads; ++head) {
      const Keys keys = keys_of(in, task, head, start, now, s);
      values_of(in, head, now, s);
      for (int64_t row = 0; row < rows; row += TILE) {
        attend_tile(in, keys, start, now.count, row, head * rows + row, s);
        ahead.step();
      }
    }
    ahead.finish();
  }
  write_out(in, task, s, out, sums);
}

// One thread's part in all tasks.
inline void run_tasks(
    const Inputs& in, const std::vector<Task>& tasks, Portions& portions, float* parts, Sums* sums) {
  const auto next = [&]() -> const Task* {
    const int64_t index = portions.take(1);
    return index < static_cast<int64_t>(tasks.size()) ? &tasks[index] : nullptr;
  };
  const Task *task = next(), *following = nullptr;
  for (bool fetched = false; task != nullptr; task = following, fetched = true) {
    following = next();
    run(in, *task, following, fetched, own_scratch(), parts + task->partial * in.value_dim,
        sums + task->partial);
  }
}

}  // namespace radixkv
