// Paged attention on CPUs with AMX: work items over block tables, and one merge.
//
// An item is a range of query tokens that read one range of key positions through one block table:
// a shared run for all the sequences that share it, or what a sequence reads by itself. Items are
// cut into tasks (KV head, query rows, keys); every task leaves a partial result with its running
// maximum and sum, and partial results are merged by them. Accumulation is in float32.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using bf16 = at::BFloat16;

constexpr int TILE = 16;          // rows of a tile, and columns of one of float32
constexpr int PAIR = 32;          // bfloat16 values in a row of a tile
constexpr int CHUNK = 64;         // keys that are scored at once
constexpr int HEAD_ROWS = 128;    // query rows of one KV head in a task
constexpr int MAX_ROWS = 512;     // query rows of a task, over its KV heads
constexpr int MAX_DIM = 256;
constexpr int64_t SPLIT = 512;    // keys of a task, at most; a multiple of CHUNK
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

// One thread's buffers.
struct Scratch {
  alignas(64) bf16 query[MAX_ROWS * MAX_DIM];
  alignas(64) bf16 keys[CHUNK * MAX_DIM];    // tiles of (dimension pairs, keys)
  alignas(64) bf16 values[CHUNK * MAX_DIM];  // tiles of (key pairs, dimensions)
  alignas(64) float scores[TILE * CHUNK];
  alignas(64) bf16 weights[TILE * CHUNK];
  alignas(64) float out[MAX_ROWS * MAX_DIM];
  float top[MAX_ROWS], sum[MAX_ROWS];
};

alignas(64) const bf16 ZEROS[MAX_DIM] = {};

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) {
      row_bytes[i] = 64;
      rows[i] = TILE;
    }
  }
};

// 2 to the power of x, for x <= 0; within 2e-7 of it.
inline __m512 exp2_of(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-126.f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.5352800e-4f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.3398874e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6184373e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5503324e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022648e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(y, whole);
}

// Transpose 16 x 16 units of 32 bits.
inline void transpose(__m512i row[TILE]) {
  __m512i t[TILE];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    row[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    row[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    row[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    row[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    row[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    row[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    row[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    row[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

void pack_keys(const bf16* const rows[CHUNK], int groups, int64_t dim, bf16* packed) {
  for (int64_t d = 0; d < dim; d += PAIR) {
    for (int j = 0; j < groups; ++j) {
      __m512i block[TILE];
      for (int i = 0; i < TILE; ++i) block[i] = _mm512_loadu_si512(rows[j * TILE + i] + d);
      transpose(block);
      bf16* tile = packed + (d / PAIR * (CHUNK / TILE) + j) * TILE * PAIR;
      for (int i = 0; i < TILE; ++i) _mm512_store_si512(tile + i * PAIR, block[i]);
    }
  }
}

void pack_values(const bf16* const rows[CHUNK], int halves, int64_t dim, bf16* packed) {
  alignas(64) uint16_t low[PAIR], high[PAIR];
  for (int i = 0; i < PAIR; ++i) {
    low[i] = i / 2 + (i % 2) * PAIR;
    high[i] = low[i] + TILE;
  }
  const __m512i take_low = _mm512_load_si512(low), take_high = _mm512_load_si512(high);
  for (int half = 0; half < halves; ++half) {
    for (int pair = 0; pair < TILE; ++pair) {
      const bf16* even = rows[half * PAIR + 2 * pair];
      const bf16* odd = rows[half * PAIR + 2 * pair + 1];
      bf16* row = packed + half * (dim / TILE) * TILE * PAIR + pair * PAIR;
      for (int64_t d = 0; d < dim; d += PAIR) {
        const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
        bf16* tile = row + d / TILE * TILE * PAIR;
        _mm512_store_si512(tile, _mm512_permutex2var_epi16(a, take_low, b));
        _mm512_store_si512(tile + TILE * PAIR, _mm512_permutex2var_epi16(a, take_high, b));
      }
    }
  }
}

// scores = query rows x keys; (16, CHUNK).
void score(const bf16* query, const bf16* keys, int64_t dim, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += PAIR) {
    const bf16* tile = keys + d / PAIR * (CHUNK / TILE) * TILE * PAIR;
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
  _tile_stored(0, scores, CHUNK * sizeof(float));
  _tile_stored(1, scores + TILE, CHUNK * sizeof(float));
  _tile_stored(2, scores + 2 * TILE, CHUNK * sizeof(float));
  _tile_stored(3, scores + 3 * TILE, CHUNK * sizeof(float));
}

// out += weights x values; (16, dim).
void accumulate(const bf16* weights, const bf16* values, int halves, int64_t dim, float* out) {
  _tile_loadd(4, weights, CHUNK * sizeof(bf16));
  if (halves > 1) _tile_loadd(5, weights + PAIR, CHUNK * sizeof(bf16));
  const int64_t half = dim / TILE * TILE * PAIR;
  for (int64_t d = 0; d < dim; d += PAIR) {
    const bf16* tile = values + d / TILE * TILE * PAIR;
    _tile_loadd(0, out + d, dim * sizeof(float));
    _tile_loadd(1, out + d + TILE, dim * sizeof(float));
    _tile_loadd(6, tile, 64);
    _tile_loadd(7, tile + TILE * PAIR, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (halves > 1) {
      _tile_loadd(6, tile + half, 64);
      _tile_loadd(7, tile + half + TILE * PAIR, 64);
      _tile_dpbf16ps(0, 5, 6);
      _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, out + d, dim * sizeof(float));
    _tile_stored(1, out + d + TILE, dim * sizeof(float));
  }
}

// Bits of the keys `begin` to `end` of a chunk.
inline uint64_t key_bits(int64_t begin, int64_t end) {
  begin = std::clamp<int64_t>(begin, 0, CHUNK);
  end = std::clamp<int64_t>(end, 0, CHUNK);
  if (begin >= end) return 0;
  const uint64_t below = end == CHUNK ? ~0ull : (1ull << end) - 1;
  return below & ~((1ull << begin) - 1);
}

// One row's scores become weights; returns the factor by which earlier results shrink.
float soften(const float* scores, uint64_t seen, float scale, float& top, float& sum, bf16* weights) {
  const __m512 none = _mm512_set1_ps(NONE), factor = _mm512_set1_ps(scale);
  __m512 s[4];
  for (int j = 0; j < 4; ++j) {
    const __mmask16 mask = static_cast<__mmask16>(seen >> (j * TILE));
    s[j] = _mm512_mask_mul_ps(none, mask, _mm512_load_ps(scores + j * TILE), factor);
  }
  const __m512 most = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
  const float before = top;
  top = std::max(before, _mm512_reduce_max_ps(most));
  if (top == NONE) {
    std::memset(weights, 0, CHUNK * sizeof(bf16));
    return 1.f;
  }
  const __m512 base = _mm512_set1_ps(top);
  __m512 total = _mm512_setzero_ps();
  for (int j = 0; j < 4; ++j) {
    const __mmask16 mask = static_cast<__mmask16>(seen >> (j * TILE));
    s[j] = _mm512_maskz_mov_ps(mask, exp2_of(_mm512_sub_ps(s[j], base)));
    total = _mm512_add_ps(total, s[j]);
  }
  for (int j = 0; j < 4; j += 2) {
    const __m512bh pair = _mm512_cvtne2ps_pbh(s[j + 1], s[j]);
    _mm512_store_si512(weights + j * TILE, (__m512i)pair);
  }
  const float shrink = before == top ? 1.f : std::exp2(before - top);
  sum = sum * shrink + _mm512_reduce_add_ps(total);
  return shrink;
}

inline int64_t padded(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

// One KV head's queries, side by side; zeros up to a whole tile.
void load_query(const Inputs& in, const Task& task, int64_t head, bf16* query) {
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
void find_rows(const Inputs& in, const Task& task, int64_t count, Cursor& cursor, Rows& rows) {
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

// One KV head's share of a chunk's rows; what is missing to a chunk is zeros.
void rows_of_head(const Inputs& in, int64_t head, int64_t count, const Rows& rows, Rows& own) {
  for (int64_t i = 0; i < count; ++i) {
    own.keys[i] = rows.keys[i] + head * in.key_dim;
    own.values[i] = rows.values[i] + head * in.value_dim;
  }
  for (int64_t i = count; i < CHUNK; ++i) own.keys[i] = own.values[i] = ZEROS;
}

// Attend from a task's tokens to one chunk, for the KV head whose rows begin at `base`.
void attend(
    const Inputs& in, const Task& task, int64_t start, int64_t count, int64_t base, Scratch& s) {
  const int64_t rows = task.tokens * in.groups;
  const int halves = count > PAIR ? 2 : 1;
  for (int64_t first_row = 0; first_row < rows; first_row += TILE) {
    const int64_t end_row = std::min<int64_t>(rows, first_row + TILE);
    // Positions grow along an item, or lie behind all its keys.
    if (in.positions[task.token + (end_row - 1) / in.groups] < start) continue;
    score(s.query + (base + first_row) * in.key_dim, s.keys, in.key_dim, s.scores);
    for (int64_t row = first_row; row < end_row; ++row) {
      const int64_t token = task.token + row / in.groups;
      const int64_t end = std::min(count, in.positions[token] - start + 1);
      const float shrink = soften(
          s.scores + (row - first_row) * CHUNK, key_bits(in.first[token] - start, end), in.scale,
          s.top[base + row], s.sum[base + row], s.weights + (row - first_row) * CHUNK);
      if (shrink != 1.f) {
        float* old = s.out + (base + row) * in.value_dim;
        for (int64_t d = 0; d < in.value_dim; ++d) old[d] *= shrink;
      }
    }
    float* out = s.out + (base + first_row) * in.value_dim;
    accumulate(s.weights, s.values, halves, in.value_dim, out);
  }
}

void run(const Inputs& in, const Task& task, Scratch& s, float* out, float* top, float* sum) {
  const int64_t rows = task.tokens * in.groups, heads = task.end_head - task.head;
  const int64_t stride = padded(rows);
  for (int64_t head = 0; head < heads; ++head)
    load_query(in, task, task.head + head, s.query + head * stride * in.key_dim);
  std::fill_n(s.out, heads * stride * in.value_dim, 0.f);
  std::fill_n(s.top, heads * stride, NONE);
  std::fill_n(s.sum, heads * stride, 0.f);
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
      pack_keys(own.keys, (left(start) + TILE - 1) / TILE, in.key_dim, s.keys);
      pack_values(own.values, left(start) > PAIR ? 2 : 1, in.value_dim, s.values);
      attend(in, task, start, left(start), head * stride, s);
    }
  }
  for (int64_t head = 0; head < heads; ++head) {
    const float* from = s.out + head * stride * in.value_dim;
    std::memcpy(out + head * rows * in.value_dim, from, rows * in.value_dim * sizeof(float));
    std::memcpy(top + head * rows, s.top + head * stride, rows * sizeof(float));
    std::memcpy(sum + head * rows, s.sum + head * stride, rows * sizeof(float));
  }
}

// A range of tokens and keys of one item; its KV heads are not yet dealt out.
struct Piece {
  int64_t token, tokens, table, first_key, end_key;
};

std::vector<Piece> pieces_of(const Inputs& in, const int32_t* items, int64_t count) {
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
      for (int64_t key = begin; key < end; key += SPLIT)
        pieces.push_back({token, tokens, item[2], key, std::min(end, key + SPLIT)});
    }
  }
  return pieces;
}

std::vector<Task> cut(const Inputs& in, const int32_t* items, int64_t count, int64_t& partials) {
  const std::vector<Piece> pieces = pieces_of(in, items, count);
  // A key's heads lie side by side in memory: together where there is work enough for all threads.
  const bool enough = static_cast<int64_t>(pieces.size()) >= 4 * at::get_num_threads();
  std::vector<Task> tasks;
  partials = 0;
  for (const Piece& p : pieces) {
    const int64_t fit = std::max<int64_t>(1, MAX_ROWS / padded(p.tokens * in.groups));
    const int64_t step = at::get_num_threads() == 1 || enough ? fit : 1;
    for (int64_t head = 0; head < in.kv_heads; head += step) {
      const int64_t end = std::min(in.kv_heads, head + step);
      tasks.push_back({p.token, p.tokens, p.table, p.first_key, p.end_key, head, end, partials});
      partials += (end - head) * p.tokens * in.groups;
    }
  }
  return tasks;
}

struct Partials {
  std::vector<float> top, sum;
  at::Tensor out;
};

void merge(
    const Inputs& in, const std::vector<Task>& tasks, const Partials& partials, int64_t tokens,
    bf16* out, float* lse) {
  // Which partial rows each token's rows of each KV head have.
  std::vector<std::vector<int64_t>> rows(tokens * in.kv_heads);
  for (const Task& task : tasks) {
    int64_t partial = task.partial;
    for (int64_t head = task.head; head < task.end_head; ++head)
      for (int64_t t = 0; t < task.tokens; ++t, partial += in.groups)
        rows[(task.token + t) * in.kv_heads + head].push_back(partial);
  }
  const float* parts = partials.out.const_data_ptr<float>();
  at::parallel_for(0, tokens * in.kv_heads, 32, [&](int64_t begin, int64_t end) {
    std::vector<float> total(in.value_dim);
    for (int64_t index = begin; index < end; ++index) {
      for (int64_t group = 0; group < in.groups; ++group) {
        const int64_t row = index * in.groups + group;
        float top = NONE, sum = 0.f;
        for (int64_t part : rows[index]) top = std::max(top, partials.top[part + group]);
        std::fill(total.begin(), total.end(), 0.f);
        if (top != NONE) {
          for (int64_t part : rows[index]) {
            const float weight = std::exp2(partials.top[part + group] - top);
            sum += weight * partials.sum[part + group];
            const float* from = parts + (part + group) * in.value_dim;
            for (int64_t d = 0; d < in.value_dim; ++d) total[d] += weight * from[d];
          }
        }
        const float factor = sum > 0.f ? 1.f / sum : 0.f;
        for (int64_t d = 0; d < in.value_dim; ++d) out[row * in.value_dim + d] = total[d] * factor;
        lse[row] = sum > 0.f ? (top + std::log2(sum)) * LN2 : FLOOR;
      }
    }
  });
}

bool allow_tiles() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return allowed;
}

std::tuple<at::Tensor, at::Tensor> paged_attention(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& items, const at::Tensor& tables, const at::Tensor& positions,
    const at::Tensor& first, double scale) {
  const int64_t tokens = query.size(0), heads = query.size(1);
  Inputs in{};
  in.block_size = keys.size(1);
  in.kv_heads = keys.size(2);
  in.groups = heads / in.kv_heads;
  in.key_dim = keys.size(3);
  in.value_dim = values.size(3);
  for (const at::Tensor* tensor : {&query, &keys, &values})
    TORCH_CHECK(tensor->scalar_type() == at::kBFloat16, "queries, keys and values must be bfloat16");
  TORCH_CHECK(query.stride(2) == 1 && keys.is_contiguous() && values.is_contiguous(), "strides");
  TORCH_CHECK(in.key_dim % PAIR == 0 && in.key_dim <= MAX_DIM, "key_dim");
  TORCH_CHECK(in.value_dim % PAIR == 0 && in.value_dim <= MAX_DIM, "value_dim");
  TORCH_CHECK(heads % in.kv_heads == 0 && in.groups <= HEAD_ROWS, "heads");
  TORCH_CHECK(items.scalar_type() == at::kInt && tables.scalar_type() == at::kInt, "int32");
  TORCH_CHECK(items.is_contiguous() && items.size(1) == ITEM_FIELDS, "items");
  TORCH_CHECK(positions.scalar_type() == at::kLong && first.scalar_type() == at::kLong, "int64");
  TORCH_CHECK(positions.size(0) == tokens && first.size(0) == tokens, "a position a token");
  TORCH_CHECK(allow_tiles(), "this CPU, or its kernel, has no AMX tiles");
  in.query = query.const_data_ptr<bf16>();
  in.query_token = query.stride(0);
  in.query_head = query.stride(1);
  in.keys = keys.const_data_ptr<bf16>();
  in.values = values.const_data_ptr<bf16>();
  in.key_slot = in.kv_heads * in.key_dim;
  in.value_slot = in.kv_heads * in.value_dim;
  in.tables = tables.const_data_ptr<int32_t>();
  in.positions = positions.const_data_ptr<int64_t>();
  in.first = first.const_data_ptr<int64_t>();
  in.scale = static_cast<float>(scale) * LOG2E;

  int64_t rows = 0;
  const std::vector<Task> tasks = cut(in, items.const_data_ptr<int32_t>(), items.size(0), rows);
  Partials partials{
      std::vector<float>(rows), std::vector<float>(rows),
      at::empty({rows, in.value_dim}, query.options().dtype(at::kFloat))};
  float* parts = partials.out.mutable_data_ptr<float>();
  std::atomic<size_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    const TileConfig config;
    for (int64_t worker = begin; worker < end; ++worker) {
      _tile_loadconfig(&config);
      for (size_t index = next++; index < tasks.size(); index = next++) {
        const Task& task = tasks[index];
        run(in, task, scratch, parts + task.partial * in.value_dim,
            partials.top.data() + task.partial, partials.sum.data() + task.partial);
      }
      _tile_release();
    }
  });
  at::Tensor out = at::empty({tokens, heads, in.value_dim}, query.options());
  at::Tensor lse = at::empty({tokens, heads}, query.options().dtype(at::kFloat));
  merge(in, tasks, partials, tokens, out.mutable_data_ptr<bf16>(), lse.mutable_data_ptr<float>());
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY(radixkv, library) {
  library.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor items, Tensor tables, "
      "Tensor positions, Tensor first, float scale) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(radixkv, CPU, library) { library.impl("paged_attention", &paged_attention); }
