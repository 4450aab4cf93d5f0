// A team of threads that meet between the phases of one operator.

#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace radixkv {

// Turning round finds out soonest; after some 100 us whoever else wants the processor may have it.
// Yielding instead of sleeping would hand it over for whole slices of milliseconds.
constexpr int TURNS = 6000;

// One thread's place in the team.
class Member {
 public:
  struct Meeting {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
    alignas(64) std::atomic<int> asleep{0};
  };

  Member(Meeting& meeting, int size, int index) : size(size), index(index), meeting_(meeting) {}
  const int size, index;

  // Wait until all have come here.
  void meet() {
    if (size == 1) return;
    Meeting& here = meeting_;
    const int round = here.round.load(std::memory_order_relaxed);
    if (here.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      here.arrived.store(0, std::memory_order_relaxed);
      here.round.store(round + 1);
      if (here.asleep.load() > 0) futex(here.round, FUTEX_WAKE_PRIVATE, size);
      return;
    }
    for (int turn = 0; turn < TURNS; ++turn) {
      if (here.round.load(std::memory_order_acquire) != round) return;
      _mm_pause();
    }
    // Whoever ends the round sees that somebody sleeps, or this one sees that it has ended.
    here.asleep.fetch_add(1);
    while (here.round.load() == round) futex(here.round, FUTEX_WAIT_PRIVATE, round);
    here.asleep.fetch_sub(1);
  }

  // This one's share of `total` rows or the like.
  int64_t first(int64_t total) const { return total * index / size; }
  int64_t last(int64_t total) const { return total * (index + 1) / size; }

 private:
  static void futex(std::atomic<int>& word, int operation, int value) {
    static_assert(sizeof(word) == sizeof(int));
    syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
  }

  Meeting& meeting_;
};

// Work that is dealt out a portion at a time, to whoever comes first.
class Portions {
 public:
  // Calls each(begin, end) until nothing is left; every thread of a team calls this.
  template <typename Each>
  void deal(int64_t total, int64_t portion, const Each& each) {
    for (int64_t begin = take(portion); begin < total; begin = take(portion))
      each(begin, std::min(total, begin + portion));
  }
  int64_t take(int64_t portion) { return next_.fetch_add(portion, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

// Run body(member) on the threads that torch's operators use; it must not throw.
template <typename Body>
void together(const Body& body) {
  Member::Meeting meeting;
  const int wanted = omp_in_parallel() ? 1 : at::get_num_threads();
  // Fewer may come than were asked for.
#pragma omp parallel num_threads(wanted) if (wanted > 1)
  {
    Member member(meeting, omp_get_num_threads(), omp_get_thread_num());
    body(member);
  }
}

}  // namespace radixkv
