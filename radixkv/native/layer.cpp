// Whole decoder blocks of the llama shape in one operator, and their matrix product alone.
//
// Between operators a small step waits for its threads and moves what it has just computed: here
// they meet between the phases of a block, and stay until the last block is done.

#ifdef __AMX_BF16__

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>

#include "block.h"
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

// A model's blocks as they are given: four weights a block, two norms or four, biases of all or none.
struct Given {
  const at::TensorList weights, scales, norms, qkv_biases, o_biases;
  const int64_t count;
  bool of_all(const at::TensorList& list, int64_t each) const {
    return static_cast<int64_t>(list.size()) == each * count;
  }
  bool fits() const {
    return of_all(weights, 4) && (scales.empty() || of_all(scales, 4)) &&
        (of_all(norms, 2) || of_all(norms, 4)) && (qkv_biases.empty() || of_all(qkv_biases, 1)) &&
        (o_biases.empty() || of_all(o_biases, 1));
  }
};

// One of the blocks, as far as its own tensors say; `dim` is a head's width.
Block block_of(const Given& given, int64_t index, int64_t width, int64_t kv_heads, int64_t dim) {
  Block b{};
  Weight* const parts[] = {&b.qkv, &b.o, &b.gate_up, &b.down};
  for (int64_t i = 0; i < 4; ++i)
    *parts[i] = packed(
        given.weights[4 * index + i], given.scales.empty() ? nullptr : &given.scales[4 * index + i]);
  b.hidden = width;
  b.heads = b.o.inputs / dim;
  TORCH_CHECK(b.heads * dim == b.o.inputs, "heads of one width");
  TORCH_CHECK(b.qkv.outputs == (b.heads + 2 * kv_heads) * dim, "qkv");
  TORCH_CHECK(b.qkv.inputs == width && b.gate_up.inputs == width, "widths");
  TORCH_CHECK(b.o.outputs == width && b.down.outputs == width, "widths");
  TORCH_CHECK(b.gate_up.outputs == 2 * b.down.inputs, "gate and up");
  if (!given.qkv_biases.empty()) b.qkv_bias = bias_of(given.qkv_biases[index], b.qkv.outputs);
  if (!given.o_biases.empty()) b.o_bias = bias_of(given.o_biases[index], width);
  const int64_t norms = given.norms.size() / given.count;
  b.norm = vector_of(given.norms[norms * index], width);
  b.second_norm = vector_of(given.norms[norms * index + 1], width);
  if (norms == 4) {
    b.query_norm = vector_of(given.norms[norms * index + 2], dim);
    b.key_norm = vector_of(given.norms[norms * index + 3], dim);
  }
  return b;
}

// What rotates queries and keys, the same in all blocks; nothing if there is nothing.
struct Angles {
  const bf16 *cos, *sin;
  int64_t rotated;
};

Angles angles_of(
    const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, int64_t rows,
    int64_t dim) {
  TORCH_CHECK(cos.has_value() == sin.has_value(), "angles");
  if (!cos) return {};
  const int64_t rotated = cos->size(-1);
  TORCH_CHECK(rotated <= dim && rotated % 2 == 0, "angles");
  for (const auto& angles : {*cos, *sin}) {
    TORCH_CHECK(angles.scalar_type() == at::kBFloat16 && angles.is_contiguous(), "angles");
    TORCH_CHECK(angles.numel() == rows * rotated, "angles for each token");
  }
  return {cos->const_data_ptr<bf16>(), sin->const_data_ptr<bf16>(), rotated};
}

// Of a store with so many slots.
const int64_t* slots_of(const at::Tensor& slots, int64_t rows, int64_t room) {
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots");
  TORCH_CHECK(slots.size(0) == rows, "a slot a token");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row)
    TORCH_CHECK(-1 <= slot[row] && slot[row] < room, "slot ", slot[row]);
  return slot;
}

Copies copies_of(const std::optional<at::Tensor>& copies, int64_t room) {
  if (!copies) return {};
  TORCH_CHECK(copies->scalar_type() == at::kLong && copies->is_contiguous(), "copies");
  TORCH_CHECK(copies->dim() == 2 && copies->size(0) == 2, "a target a source");
  const int64_t count = copies->size(1);
  const int64_t* sources = copies->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < 2 * count; ++i)
    TORCH_CHECK(0 <= sources[i] && sources[i] < room, "slot ", sources[i]);
  return {sources, sources + count, count};
}

at::Tensor decoder_layers(
    const at::Tensor& hidden, at::TensorList weights, at::TensorList scales, at::TensorList norms,
    at::TensorList qkv_biases, at::TensorList o_biases, const std::optional<at::Tensor>& cos,
    const std::optional<at::Tensor>& sin, at::TensorList keys, at::TensorList values,
    const at::Tensor& slots, const std::optional<at::Tensor>& copies, at::TensorList reads,
    double scale, double eps, double head_eps, double residual) {
  TORCH_CHECK(hidden.dim() == 2 && hidden.is_contiguous(), "hidden");
  TORCH_CHECK(hidden.scalar_type() == at::kBFloat16, "hidden");
  const Given given{
      weights, scales, norms, qkv_biases, o_biases, static_cast<int64_t>(keys.size())};
  TORCH_CHECK(given.count > 0 && given.fits() && given.of_all(values, 1), "lists");
  TORCH_CHECK(reads.size() == 4, "reads");
  TORCH_CHECK(allow_tiles(), "this CPU, or its kernel, has no AMX tiles");
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  const int64_t dim = keys[0].size(-1);
  TORCH_CHECK(dim > 0, "an empty store");
  const int64_t heads = weights[1].size(1) * PAIR / dim;
  const Angles angles = angles_of(cos, sin, rows, dim);
  std::vector<Block> blocks;
  std::vector<Inputs> inputs;
  for (int64_t i = 0; i < given.count; ++i) {
    TORCH_CHECK(keys[i].sizes() == keys[0].sizes(), "stores of one shape");
    Inputs in = store_inputs(
        {keys[i], values[i], reads[0], reads[1], reads[2], reads[3]}, rows, heads, scale);
    TORCH_CHECK(in.value_dim == dim, "heads of one width");
    Block b = block_of(given, i, width, in.kv_heads, dim);
    TORCH_CHECK(b.heads == heads && b.down.inputs == weights[3].size(1) * PAIR, "blocks of one shape");
    b.cos = angles.cos;
    b.sin = angles.sin;
    b.rotated = angles.rotated;
    b.eps = eps;
    b.head_eps = head_eps;
    b.residual = residual;
    blocks.push_back(b);
    inputs.push_back(in);
  }
  const int64_t room = keys[0].size(0) * keys[0].size(1);
  const int64_t* slot = slots_of(slots, rows, room);
  const Copies copied = copies_of(copies, room);

  int64_t partials = 0;
  const std::vector<Task> tasks = cut(
      inputs[0], reads[0].const_data_ptr<int32_t>(), reads[0].size(0), at::get_num_threads(),
      partials);
  const Places places = places_of(inputs[0], tasks, rows);
  static thread_local Arena arena;
  const Buffers buffers(arena, blocks[0], rows, dim, partials);
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i].query = buffers.projected;
    inputs[i].query_token = blocks[i].qkv.outputs;
    inputs[i].query_head = dim;
  }
  at::Tensor out = at::empty_like(hidden);
  const bf16* first = hidden.const_data_ptr<bf16>();
  bf16* to = out.mutable_data_ptr<bf16>();
  std::vector<Phases> phases(blocks.size());
  together([&](Member& member) {
    const TileConfig config;
    _tile_loadconfig(&config);
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (i > 0) member.meet();
      run_block(
          member, phases[i], inputs[i], blocks[i], buffers, tasks, places, slot, copied,
          i == 0 ? first : to, rows, to);
    }
    _tile_release();
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(radixkv, library) {
  library.def(
      "linear(Tensor inputs, Tensor weight, Tensor? bias, Tensor? scales=None) -> Tensor");
  library.def(
      "decoder_layers(Tensor hidden, Tensor[] weights, Tensor[] scales, Tensor[] norms, "
      "Tensor[] qkv_biases, Tensor[] o_biases, Tensor? cos, Tensor? sin, Tensor(a!)[] keys, "
      "Tensor(b!)[] values, Tensor slots, Tensor? copies, Tensor[] reads, float scale, float eps, "
      "float head_eps, float residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(radixkv, CPU, library) {
  library.impl("linear", &linear);
  library.impl("decoder_layers", &decoder_layers);
}

#endif  // __AMX_BF16__
