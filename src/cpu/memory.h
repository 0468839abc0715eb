// Memory of a call: aligned buffers, and scratch that each thread keeps for its next call.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "base/hd.h"

namespace jali::cpu {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t aligned_bytes(std::size_t n) {
  return (n + kAlignment - 1) / kAlignment * kAlignment;
}

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};

/// Uninitialised memory, aligned for whole vectors.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(i64 n) {
    if (n == 0) return;
    // PERF: huge pages where they pay: a call that packs 24 MB spent a tenth of it on page faults.
    constexpr std::size_t kHugePage = 2 << 20;
    const bool huge = n * sizeof(T) >= 2 * kHugePage;
    const std::size_t alignment = huge ? kHugePage : kAlignment;
    const std::size_t bytes = (n * sizeof(T) + alignment - 1) / alignment * alignment;
    memory_.reset(static_cast<T*>(std::aligned_alloc(alignment, bytes)));
    if (!memory_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (huge) madvise(memory_.get(), bytes, MADV_HUGEPAGE);  // a hint, may fail
#endif
  }
  T* get() const { return memory_.get(); }

 private:
  std::unique_ptr<T, FreeMemory> memory_;
};

/// Hands out pieces of one block; on a null block it only counts.
class Bump {
 public:
  explicit Bump(char* block) : block_(block) {}
  template <class T>
  T* take(i64 n) {
    T* piece = block_ ? reinterpret_cast<T*>(block_ + used_) : nullptr;
    used_ += aligned_bytes(n * sizeof(T));
    return piece;
  }
  std::size_t used() const { return used_; }
  bool counts() const { return block_ == nullptr; }

 private:
  char* block_;
  std::size_t used_ = 0;
};

/// At least this much memory of this thread, which keeps it.
inline char* thread_scratch(std::size_t bytes) {
  thread_local Buffer<char> memory;
  thread_local std::size_t size = 0;
  if (bytes > size) {
    size = 0;
    memory = Buffer<char>();
    memory = Buffer<char>(static_cast<i64>(bytes));
    size = bytes;
  }
  return memory.get();
}

/// Calls layout(Bump&) twice: to count, and with scratch of this thread. The scratch is the
/// thread's only one: never nest.
template <class Layout>
void with_scratch(Layout layout) {
  Bump count(nullptr);
  layout(count);
  Bump scratch(thread_scratch(count.used()));
  layout(scratch);
}

}  // namespace jali::cpu
