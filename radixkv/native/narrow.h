// One task of few query rows: all its KV heads' rows lie side by side in tiles, and weights are turned
// round in place of values.
//
// A tail has as many query rows a KV head as query heads share it, which fill few lanes. So several heads
// make a set, each with lanes of its own: its queries are zeros in the others' lanes, scores of all heads
// add up to one tile, and one softmax serves all. In the second product a head's values meet all rows of
// the set; its own are written out.

#pragma once

#include "gather.h"
#include "softmax.h"

namespace radixkv {

inline bool is_narrow(const Inputs& in, const Task& task) {
  return task.tokens * in.groups <= TILE;
}

// KV heads side by side.
struct Set {
  int64_t head, end_head;  // from the task's first
  int64_t place;           // of its first lane in the buffers
};

// Which keys each lane of a set sees; lanes of no row see what others see.
inline void find_lanes(const Inputs& in, const Task& task, Scratch& s) {
  const int64_t rows = task.tokens * in.groups;
  for (int64_t lane = 0; lane < TILE; ++lane) {
    const int64_t token = task.token + lane % rows / in.groups;
    s.begins[lane] = static_cast<int32_t>(std::max(in.first[token], task.first_key));
    s.ends[lane] = static_cast<int32_t>(std::min(in.positions[token] + 1, task.end_key));
  }
}

// A head's queries in its own lanes, zeros in the others.
inline void load_lanes(const Inputs& in, const Task& task, int64_t head, int64_t lane, bf16* to) {
  const bf16* from[TILE];
  std::fill_n(from, TILE, ZEROS);
  const bf16* const first = in.query + (task.head + head) * in.groups * in.query_head;
  for (int64_t token = task.token; token < task.token + task.tokens; ++token)
    for (int64_t group = 0; group < in.groups; ++group, ++lane)
      from[lane] = first + token * in.query_token + group * in.query_head;
  pack_rows(from, in.key_dim, to);
}

// Earlier results of a set's rows shrink where their tops grow: tiles of (rows, dimensions).
inline void shrink_rows(const Shrink& shrink, int64_t tiles, float* out) {
  alignas(64) float factors[TILE];
  _mm512_store_ps(factors, shrink.factors);
  for (int64_t tile = 0; tile < tiles; ++tile, out += SQUARE)
    for (int row = 0; row < TILE; ++row) {
      float* at = out + row * TILE;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_set1_ps(factors[row]), _mm512_load_ps(at)));
    }
}

// The scores of a chunk for a set, two or four tiles of keys.
template <int TILES>
inline void score_set(
    const Inputs& in, const Task& task, const Set& set, int64_t start, const Rows& rows, Scratch& s,
    Ahead& ahead) {
  begin_scores<TILES>();
  for (int64_t head = set.head; head < set.end_head; ++head)
    add_scores<TILES>(
        keys_of(in, task, head, start, rows, s), s.query + head * TILE * in.key_dim, in.key_dim,
        [&] { ahead.step(); });
  end_scores<TILES>(s.scores);
}

// Attend from a set's rows to one chunk.
inline void attend_set(
    const Inputs& in, const Task& task, const Set& set, int64_t start, const Rows& rows, Scratch& s,
    Ahead& ahead) {
  const int64_t last = _mm512_reduce_max_epi32(_mm512_load_si512(s.ends)) - start;
  const int64_t reach = std::min(rows.count, last), used = (reach + PAIR - 1) / PAIR * PAIR;
  const bool seen = _mm512_reduce_min_epi32(_mm512_load_si512(s.begins)) < start + rows.count;
  if (reach <= 0 || !seen) return;
  if (used <= PAIR) {
    score_set<2>(in, task, set, start, rows, s, ahead);
  } else {
    score_set<4>(in, task, set, start, rows, s, ahead);
  }
  ahead.step();
  hide(s.begins, s.ends, start, used, s.scores);
  float* out = s.out + set.head * TILE * in.value_dim;
  const bool first = start <= task.first_key;
  const Shrink shrink =
      soften(s.scores, used, in.scale, s.tops + set.place, s.totals + set.place, s.weights);
  if (!first && shrink.grown != 0)
    shrink_rows(shrink, (set.end_head - set.head) * in.value_dim / TILE, out);
  turn_weights(used, s.weights);
  ahead.step();
  for (int64_t head = set.head; head < set.end_head; ++head, out += TILE * in.value_dim) {
    const bf16* own[CHUNK];
    find_values(in, head, rows, own);
    interleave_values(own, used, in.value_dim, s.values, [&] { ahead.step(); });
    accumulate<Turned::weights>(s.values, s.weights, used, in.value_dim, first, out);
    ahead.step();
  }
}

// A head's results: its lanes, with the dimensions in their order again.
inline void write_lanes(
    const Inputs& in, int64_t rows, int64_t lane, const float* from, float* out) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < in.value_dim; d += PAIR) {
      const float* at = from + d * TILE + (lane + row) * TILE;
      const __m512 even = _mm512_load_ps(at), odd = _mm512_load_ps(at + SQUARE);
      float* to = out + row * in.value_dim + d;
      _mm512_storeu_ps(to, _mm512_permutex2var_ps(even, low, odd));
      _mm512_storeu_ps(to + TILE, _mm512_permutex2var_ps(even, high, odd));
    }
}

inline void run_narrow(
    const Inputs& in, const Task& task, const Task* following, bool fetched, Scratch& s, float* out,
    Sums* sums) {
  const int64_t rows = task.tokens * in.groups, heads = task.end_head - task.head;
  const int64_t together = TILE / rows, sets = (heads + together - 1) / together;
  for (int64_t head = 0; head < heads; ++head)
    load_lanes(in, task, head, head % together * rows, s.query + head * TILE * in.key_dim);
  find_lanes(in, task, s);
  std::fill_n(s.tops, sets * TILE, NONE);
  std::fill_n(s.totals, sets * TILE, 0.f);
  const auto attend = [&](int64_t start, const Rows& now, Ahead& ahead) {
    for (int64_t set = 0; set < sets; ++set) {
      const int64_t head = set * together;
      attend_set(
          in, task, {head, std::min(heads, head + together), set * TILE}, start, now, s, ahead);
    }
  };
  walk(in, task, following, fetched, 3 * heads + heads * (in.key_dim / PAIR + 2 * in.value_dim / PAIR), s, attend);
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t lane = head % together * rows, place = head / together * TILE + lane;
    write_lanes(in, rows, lane, s.out + head * TILE * in.value_dim, out + head * rows * in.value_dim);
    for (int64_t row = 0; row < rows; ++row)
      sums[head * rows + row] = {s.tops[place + row], s.totals[place + row]};
  }
}

}  // namespace radixkv
