// The thread pool: everything is done once, also when nested, concurrent, after fork, or thrown in.
#include "base/pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <thread>

#include "check.h"

using namespace jali;

namespace {

/// Sum of 0 .. n - 1 by work handed out one at a time.
long shared_sum(int threads, long n) {
  std::atomic<long> next{0}, sum{0};
  parallel(threads, [&](int) {
    for (long i; (i = next.fetch_add(1)) < n;) sum += i;
  });
  return sum;
}

}  // namespace

TEST(all_work_is_done) {
  for (int round = 0; round < 200; ++round) {
    for (int threads : {1, 2, 3, 8}) {
      if (!CHECK_EQ(shared_sum(threads, 100), 4950L)) return;
    }
  }
}

TEST(workers_have_different_numbers) {
  std::atomic<int> calls[4] = {};
  std::atomic<bool> valid{true};
  parallel(4, [&](int worker) {
    if (worker < 0 || worker >= 4) valid = false;
    if (valid) ++calls[worker];
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  CHECK(valid);
  CHECK_EQ(calls[0].load(), 1);
  for (auto& n : calls) CHECK(n <= 1);
}

TEST(nested_calls) {
  std::atomic<long> total{0};
  parallel(3, [&](int) { total += shared_sum(3, 100); });
  CHECK(total >= 4950 && total % 4950 == 0);
}

TEST(concurrent_callers) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) wrong += shared_sum(3, 50) != 1225;
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(exceptions_reach_the_caller) {
  CHECK_THROWS(parallel(2, [](int) { throw std::runtime_error("from a worker"); }),
               std::runtime_error, "from a worker");
  CHECK_EQ(shared_sum(2, 100), 4950L);
}

#if !defined(__SANITIZE_THREAD__)  // it knows no threads in a forked child
TEST(works_after_fork) {
  CHECK_EQ(shared_sum(4, 100), 4950L);  // workers exist in the parent
  const pid_t child = fork();
  if (child == 0) _exit(shared_sum(4, 100) == 4950 ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_EQ(shared_sum(4, 100), 4950L);
}
#endif
