#include "core/thread_pool.h"

#include <sched.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "core/check.h"

namespace replayssm {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(50);

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits until `value` differs from `old`: spins first, then sleeps.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  REPLAYSSM_CHECK(threads >= 0, "threads=", threads);
  if (threads == 0) threads = available_cores();
  locals_.resize(static_cast<size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    const size_t started = workers_.size() + 1;
    stop();
    fail("threads: the system refused ", threads, " threads after ", started, ": ", error.what());
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_ = true;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_region(Region region, void* fn) {
  REPLAYSSM_CHECK(!running_.exchange(true, std::memory_order_acquire),
                  "a region of this pool is running already");
  region_ = region;
  fn_ = fn;
  const auto workers = static_cast<uint32_t>(workers_.size());
  if (workers != 0) {
    pending_.store(workers, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  call(0);
  for (uint32_t left; (left = pending_.load(std::memory_order_acquire)) != 0;)
    wait_for_change(pending_, left);
  std::exception_ptr error;
  if (failed_.exchange(false)) error = std::exchange(error_, nullptr);
  running_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

void ThreadPool::work(int thread) {
  for (uint32_t seen = 0;; ++seen) {
    wait_for_change(generation_, seen);
    if (stopping_) return;
    call(thread);
    pending_.fetch_sub(1, std::memory_order_release);
    pending_.notify_one();
  }
}

void ThreadPool::call(int thread) noexcept {
  const FlushDenormals mode;
  try {
    region_(fn_, thread);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

}  // namespace replayssm
