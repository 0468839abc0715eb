// The library's threads: one pool per process, grown to what callers ask for.
#pragma once

#include <type_traits>

namespace jali {

/// Calls call(context, worker) for worker 0 (this thread) and for up to threads - 1 others with
/// different numbers below `threads`, and returns when all are done. How many take part is not
/// promised: work must be handed out by a shared counter. May be called from several threads and
/// from within a call; safe after fork. An exception of any worker is rethrown here.
void parallel_call(int threads, void (*call)(void* context, int worker), void* context);

template <class F>
void parallel(int threads, F&& f) {
  using Function = std::remove_reference_t<F>;
  parallel_call(
      threads, [](void* context, int worker) { (*static_cast<Function*>(context))(worker); }, &f);
}

/// Cores that this process may use.
int num_cores();

}  // namespace jali
