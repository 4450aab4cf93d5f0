// What there is to attend, cut into tasks for threads.
//
// An item is a range of query tokens that read one range of key positions through one block table:
// a shared run for all the sequences that share it, or what a sequence reads by itself. Items are
// cut into tasks (KV head, query rows, keys); every task leaves a partial result.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "tiles.h"
#include "vectors.h"

namespace radixkv {

// Keys between two updates of the result; a multiple of 64. So few that scores, weights and what
// they are made from stay in the first cache.
constexpr int CHUNK = 64;
constexpr int HEAD_ROWS = 256;    // query rows of one KV head in a task
constexpr int MAX_ROWS = 1024;    // query rows of a task, over its KV heads
constexpr int MAX_DIM = 256;
constexpr int64_t PARTS = 2;      // no task takes more than a thread's share of the work over this
constexpr float LOG2E = 1.4426950408889634f;
constexpr int ITEM_FIELDS = 5;    // first token, tokens, place of the table, first key, end of keys

struct Inputs {
  const bf16* query;
  int64_t query_token, query_head;   // strides, in elements
  const bf16* keys;
  const bf16* values;
  int64_t key_slot, value_slot;
  int64_t block_size, kv_heads, groups, key_dim, value_dim;
  const int32_t* tables;
  const int64_t* positions;  // of each token: the last key that it sees
  const int64_t* first;      // the first key that it sees
  float scale;               // to the base of 2
};

struct Task {
  int64_t token, tokens;    // query tokens; every one has `groups` rows
  int64_t table;            // where the block table begins
  int64_t first_key, end_key;
  int64_t head, end_head;   // KV heads
  int64_t partial;          // first row among the partial results; head by head
};

inline int64_t padded(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

// A range of tokens and keys of one item; its KV heads are not yet dealt out.
struct Piece {
  int64_t token, tokens, table, first_key, end_key;
  int64_t keys() const { return end_key - first_key; }
};

inline std::vector<Piece> pieces_of(const Inputs& in, const int32_t* items, int64_t count) {
  std::vector<Piece> pieces;
  const int64_t most = std::max<int64_t>(1, HEAD_ROWS / in.groups);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* item = items + i * ITEM_FIELDS;
    for (int64_t t = 0; t < item[1]; t += most) {
      const int64_t token = item[0] + t, tokens = std::min<int64_t>(most, item[1] - t);
      int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
      for (int64_t q = token; q < token + tokens; ++q) {
        begin = std::min(begin, in.first[q]);
        end = std::max(end, in.positions[q] + 1);
      }
      begin = std::max<int64_t>(begin, item[3]);
      end = std::min<int64_t>(end, item[4]);
      if (begin < end) pieces.push_back({token, tokens, item[2], begin, end});
    }
  }
  return pieces;
}

// A key's heads lie side by side in memory and stay together, and keys are not split, but where a
// task would be so large that other threads wait for it.
inline std::vector<Task> cut(
    const Inputs& in, const int32_t* items, int64_t count, int64_t threads, int64_t& partials) {
  const std::vector<Piece> pieces = pieces_of(in, items, count);
  int64_t work = 0;
  for (const Piece& p : pieces) work += p.tokens * p.keys() * in.kv_heads;
  const int64_t most = threads == 1 ? work : std::max<int64_t>(1, work / (PARTS * threads));
  std::vector<Task> tasks;
  partials = 0;
  for (const Piece& p : pieces) {
    const int64_t of_head = p.tokens * p.keys();
    const int64_t fit = std::max<int64_t>(1, MAX_ROWS / padded(p.tokens * in.groups));
    const bool apart = p.tokens * in.groups > TILE && of_head * in.kv_heads > most;
    const int64_t step = apart ? 1 : std::min(fit, in.kv_heads);
    const int64_t parts = (of_head * step + most - 1) / most;
    const int64_t chunks = (p.keys() + CHUNK - 1) / CHUNK;
    const int64_t keys = (chunks + parts - 1) / parts * CHUNK;
    for (int64_t key = p.first_key; key < p.end_key; key += keys) {
      const int64_t end_key = std::min(p.end_key, key + keys);
      for (int64_t head = 0; head < in.kv_heads; head += step) {
        const int64_t end = std::min(in.kv_heads, head + step);
        tasks.push_back({p.token, p.tokens, p.table, key, end_key, head, end, partials});
        partials += (end - head) * p.tokens * in.groups;
      }
    }
  }
  return tasks;
}

}  // namespace radixkv
