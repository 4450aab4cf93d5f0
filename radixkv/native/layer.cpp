// A whole decoder block of the llama shape in one operator, and its matrix product alone.
//
// Between operators a small step waits for its threads and moves what it has just computed: here
// they meet between the phases of a block, and stay.

#ifdef __AMX_BF16__

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "arena.h"
#include "elements.h"
#include "multiply.h"
#include "store.h"

namespace {

using namespace radixkv;

// bfloat16, or int8 with scales (outputs).
Weight packed(const at::Tensor& weight, const at::Tensor* scales) {
  const bool bytes = scales != nullptr;
  TORCH_CHECK(weight.scalar_type() == (bytes ? at::kChar : at::kBFloat16), "weight");
  TORCH_CHECK(weight.dim() == 4 && weight.is_contiguous(), "weight");
  TORCH_CHECK(weight.size(2) == TILE && weight.size(3) == PAIR, "weight");
  TORCH_CHECK(weight.size(0) % 2 == 0, "outputs must be a multiple of 32");
  Weight found{nullptr, nullptr, nullptr, weight.size(0) * TILE, weight.size(1) * PAIR};
  if (!bytes) {
    found.tiles = weight.const_data_ptr<bf16>();
    return found;
  }
  TORCH_CHECK(scales->scalar_type() == at::kFloat && scales->is_contiguous(), "scales");
  TORCH_CHECK(scales->numel() == found.outputs, "a scale for each output");
  found.bytes = weight.const_data_ptr<int8_t>();
  found.scales = scales->const_data_ptr<float>();
  return found;
}

const bf16* bias_of(const std::optional<at::Tensor>& bias, int64_t outputs) {
  if (!bias) return nullptr;
  TORCH_CHECK(bias->scalar_type() == at::kBFloat16 && bias->is_contiguous(), "bias");
  TORCH_CHECK(bias->numel() == outputs, "a bias for each output");
  return bias->const_data_ptr<bf16>();
}

const bf16* vector_of(const at::Tensor& weight, int64_t width) {
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.is_contiguous(), "norm");
  TORCH_CHECK(weight.numel() == width, "a weight for each element");
  return weight.const_data_ptr<bf16>();
}

// Sixteen sums with their bias, as the product alone would be stored.
inline __m512 product_of(const float* sums, const bf16* bias, int64_t output) {
  __m512 sum = _mm512_load_ps(sums);
  if (bias != nullptr) sum = _mm512_add_ps(sum, load(bias + output, 0xffff));
  return rounded(sum, static_cast<const bf16*>(nullptr));
}

// inputs (rows, inputs) times a packed weight.
at::Tensor linear(
    const at::Tensor& inputs, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scales) {
  const Weight w = packed(weight, scales ? &*scales : nullptr);
  TORCH_CHECK(inputs.scalar_type() == at::kBFloat16 && inputs.size(-1) == w.inputs, "inputs");
  TORCH_CHECK(allow_tiles(), "this CPU, or its kernel, has no AMX tiles");
  const at::Tensor x = inputs.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.outputs;
  at::Tensor out = at::empty(shape, x.options());
  const int64_t rows = x.numel() / w.inputs, whole = rows / TILE * TILE;
  const bf16* from = x.const_data_ptr<bf16>();
  bf16* to = out.mutable_data_ptr<bf16>();
  const bf16* added = bias_of(bias, w.outputs);
  // The last rows, if they are no whole tile, are read from where there is room behind them.
  static thread_local Arena arena;
  arena.reserve(Arena::size_of<bf16>(TILE * w.inputs));
  bf16* rest = arena.take<bf16>(TILE * w.inputs);
  std::memcpy(rest, from + whole * w.inputs, (rows - whole) * w.inputs * sizeof(bf16));
  Portions first, second;
  const auto store_from = [&](int64_t offset) {
    return [=](int64_t row, int64_t pair, const float* sums) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t output = (2 * pair + half) * TILE;
        store(
            to + (offset + row) * w.outputs + output, 0xffff,
            product_of(sums + half * TILE, added, output));
      }
    };
  };
  together([&](Member& member) {
    const TileConfig config;
    _tile_loadconfig(&config);
    multiply(member, first, from, w.inputs, w, 2, 1, whole, store_from(0));
    if (whole < rows) multiply(member, second, rest, w.inputs, w, 2, 1, rows - whole, store_from(whole));
    _tile_release();
  });
  return out;
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

void copy_slots(const Inputs& in, const Copies& copies) {
  for (const auto& [store, width] : {std::pair(in.keys, in.key_slot), {in.values, in.value_slot}}) {
    bf16* const to = const_cast<bf16*>(store);
    for (int64_t i = 0; i < copies.count; ++i)
      std::memmove(
          to + copies.targets[i] * width, store + copies.sources[i] * width, width * sizeof(bf16));
  }
}

// Normalise and rotate a token's queries and keys, and store its key and value if it has a slot.
void place(const Inputs& in, const Block& b, int64_t row, bf16* projected, int64_t slot) {
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
void add_product(
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

void normalise_rows(
    const Member& member, const bf16* from, const bf16* weight, const Block& b, int64_t rows,
    bf16* to) {
  for (int64_t row = member.first(rows); row < member.last(rows); ++row)
    normalise<bf16, bf16>(
        from + row * b.hidden, nullptr, 1.f, weight, b.eps, b.hidden, nullptr, to + row * b.hidden);
}

struct Phases {
  Portions qkv, tasks, merges, o, gate_up, down;
};

void run_block(
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

at::Tensor decoder_layer(
    const at::Tensor& hidden, at::TensorList weights, at::TensorList scales, at::TensorList norms,
    const std::optional<at::Tensor>& qkv_bias, const std::optional<at::Tensor>& o_bias,
    const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
    const at::Tensor& keys, const at::Tensor& values, const at::Tensor& slots,
    const std::optional<at::Tensor>& copies, at::TensorList reads, double scale, double eps, double head_eps, double residual) {
  TORCH_CHECK(hidden.dim() == 2 && hidden.is_contiguous(), "hidden");
  TORCH_CHECK(hidden.scalar_type() == at::kBFloat16, "hidden");
  TORCH_CHECK(weights.size() == 4 && reads.size() == 4, "lists");
  TORCH_CHECK(scales.empty() || scales.size() == 4, "scales of all weights or of none");
  TORCH_CHECK(norms.size() == 2 || norms.size() == 4, "norms");
  TORCH_CHECK(allow_tiles(), "this CPU, or its kernel, has no AMX tiles");
  const int64_t rows = hidden.size(0), width = hidden.size(1), dim = keys.size(-1);
  Block b{};
  Weight* const parts[] = {&b.qkv, &b.o, &b.gate_up, &b.down};
  for (int i = 0; i < 4; ++i)
    *parts[i] = packed(weights[i], scales.empty() ? nullptr : &scales[i]);
  b.hidden = width;
  b.heads = b.o.inputs / dim;
  Inputs in = store_inputs(
      {keys, values, reads[0], reads[1], reads[2], reads[3]}, rows, b.heads, scale);
  TORCH_CHECK(in.value_dim == dim && b.heads * dim == b.o.inputs, "heads of one width");
  TORCH_CHECK(b.qkv.outputs == (b.heads + 2 * in.kv_heads) * dim, "qkv");
  TORCH_CHECK(b.qkv.inputs == width && b.gate_up.inputs == width, "widths");
  TORCH_CHECK(b.o.outputs == width && b.down.outputs == width, "widths");
  TORCH_CHECK(b.gate_up.outputs == 2 * b.down.inputs, "gate and up");
  b.qkv_bias = bias_of(qkv_bias, b.qkv.outputs);
  b.o_bias = bias_of(o_bias, width);
  b.norm = vector_of(norms[0], width);
  b.second_norm = vector_of(norms[1], width);
  if (norms.size() == 4) {
    b.query_norm = vector_of(norms[2], dim);
    b.key_norm = vector_of(norms[3], dim);
  }
  TORCH_CHECK(cos.has_value() == sin.has_value(), "angles");
  if (cos) {
    b.rotated = cos->size(-1);
    TORCH_CHECK(b.rotated <= dim && b.rotated % 2 == 0, "angles");
    for (const auto& angles : {*cos, *sin}) {
      TORCH_CHECK(angles.scalar_type() == at::kBFloat16 && angles.is_contiguous(), "angles");
      TORCH_CHECK(angles.numel() == rows * b.rotated, "angles for each token");
    }
    b.cos = cos->const_data_ptr<bf16>();
    b.sin = sin->const_data_ptr<bf16>();
  }
  b.eps = eps;
  b.head_eps = head_eps;
  b.residual = residual;
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots");
  TORCH_CHECK(slots.size(0) == rows, "a slot a token");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t room = keys.size(0) * keys.size(1);
  for (int64_t row = 0; row < rows; ++row)
    TORCH_CHECK(-1 <= slot[row] && slot[row] < room, "slot ", slot[row]);
  Copies copied{};
  if (copies) {
    TORCH_CHECK(copies->scalar_type() == at::kLong && copies->is_contiguous(), "copies");
    TORCH_CHECK(copies->dim() == 2 && copies->size(0) == 2, "a target a source");
    copied.count = copies->size(1);
    copied.sources = copies->const_data_ptr<int64_t>();
    copied.targets = copied.sources + copied.count;
    for (int64_t i = 0; i < 2 * copied.count; ++i)
      TORCH_CHECK(0 <= copied.sources[i] && copied.sources[i] < room, "slot ", copied.sources[i]);
  }

  int64_t partials = 0;
  const std::vector<Task> tasks = cut(
      in, reads[0].const_data_ptr<int32_t>(), reads[0].size(0), at::get_num_threads(), partials);
  const Places places = places_of(in, tasks, rows);
  static thread_local Arena arena;
  const Buffers buffers(arena, b, rows, dim, partials);
  in.query = buffers.projected;
  in.query_token = b.qkv.outputs;
  in.query_head = dim;
  at::Tensor out = at::empty_like(hidden);
  const bf16* from = hidden.const_data_ptr<bf16>();
  bf16* to = out.mutable_data_ptr<bf16>();
  Phases phases;
  together([&](Member& member) {
    const TileConfig config;
    _tile_loadconfig(&config);
    run_block(member, phases, in, b, buffers, tasks, places, slot, copied, from, rows, to);
    _tile_release();
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(radixkv, library) {
  library.def(
      "linear(Tensor inputs, Tensor weight, Tensor? bias, Tensor? scales=None) -> Tensor");
  library.def(
      "decoder_layer(Tensor hidden, Tensor[] weights, Tensor[] scales, Tensor[] norms, "
      "Tensor? qkv_bias, Tensor? o_bias, Tensor? cos, Tensor? sin, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
      "Tensor? copies, Tensor[] reads, float scale, float eps, float head_eps, float residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(radixkv, CPU, library) {
  library.impl("linear", &linear);
  library.impl("decoder_layer", &decoder_layer);
}

#endif  // __AMX_BF16__
