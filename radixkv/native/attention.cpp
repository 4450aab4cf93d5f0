// The operator of paged attention.

#ifdef __AMX_BF16__

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "store.h"
#include "team.h"

namespace {

using namespace radixkv;

std::tuple<at::Tensor, at::Tensor> paged_attention(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& items, const at::Tensor& tables, const at::Tensor& positions,
    const at::Tensor& first, double scale) {
  TORCH_CHECK(query.dim() == 3 && query.scalar_type() == at::kBFloat16, "query");
  TORCH_CHECK(query.stride(2) == 1, "strides");
  TORCH_CHECK(allow_tiles(), "this CPU, or its kernel, has no AMX tiles");
  const int64_t tokens = query.size(0), heads = query.size(1);
  Inputs in = store_inputs({keys, values, items, tables, positions, first}, tokens, heads, scale);
  TORCH_CHECK(query.size(2) == in.key_dim, "queries must be as wide as keys");
  in.query = query.const_data_ptr<bf16>();
  in.query_token = query.stride(0);
  in.query_head = query.stride(1);
  int64_t rows = 0;
  const std::vector<Task> tasks = cut(
      in, items.const_data_ptr<int32_t>(), items.size(0), at::get_num_threads(), rows);
  std::vector<Sums> sums(rows);
  const at::TensorOptions wide = query.options().dtype(at::kFloat);
  const at::Tensor parts = at::empty({rows, in.value_dim}, wide);
  float* part = parts.mutable_data_ptr<float>();
  Portions portions;
  together([&](Member& member) {
    const TileConfig config;
    _tile_loadconfig(&config);
    run_tasks(in, tasks, portions, part, sums.data());
    _tile_release();
  });
  at::Tensor out = at::empty({tokens, heads, in.value_dim}, query.options());
  at::Tensor lse = at::empty({tokens, heads}, wide);
  const Places places = places_of(in, tasks, tokens);
  at::parallel_for(0, tokens * in.kv_heads, 32, [&](int64_t begin, int64_t end) {
    merge(
        in, places, part, sums.data(), begin, end, out.mutable_data_ptr<bf16>(),
        lse.mutable_data_ptr<float>());
  });
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(radixkv, library) {
  library.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor items, Tensor tables, "
      "Tensor positions, Tensor first, float scale) -> (Tensor, Tensor)");
  library.def("allow_tiles() -> bool", &allow_tiles);
}

TORCH_LIBRARY_IMPL(radixkv, CPU, library) { library.impl("paged_attention", &paged_attention); }

#endif  // __AMX_BF16__
