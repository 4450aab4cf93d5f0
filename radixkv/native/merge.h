// Partial results of attention are merged by their maxima and sums.

#pragma once

#include <cmath>

#include "tasks.h"

namespace radixkv {

constexpr float FLOOR = -1e30f;   // log-sum-exp of no keys at all
constexpr float LN2 = 0.6931471805599453f;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// What one row has gathered so far.
struct Sums {
  float top = NONE, total = 0.f;
};

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
