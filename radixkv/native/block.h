// A decoder block of the llama shape, phase by phase; threads meet between the phases.

#pragma once

#include <utility>

#include "arena.h"
#include "elements.h"
#include "multiply.h"
#include "paged.h"

namespace radixkv {

// Sixteen sums with their bias, as the product alone would be stored.
inline __m512 product_of(const float* sums, const bf16* bias, int64_t output) {
  __m512 sum = _mm512_load_ps(sums);
  if (bias != nullptr) sum = _mm512_add_ps(sum, load(bias + output, 0xffff));
  return rounded(sum, static_cast<const bf16*>(nullptr));
}

// What a block does to its rows, besides attention.
struct Block {
  Weight qkv, o, gate_up, down;
  const bf16 *qkv_bias, *o_bias;
  const bf16 *norm, *second_norm, *query_norm, *key_norm;
  const bf16 *cos, *sin;
  float eps, head_eps, residual;
  int64_t hidden, heads, rotated;
};

// A block's buffers, each with rows up to a whole tile.
struct Buffers {
  bf16 *normed, *projected, *attended, *sum, *gated;
  float* parts;
  Sums* sums;
  Buffers(Arena& arena, const Block& b, int64_t rows, int64_t dim, int64_t partials) {
    const int64_t all = padded(rows), inner = b.down.inputs;
    arena.reserve(
        2 * Arena::size_of<bf16>(all * b.hidden) + Arena::size_of<bf16>(all * b.qkv.outputs) +
        Arena::size_of<bf16>(all * b.o.inputs) + Arena::size_of<bf16>(all * inner) +
        Arena::size_of<float>(partials * dim) + Arena::size_of<Sums>(partials));
    normed = arena.take<bf16>(all * b.hidden);
    projected = arena.take<bf16>(all * b.qkv.outputs);
    attended = arena.take<bf16>(all * b.o.inputs);
    sum = arena.take<bf16>(all * b.hidden);
    gated = arena.take<bf16>(all * inner);
    parts = arena.take<float>(partials * dim);
    sums = arena.take<Sums>(partials);
  }
};

// Slots whose keys and values go to other slots, one after the other.
struct Copies {
  const int64_t *sources, *targets;
  int64_t count;
};

inline void copy_slots(const Inputs& in, const Copies& copies) {
  for (const auto& [store, width] : {std::pair(in.keys, in.key_slot), {in.values, in.value_slot}}) {
    bf16* const to = const_cast<bf16*>(store);
    for (int64_t i = 0; i < copies.count; ++i)
      std::memmove(
          to + copies.targets[i] * width, store + copies.sources[i] * width, width * sizeof(bf16));
  }
}

// Normalise and rotate a token's queries and keys, and store its key and value if it has a slot.
inline void place(const Inputs& in, const Block& b, int64_t row, bf16* projected, int64_t slot) {
  const int64_t dim = in.key_dim, turning = b.heads + in.kv_heads;
  for (int64_t head = 0; head < turning; ++head) {
    bf16* at = projected + head * dim;
    const bf16* weight = head < b.heads ? b.query_norm : b.key_norm;
    if (weight != nullptr)
      normalise<bf16, bf16>(at, nullptr, 1.f, weight, b.head_eps, dim, nullptr, at);
    if (b.cos != nullptr)
      turn(at, b.cos + row * b.rotated, b.sin + row * b.rotated, b.rotated / 2);
  }
  if (slot < 0) return;
  const int64_t width = in.key_slot;
  const bf16* key = projected + b.heads * dim;
  std::memcpy(const_cast<bf16*>(in.keys) + slot * width, key, width * sizeof(bf16));
  std::memcpy(const_cast<bf16*>(in.values) + slot * width, key + width, width * sizeof(bf16));
}

// out = hidden + residual * (x times a weight); all of a thread's part.
inline void add_product(
    const Member& member, Portions& portions, const bf16* x, const Weight& w, const bf16* bias,
    const bf16* hidden, float residual, int64_t rows, bf16* out) {
  multiply(
      member, portions, x, w.inputs, w, 2, 1, rows,
      [&](int64_t row, int64_t pair, const float* sums) {
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t output = (2 * pair + half) * TILE, place = row * w.outputs + output;
          const __m512 product = product_of(sums + half * TILE, bias, output);
          store(
              out + place, 0xffff,
              _mm512_fmadd_ps(product, _mm512_set1_ps(residual), load(hidden + place, 0xffff)));
        }
      });
}

inline void normalise_rows(
    const Member& member, const bf16* from, const bf16* weight, const Block& b, int64_t rows,
    bf16* to) {
  for (int64_t row = member.first(rows); row < member.last(rows); ++row)
    normalise<bf16, bf16>(
        from + row * b.hidden, nullptr, 1.f, weight, b.eps, b.hidden, nullptr, to + row * b.hidden);
}

struct Phases {
  Portions qkv, tasks, merges, o, gate_up, down;
};

inline void run_block(
    Member& member, Phases& phases, const Inputs& in, const Block& b, const Buffers& at,
    const std::vector<Task>& tasks, const Places& places, const int64_t* slots,
    const Copies& copies, const bf16* hidden, int64_t rows, bf16* out) {
  normalise_rows(member, hidden, b.norm, b, rows, at.normed);
  member.meet();
  multiply(
      member, phases.qkv, at.normed, b.hidden, b.qkv, 2, 1, rows,
      [&](int64_t row, int64_t pair, const float* sums) {
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t output = (2 * pair + half) * TILE;
          store(
              at.projected + row * b.qkv.outputs + output, 0xffff,
              product_of(sums + half * TILE, b.qkv_bias, output));
        }
      });
  member.meet();
  for (int64_t row = member.first(rows); row < member.last(rows); ++row)
    place(in, b, row, at.projected + row * b.qkv.outputs, slots[row]);
  member.meet();
  if (copies.count > 0) {
    if (member.index == 0) copy_slots(in, copies);
    member.meet();
  }
  run_tasks(in, tasks, phases.tasks, at.parts, at.sums);
  member.meet();
  phases.merges.deal(rows * in.kv_heads, 16, [&](int64_t begin, int64_t end) {
    merge(in, places, at.parts, at.sums, begin, end, at.attended, nullptr);
  });
  member.meet();
  add_product(member, phases.o, at.attended, b.o, b.o_bias, hidden, b.residual, rows, at.sum);
  member.meet();
  normalise_rows(member, at.sum, b.second_norm, b, rows, at.normed);
  member.meet();
  const int64_t inner = b.down.inputs;
  multiply(
      member, phases.gate_up, at.normed, b.hidden, b.gate_up, 1, inner / TILE, rows,
      [&](int64_t row, int64_t pair, const float* sums) {
        const bf16* kind = nullptr;
        const __m512 gate = silu(product_of(sums, nullptr, 0), kind);
        store(
            at.gated + row * inner + pair * TILE, 0xffff,
            _mm512_mul_ps(gate, product_of(sums + TILE, nullptr, 0)));
      });
  member.meet();
  add_product(member, phases.down, at.gated, b.down, nullptr, at.sum, b.residual, rows, out);
}

}  // namespace radixkv
