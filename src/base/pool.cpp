#include "base/pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/hd.h"

namespace jali {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

/// One parallel_call, on its caller's stack.
struct Job {
  void (*call)(void*, int);
  void* context;
  int wanted = 0;               // workers beside the caller
  int joined = 0;               // guarded by the pool's mutex
  std::atomic<int> running{0};  // workers inside `call`
  std::exception_ptr error{};   // guarded by the pool's mutex
  Job* next = nullptr;
};

class Pool {
 public:
  void run(int threads, void (*call)(void*, int), void* context) {
    Job job{call, context, threads - 1};
    {
      std::lock_guard lock(mutex_);
      grow(threads - 1);
      job.next = open_;
      open_ = &job;
      generation_.fetch_add(1, std::memory_order_release);
      for (int n = min_of(sleeping_, threads - 1); n > 0; --n) wake_.notify_one();
    }
    std::exception_ptr error;
    try {
      call(context, 0);
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard lock(mutex_);
      for (Job** at = &open_; *at; at = &(*at)->next) {
        if (*at == &job) {
          *at = job.next;
          break;
        }
      }
    }
    // Whoever joined holds a share of the last pieces of work: a short wait.
    for (int spins = 0; job.running.load(std::memory_order_acquire) != 0; ++spins) {
      spins < kSpins ? relax() : std::this_thread::yield();
    }
    if (!error) error = job.error;
    if (error) std::rethrow_exception(error);
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  // PERF: about 20 µs. Longer than the pause between the phases of one call, shorter than anyone
  // would mind.
  static constexpr int kSpins = 500;

  void grow(int workers) {
    while (num_workers_ < workers) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        return;  // as many as the system grants
      }
      ++num_workers_;
    }
  }

  Job* join_open_job(int& number) {
    for (Job* job = open_; job; job = job->next) {
      if (job->joined < job->wanted) {
        number = ++job->joined;
        job->running.fetch_add(1, std::memory_order_relaxed);
        return job;
      }
    }
    return nullptr;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      int number = 0;
      if (Job* job = join_open_job(number)) {
        lock.unlock();
        std::exception_ptr error;
        try {
          job->call(job->context, number);
        } catch (...) {
          error = std::current_exception();
        }
        if (error) {
          std::lock_guard guard(mutex_);
          job->error = error;
        }
        job->running.fetch_sub(1, std::memory_order_release);  // the job may be gone from here on
        lock.lock();
        continue;
      }
      const unsigned seen = generation_.load(std::memory_order_relaxed);
      lock.unlock();
      for (int spins = 0; spins < kSpins; ++spins) {
        if (generation_.load(std::memory_order_acquire) != seen) break;
        relax();
      }
      lock.lock();
      ++sleeping_;
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      --sleeping_;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Job* open_ = nullptr;
  int num_workers_ = 0, sleeping_ = 0;
  std::atomic<unsigned> generation_{0};  // changes with every new job
};

// Never destroyed: its threads outlive static destructors. A forked child has only the forking
// thread, so it starts with an empty pool of its own.
Pool* the_pool = nullptr;

Pool& pool() {
  static const bool ready = [] {
    the_pool = new Pool;
    pthread_atfork([] { the_pool->lock(); }, [] { the_pool->unlock(); },
                   [] { the_pool = new Pool; });
    return true;
  }();
  static_cast<void>(ready);
  return *the_pool;
}

}  // namespace

void parallel_call(int threads, void (*call)(void*, int), void* context) {
  if (threads <= 1) return call(context, 0);
  pool().run(threads, call, context);
}

int num_cores() {
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores > 0 ? cores : 1;
}

}  // namespace jali
