// A fixed team of threads for short parallel regions (a decode step has a hundred of ~20 us).
//
// Workers spin briefly for the next region and then sleep on a futex. Libraries were measured
// first: libgomp takes 5.6 ms to wake a worker that slept, oneTBB leaves a 20 us region on one
// thread (docs/performance.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include "core/flush_denormals.h"

namespace replayssm {

class ThreadPool {
 public:
  // `threads` counts the caller; 0 = one per available core. Throws Error if the system refuses.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(thread) once on every thread, thread in [0, size()), with denormals flushed to zero,
  // and waits for all of them. The first exception is rethrown. One region at a time: a second one,
  // from inside or from another thread, throws Error.
  template <class Fn>
  void run(Fn&& fn) {
    using F = std::remove_reference_t<Fn>;
    run_region([](void* f, int thread) { (*static_cast<F*>(f))(thread); },
               const_cast<void*>(static_cast<const void*>(&fn)));
  }

  // The object of type T that belongs to `thread`: scratch memory, caches. Made on first use, lives
  // as long as the pool; inside a region only for the thread that asks.
  template <class T>
  T& local(int thread) {
    auto& objects = locals_[static_cast<size_t>(thread)].objects;
    for (auto& [type, object] : objects)
      if (type == typeid(T)) return *static_cast<T*>(object.get());
    objects.emplace_back(typeid(T), std::make_shared<T>());
    return *static_cast<T*>(objects.back().second.get());
  }

  // Splits [0, count) into one contiguous range per thread and calls fn(begin, end, thread) for
  // those that are not empty. The split depends on count and size() alone.
  template <class Fn>
  void for_ranges(int64_t count, Fn&& fn) {
    const int64_t threads = size();
    if (threads == 1 || count <= 1) {
      const FlushDenormals mode;
      if (count > 0) fn(int64_t{0}, count, 0);
      return;
    }
    run([&](int thread) {
      const int64_t begin = count * thread / threads;
      const int64_t end = count * (thread + 1) / threads;
      if (begin < end) fn(begin, end, thread);
    });
  }

 private:
  using Region = void (*)(void* fn, int thread);
  struct alignas(64) Locals {
    std::vector<std::pair<std::type_index, std::shared_ptr<void>>> objects;
  };

  void stop();
  void run_region(Region region, void* fn);
  void work(int thread);
  void call(int thread) noexcept;

  std::vector<std::thread> workers_;
  std::vector<Locals> locals_;
  Region region_ = nullptr;
  void* fn_ = nullptr;
  std::exception_ptr error_;
  std::atomic<bool> running_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> pending_{0};
};

}  // namespace replayssm
