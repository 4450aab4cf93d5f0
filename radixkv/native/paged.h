// Paged attention on CPUs with AMX: work items over block tables, and one merge.
//
// An item is a range of query tokens that read one range of key positions through one block table:
// a shared run for all the sequences that share it, or what a sequence reads by itself. Items are
// cut into tasks (KV head, query rows, keys); every task leaves a partial result with its running
// maximum and sum, and partial results are merged by them. Accumulation is in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tiles.h"
#include "vectors.h"

namespace radixkv {

constexpr int WIDE = 64;          // keys that are scored at once: four tiles
constexpr int CHUNK = 256;        // keys between two updates of the result; a multiple of WIDE
// Rows of scores and of weights, a line longer than a power of two: else they meet in one set of
// the cache.
constexpr int SCORES = CHUNK + TILE, WEIGHTS = CHUNK + PAIR;
constexpr int HEAD_ROWS = 256;    // query rows of one KV head in a task
constexpr int MAX_ROWS = 1024;    // query rows of a task, over its KV heads
constexpr int MAX_DIM = 256;
constexpr int64_t PARTS = 2;      // no task takes more than a thread's share of the work over this
constexpr int ITEM_FIELDS = 5;    // first token, tokens, place of the table, first key, end of keys
constexpr float FLOOR = -1e30f;   // log-sum-exp of no keys at all
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float NONE = -std::numeric_limits<float>::infinity();

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

// What one row has gathered so far.
struct Sums {
  float top = NONE, total = 0.f;
};

// One thread's buffers.
struct Scratch {
  alignas(64) bf16 query[MAX_ROWS * MAX_DIM];
  alignas(64) bf16 keys[CHUNK * MAX_DIM];    // for every WIDE keys: tiles of (dimension pairs, keys)
  alignas(64) bf16 values[CHUNK * MAX_DIM];  // for every PAIR keys: tiles of (key pairs, dimensions)
  alignas(64) float scores[2][TILE * SCORES];
  alignas(64) bf16 weights[2][TILE * WEIGHTS];
  alignas(64) float out[MAX_ROWS * MAX_DIM];
  alignas(64) float tops[MAX_ROWS], totals[MAX_ROWS];
};

inline Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

alignas(64) inline const bf16 ZEROS[MAX_DIM] = {};

// Tiles of the first `count` keys, rounded up to whole tiles.
inline void pack_keys(const bf16* const* rows, int64_t count, int64_t dim, bf16* packed) {
  for (int64_t key = 0; key < count; key += TILE) {
    bf16* wide = packed + key / WIDE * WIDE * dim + key % WIDE * PAIR;
    for (int64_t d = 0; d < dim; d += PAIR) {
      __m512i block[TILE];
      for (int i = 0; i < TILE; ++i) block[i] = _mm512_loadu_si512(rows[key + i] + d);
      transpose(block);
      bf16* tile = wide + d * WIDE;
      for (int i = 0; i < TILE; ++i) _mm512_store_si512(tile + i * PAIR, block[i]);
    }
  }
}

// Tiles of the first `count` values, rounded up to whole tiles.
inline void pack_values(const bf16* const* rows, int64_t count, int64_t dim, bf16* packed) {
  alignas(64) uint16_t low[PAIR], high[PAIR];
  for (int i = 0; i < PAIR; ++i) {
    low[i] = i / 2 + (i % 2) * PAIR;
    high[i] = low[i] + TILE;
  }
  const __m512i take_low = _mm512_load_si512(low), take_high = _mm512_load_si512(high);
  for (int64_t key = 0; key < count; key += PAIR) {
    for (int pair = 0; pair < TILE; ++pair) {
      const bf16 *even = rows[key + 2 * pair], *odd = rows[key + 2 * pair + 1];
      bf16* row = packed + key * dim + pair * PAIR;
      for (int64_t d = 0; d < dim; d += PAIR) {
        const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
        bf16* tile = row + d * PAIR;
        _mm512_store_si512(tile, _mm512_permutex2var_epi16(a, take_low, b));
        _mm512_store_si512(tile + TILE * PAIR, _mm512_permutex2var_epi16(a, take_high, b));
      }
    }
  }
}

// scores = query rows x keys; (16, count rounded up to WIDE).
inline void score(const bf16* query, const bf16* keys, int64_t count, int64_t dim, float* scores) {
  for (int64_t key = 0; key < count; key += WIDE) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += PAIR) {
      const bf16* tile = keys + key * dim + d * WIDE;
      _tile_loadd(4, query + d, dim * sizeof(bf16));
      _tile_loadd(5, tile, 64);
      _tile_loadd(6, tile + TILE * PAIR, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, tile + 2 * TILE * PAIR, 64);
      _tile_loadd(6, tile + 3 * TILE * PAIR, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 6);
    }
    float* to = scores + key;
    _tile_stored(0, to, SCORES * sizeof(float));
    _tile_stored(1, to + TILE, SCORES * sizeof(float));
    _tile_stored(2, to + 2 * TILE, SCORES * sizeof(float));
    _tile_stored(3, to + 3 * TILE, SCORES * sizeof(float));
  }
}

// out += weights x values; (16, dim).
inline void accumulate(const bf16* weights, const bf16* values, int64_t count, int64_t dim, float* out) {
  const int64_t bytes = dim * sizeof(float);
  int64_t d = 0;
  for (; d + 4 * TILE <= dim; d += 4 * TILE) {
    _tile_loadd(0, out + d, bytes);
    _tile_loadd(1, out + d + TILE, bytes);
    _tile_loadd(2, out + d + 2 * TILE, bytes);
    _tile_loadd(3, out + d + 3 * TILE, bytes);
    for (int64_t key = 0; key < count; key += PAIR) {
      const bf16* tile = values + key * dim + d * PAIR;
      _tile_loadd(4, weights + key, WEIGHTS * sizeof(bf16));
      _tile_loadd(5, tile, 64);
      _tile_loadd(6, tile + TILE * PAIR, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, tile + 2 * TILE * PAIR, 64);
      _tile_loadd(6, tile + 3 * TILE * PAIR, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, out + d, bytes);
    _tile_stored(1, out + d + TILE, bytes);
    _tile_stored(2, out + d + 2 * TILE, bytes);
    _tile_stored(3, out + d + 3 * TILE, bytes);
  }
  for (; d < dim; d += PAIR) {
    _tile_loadd(0, out + d, bytes);
    _tile_loadd(1, out + d + TILE, bytes);
    for (int64_t key = 0; key < count; key += PAIR) {
      const bf16* tile = values + key * dim + d * PAIR;
      _tile_loadd(4, weights + key, WEIGHTS * sizeof(bf16));
      _tile_loadd(5, tile, 64);
      _tile_loadd(6, tile + TILE * PAIR, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, out + d, bytes);
    _tile_stored(1, out + d + TILE, bytes);
  }
}

// Rows whose softmax is computed side by side, so that none waits for itself.
constexpr int ABREAST = 4;

// Scores of keys that a row does not see.
inline void hide(float* scores, int64_t begin, int64_t end, int64_t used) {
  begin = std::clamp<int64_t>(begin, 0, used);
  end = std::clamp<int64_t>(end, begin, used);
  std::fill(scores, scores + begin, NONE);
  std::fill(scores + end, scores + used, NONE);
}

inline void maxima(const float* scores, int64_t used, float* most) {
  __m512 top[ABREAST];
  for (int r = 0; r < ABREAST; ++r) top[r] = _mm512_load_ps(scores + r * SCORES);
  for (int64_t key = TILE; key < used; key += TILE)
    for (int r = 0; r < ABREAST; ++r)
      top[r] = _mm512_max_ps(top[r], _mm512_load_ps(scores + r * SCORES + key));
  for (int r = 0; r < ABREAST; ++r) most[r] = _mm512_reduce_max_ps(top[r]);
}

// Scores become weights, 2 to the power of how far they lie below the top.
inline void exponentials(
    const float* scores, int64_t used, float scale, const float* tops, float* totals,
    bf16* weights) {
  const __m512 factor = _mm512_set1_ps(scale);
  __m512 base[ABREAST], total[ABREAST];
  for (int r = 0; r < ABREAST; ++r) {
    base[r] = _mm512_set1_ps(tops[r] == NONE ? 0.f : tops[r]);
    total[r] = _mm512_setzero_ps();
  }
  for (int64_t key = 0; key < used; key += PAIR) {
    for (int r = 0; r < ABREAST; ++r) {
      const float* from = scores + r * SCORES + key;
      const __m512 a = exp2_below(_mm512_fmsub_ps(_mm512_load_ps(from), factor, base[r]));
      const __m512 b = exp2_below(_mm512_fmsub_ps(_mm512_load_ps(from + TILE), factor, base[r]));
      total[r] = _mm512_add_ps(total[r], _mm512_add_ps(a, b));
      _mm512_store_si512(weights + r * WEIGHTS + key, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }
  for (int r = 0; r < ABREAST; ++r) totals[r] += _mm512_reduce_add_ps(total[r]);
}

// A tile of scores become weights; earlier results of a row shrink where its top grows.
inline void soften(
    float* scores, int64_t rows, int64_t used, float scale, float* tops, float* totals,
    bf16* weights, float* out, int64_t dim) {
  alignas(64) float most[TILE], shrink[TILE];
  const int64_t all = (rows + ABREAST - 1) / ABREAST * ABREAST;
  std::fill(most, most + TILE, NONE);
  for (int64_t row = 0; row < all; row += ABREAST) maxima(scores + row * SCORES, used, most + row);
  const __m512 before = _mm512_loadu_ps(tops);
  // Of scaled scores; a scale is positive. In this order a top that is NaN is kept.
  const __m512 now = _mm512_max_ps(before, _mm512_mul_ps(_mm512_load_ps(most), _mm512_set1_ps(scale)));
  const __mmask16 grown = _mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ);
  const __m512 factor = _mm512_mask_blend_ps(
      grown, _mm512_set1_ps(1.f), exp2_below(_mm512_sub_ps(before, now)));
  _mm512_storeu_ps(tops, now);
  _mm512_storeu_ps(totals, _mm512_mul_ps(_mm512_loadu_ps(totals), factor));
  _mm512_store_ps(shrink, factor);
  for (int64_t row = 0; row < all; row += ABREAST)
    exponentials(scores + row * SCORES, used, scale, tops + row, totals + row, weights + row * WEIGHTS);
  for (int64_t row = 0; row < rows; ++row) {
    if (!(grown >> row & 1)) continue;
    const __m512 by = _mm512_set1_ps(shrink[row]);
    for (int64_t d = 0; d < dim; d += LANES)
      _mm512_store_ps(out + row * dim + d, _mm512_mul_ps(by, _mm512_load_ps(out + row * dim + d)));
  }
}

inline int64_t padded(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

// One KV head's queries, side by side; zeros up to a whole tile.
inline void load_query(const Inputs& in, const Task& task, int64_t head, bf16* query) {
  const int64_t rows = task.tokens * in.groups;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = task.token + row / in.groups;
    const bf16* from = in.query + token * in.query_token +
        (head * in.groups + row % in.groups) * in.query_head;
    std::memcpy(query + row * in.key_dim, from, in.key_dim * sizeof(bf16));
  }
  std::memset(query + rows * in.key_dim, 0, (padded(rows) - rows) * in.key_dim * sizeof(bf16));
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

// Where the keys and values of a chunk begin, for the first KV head.
struct Rows {
  const bf16 *keys[CHUNK], *values[CHUNK];
};

// Find the next keys and values, wherever their blocks lie, and have them fetched.
inline void find_rows(const Inputs& in, const Task& task, int64_t count, Cursor& cursor, Rows& rows) {
  const int64_t heads = task.end_head - task.head;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = cursor.next(in);
    rows.keys[i] = in.keys + slot * in.key_slot + task.head * in.key_dim;
    rows.values[i] = in.values + slot * in.value_slot + task.head * in.value_dim;
    for (int64_t d = 0; d < heads * in.key_dim; d += PAIR)
      _mm_prefetch(rows.keys[i] + d, _MM_HINT_T1);
    for (int64_t d = 0; d < heads * in.value_dim; d += PAIR)
      _mm_prefetch(rows.values[i] + d, _MM_HINT_T1);
  }
}

// One KV head's share of a chunk's rows; what is missing to whole tiles is zeros.
inline void rows_of_head(const Inputs& in, int64_t head, int64_t count, const Rows& rows, Rows& own) {
  for (int64_t i = 0; i < count; ++i) {
    own.keys[i] = rows.keys[i] + head * in.key_dim;
    own.values[i] = rows.values[i] + head * in.value_dim;
  }
  const int64_t whole = (count + PAIR - 1) / PAIR * PAIR;
  for (int64_t i = count; i < whole; ++i) own.keys[i] = own.values[i] = ZEROS;
}

// A tile of query rows and how many of a chunk's keys its last one sees; none if 0.
struct RowTile {
  int64_t row, end, reach;
};

inline RowTile row_tile(
    const Inputs& in, const Task& task, int64_t start, int64_t count, int64_t row) {
  const int64_t end = std::min<int64_t>(task.tokens * in.groups, row + TILE);
  // Positions grow along an item, or lie behind all its keys.
  const int64_t last = in.positions[task.token + (end - 1) / in.groups] - start;
  return {row, end, std::max<int64_t>(0, std::min(count, last + 1))};
}

inline void soften_tile(
    const Inputs& in, const Task& task, int64_t start, int64_t base, const RowTile& tile,
    Scratch& s, int buffer) {
  const int64_t used = (tile.reach + PAIR - 1) / PAIR * PAIR;
  for (int64_t row = tile.row; row < tile.end; ++row) {
    const int64_t token = task.token + row / in.groups;
    const int64_t begin = in.first[token] - start;
    const int64_t end = std::min(tile.reach, in.positions[token] - start + 1);
    if (begin > 0 || end < used)
      hide(s.scores[buffer] + (row - tile.row) * SCORES, begin, end, used);
  }
  const int64_t place = base + tile.row;
  soften(
      s.scores[buffer], tile.end - tile.row, used, in.scale, s.tops + place, s.totals + place,
      s.weights[buffer], s.out + place * in.value_dim, in.value_dim);
}

// Attend from a task's tokens to one chunk, for the KV head whose rows begin at `base`.
//
// Tiles are stored a whole tile of rows before they are read: what was stored just before would
// have to be waited for.
inline void attend(
    const Inputs& in, const Task& task, int64_t start, int64_t count, int64_t base, Scratch& s) {
  const int64_t tiles = (task.tokens * in.groups + TILE - 1) / TILE;
  RowTile scored{}, softened{};
  for (int64_t index = 0; index < tiles + 2; ++index) {
    const int even = index % 2, odd = 1 - even;
    RowTile tile{};
    if (index < tiles) tile = row_tile(in, task, start, count, index * TILE);
    if (tile.reach > 0)
      score(s.query + (base + tile.row) * in.key_dim, s.keys, tile.reach, in.key_dim, s.scores[even]);
    if (scored.reach > 0) soften_tile(in, task, start, base, scored, s, odd);
    if (softened.reach > 0) {
      float* out = s.out + (base + softened.row) * in.value_dim;
      accumulate(s.weights[even], s.values, softened.reach, in.value_dim, out);
    }
    softened = scored;
    scored = tile;
  }
}

inline void run(const Inputs& in, const Task& task, Scratch& s, float* out, Sums* sums) {
  const int64_t rows = task.tokens * in.groups, heads = task.end_head - task.head;
  const int64_t stride = padded(rows);
  for (int64_t head = 0; head < heads; ++head)
    load_query(in, task, task.head + head, s.query + head * stride * in.key_dim);
  std::fill_n(s.out, heads * stride * in.value_dim, 0.f);
  std::fill_n(s.tops, heads * stride, NONE);
  std::fill_n(s.totals, heads * stride, 0.f);
  // Two sets: the next chunk is fetched while this one is computed.
  Rows sets[2], own;
  Cursor cursor(in, task.table, task.first_key);
  int current = 0;
  const auto left = [&](int64_t start) { return std::min<int64_t>(CHUNK, task.end_key - start); };
  find_rows(in, task, left(task.first_key), cursor, sets[0]);
  for (int64_t start = task.first_key; start < task.end_key; start += CHUNK, current ^= 1) {
    if (start + CHUNK < task.end_key)
      find_rows(in, task, left(start + CHUNK), cursor, sets[current ^ 1]);
    for (int64_t head = 0; head < heads; ++head) {
      rows_of_head(in, head, left(start), sets[current], own);
      pack_keys(own.keys, left(start), in.key_dim, s.keys);
      pack_values(own.values, left(start), in.value_dim, s.values);
      attend(in, task, start, left(start), head * stride, s);
    }
  }
  for (int64_t head = 0; head < heads; ++head) {
    const float* from = s.out + head * stride * in.value_dim;
    std::memcpy(out + head * rows * in.value_dim, from, rows * in.value_dim * sizeof(float));
    for (int64_t row = 0; row < rows; ++row)
      sums[head * rows + row] = {s.tops[head * stride + row], s.totals[head * stride + row]};
  }
}

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
    const int64_t step = of_head * in.kv_heads > most ? 1 : fit;
    const int64_t parts = (of_head + most - 1) / most;
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

// Where the partial results of each token and KV head are: those of `index` lie between
// starts[index] and starts[index + 1].
struct Places {
  std::vector<int64_t> starts, rows;
};

inline Places places_of(const Inputs& in, const std::vector<Task>& tasks, int64_t tokens) {
  Places places;
  places.starts.assign(tokens * in.kv_heads + 1, 0);
  const auto visit = [&](auto&& each) {
    for (const Task& task : tasks) {
      int64_t row = task.partial;
      for (int64_t head = task.head; head < task.end_head; ++head)
        for (int64_t t = 0; t < task.tokens; ++t, row += in.groups)
          each((task.token + t) * in.kv_heads + head, row);
    }
  };
  visit([&](int64_t index, int64_t) { ++places.starts[index + 1]; });
  for (int64_t i = 0; i < tokens * in.kv_heads; ++i) places.starts[i + 1] += places.starts[i];
  places.rows.resize(places.starts.back());
  std::vector<int64_t> next(places.starts.begin(), places.starts.end() - 1);
  visit([&](int64_t index, int64_t row) { places.rows[next[index]++] = row; });
  return places;
}

// Merge the partial results of some (token, KV head) pairs.
inline void merge(
    const Inputs& in, const Places& places, const float* parts, const Sums* sums, int64_t begin,
    int64_t end, bf16* out, float* lse) {
  alignas(64) float merged[MAX_DIM];
  for (int64_t index = begin; index < end; ++index) {
    const int64_t* first = places.rows.data() + places.starts[index];
    const int64_t* last = places.rows.data() + places.starts[index + 1];
    for (int64_t group = 0; group < in.groups; ++group) {
      const int64_t row = index * in.groups + group;
      float top = NONE, total = 0.f;
      for (const int64_t* part = first; part < last; ++part)
        top = std::max(top, sums[*part + group].top);
      std::fill_n(merged, in.value_dim, 0.f);
      for (const int64_t* part = first; part < last; ++part) {
        const Sums& own = sums[*part + group];
        if (own.total == 0.f) continue;  // It saw no key.
        const float weight = std::exp2(own.top - top);
        total += weight * own.total;
        const float* from = parts + (*part + group) * in.value_dim;
        for (int64_t d = 0; d < in.value_dim; ++d) merged[d] += weight * from[d];
      }
      // What is not a number must stay so, for the engine to see it.
      const __m512 factor = _mm512_set1_ps(total == 0.f ? 0.f : 1.f / total);
      bf16* to = out + row * in.value_dim;
      for (int64_t d = 0; d < in.value_dim; d += LANES)
        store(to + d, 0xffff, _mm512_mul_ps(_mm512_load_ps(merged + d), factor));
      if (lse != nullptr) lse[row] = total > 0.f ? (top + std::log2(total)) * LN2 : FLOOR;
    }
  }
}

}  // namespace radixkv
