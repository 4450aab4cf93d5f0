// Where a task's keys and values lie, a chunk at a time, and how they come near before they are needed.

#pragma once

#include <algorithm>
#include <cstring>

#include "chunk.h"

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
  alignas(64) bf16 values[CHUNK * MAX_DIM];     // one head's, in the order that the product reads
  alignas(64) float scores[CHUNK * TILE];       // (keys, rows)
  alignas(64) bf16 weights[CHUNK * TILE];       // tiles of (key pairs, rows), or of (rows, keys)
  alignas(64) float out[MAX_ROWS * MAX_DIM];    // tiles of (dimensions, rows), or of (rows, dimensions)
  alignas(64) float tops[MAX_ROWS], totals[MAX_ROWS];
  alignas(64) int32_t begins[MAX_ROWS], ends[MAX_ROWS];  // the keys that each row of a head sees
  Rows rows[2];
  int current = 0;  // which of these is of the chunk at hand
};

inline Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

alignas(64) inline const bf16 ZEROS[MAX_DIM] = {};

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
inline Keys keys_of(
    const Inputs& in, const Task& task, int64_t head, int64_t start, const Rows& rows, Scratch& s) {
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

// Where one KV head's values of a chunk lie, up to a multiple of PAIR keys; zeros for those that are
// missing. Returns how many.
inline int64_t find_values(const Inputs& in, int64_t head, const Rows& rows, const bf16** own) {
  const int64_t all = (rows.count + PAIR - 1) / PAIR * PAIR;
  for (int64_t i = 0; i < rows.count; ++i)
    own[i] = rows.values[i] == ZEROS ? ZEROS : rows.values[i] + head * in.value_dim;
  std::fill(own + rows.count, own + all, ZEROS);
  return all;
}

// Attend to a task chunk by chunk: attend(start, rows, ahead), which takes `steps` steps of what is
// fetched ahead: the next chunk, or the first one of the task that follows, if there is one.
template <typename Attend>
inline void walk(
    const Inputs& in, const Task& task, const Task* following, bool fetched, int64_t steps,
    Scratch& s, const Attend& attend) {
  const auto first = [](const Task& of) { return of.first_key / TILE * TILE; };
  if (!fetched) {
    find_rows(in, task, first(task), s.rows[s.current]);
    Ahead(in, task, s.rows[s.current], 1).finish();
  }
  for (int64_t start = first(task); start < task.end_key; start += CHUNK, s.current ^= 1) {
    const Rows& now = s.rows[s.current];
    Rows& next = s.rows[s.current ^ 1];
    const Task* then = start + CHUNK < task.end_key ? &task : following;
    next.count = 0;
    if (then != nullptr)
      find_rows(in, *then, then == &task ? start + CHUNK : first(*then), next);
    Ahead ahead(in, then != nullptr ? *then : task, next, steps);
    attend(start, now, ahead);
    ahead.finish();
  }
}

}  // namespace radixkv
