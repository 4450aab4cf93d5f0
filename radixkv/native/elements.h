// What a decoder block does to one row between its matrix products.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace radixkv {

// inputs + alpha * added into sum, if anything is added, and its RMSNorm into out.
template <typename Value, typename Weight>
void normalise(
    const Value* inputs, const Value* added, float alpha, const Weight* weight, float eps,
    int64_t width, Value* sum, Value* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += LANES) {
    const __mmask16 mask = lanes(width - i);
    __m512 x = load(inputs + i, mask);
    if (added != nullptr) {
      x = rounded(_mm512_fmadd_ps(load(added + i, mask), _mm512_set1_ps(alpha), x), inputs);
      store(sum + i, mask, x);
    }
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  const Value* from = added != nullptr ? sum : inputs;
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
  const __m512 factor = _mm512_set1_ps(1.f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += LANES) {
    const __mmask16 mask = lanes(width - i);
    __m512 x = _mm512_mul_ps(load(from + i, mask), factor);
    // A weight in the model's own type is applied to what was rounded to it, as models do.
    if constexpr (std::is_same_v<Value, Weight>) x = rounded(x, inputs);
    store(out + i, mask, _mm512_mul_ps(x, load(weight + i, mask)));
  }
}

// x / (1 + e^-x), rounded to the type that x was read from.
template <typename Value>
inline __m512 silu(__m512 x, const Value* kind) {
  constexpr float LOG2_OF_E = 1.4426950408889634f;
  // Bounded, for an infinite power is no number less its whole part; 2 to the 200 is infinite, and
  // the quotient 0.
  const __m512 power =
      _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_OF_E)), _mm512_set1_ps(200.f));
  const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.f), exp2_of(power));
  return rounded(_mm512_div_ps(x, below), kind);
}

// silu(gate) * up.
template <typename Value>
void gated(const Value* gate, const Value* up, int64_t width, Value* out) {
  for (int64_t i = 0; i < width; i += LANES) {
    const __mmask16 mask = lanes(width - i);
    const __m512 activated = silu(load(gate + i, mask), gate);
    store(out + i, mask, _mm512_mul_ps(activated, load(up + i, mask)));
  }
}

// Rotate the halves of the first 2 * half elements of a head against each other.
template <typename Value>
void turn(Value* head, const Value* cos, const Value* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += LANES) {
    const __mmask16 mask = lanes(half - i);
    const __m512 a = load(head + i, mask), b = load(head + half + i, mask);
    const __m512 first = _mm512_mul_ps(b, load(sin + i, mask));
    const __m512 second = _mm512_mul_ps(a, load(sin + half + i, mask));
    store(head + i, mask, _mm512_fmsub_ps(a, load(cos + i, mask), first));
    store(head + half + i, mask, _mm512_fmadd_ps(b, load(cos + half + i, mask), second));
  }
}

}  // namespace radixkv
