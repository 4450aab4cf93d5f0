// Buffers that are made once a thread.

#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace radixkv {

// Buffers that live as long as their thread, so that they stay in its processor's cache.
class Arena {
 public:
  void reserve(size_t bytes) {
    if (bytes > size_) {
      size_ = 0;  // If there is no more memory, nothing is here.
      room_.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
      TORCH_CHECK(room_ != nullptr, "out of memory");
      size_ = bytes;
    }
    used_ = 0;
  }
  template <typename Value>
  Value* take(int64_t count) {
    Value* from = reinterpret_cast<Value*>(room_.get() + used_);
    used_ += size_of<Value>(count);
    return from;
  }
  template <typename Value>
  static size_t size_of(int64_t count) {
    return (count * sizeof(Value) + 63) / 64 * 64;
  }

 private:
  struct Free {
    void operator()(char* room) const { std::free(room); }
  };
  std::unique_ptr<char, Free> room_;
  size_t size_ = 0, used_ = 0;
};

}  // namespace radixkv
