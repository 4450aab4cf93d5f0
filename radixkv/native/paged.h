// Paged attention on CPUs with AMX: tasks, each to its partial result.

#pragma once

#include "narrow.h"
#include "team.h"
#include "wide.h"

namespace radixkv {

// One thread's part in all tasks. During each, the first keys and values of the next are fetched.
inline void run_tasks(
    const Inputs& in, const std::vector<Task>& tasks, Portions& portions, float* parts, Sums* sums) {
  const auto next = [&]() -> const Task* {
    const int64_t index = portions.take(1);
    return index < static_cast<int64_t>(tasks.size()) ? &tasks[index] : nullptr;
  };
  const Task *task = next(), *following = nullptr;
  for (bool fetched = false; task != nullptr; task = following, fetched = true) {
    following = next();
    const auto run = is_narrow(in, *task) ? run_narrow : run_wide;
    run(in, *task, following, fetched, own_scratch(), parts + task->partial * in.value_dim,
        sums + task->partial);
  }
}

}  // namespace radixkv
