#include "block.h"

#include <sanitizer/asan_interface.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace replayssm::cuda {

// What kernels declare as their shared memory.
alignas(1024) char memory[228 * 1024];

}  // namespace replayssm::cuda

namespace replayssm::emulation {

uint3 thread_index, block_index;
dim3 block_size, grid_size;

namespace {

// The sanitizer clears what it knows of a stack at every change-over: small ones are fast.
constexpr size_t kStackBytes = 48 * 1024;
constexpr int kMaxThreads = 1024;

struct Barrier {
  int members = 0, arrived = 0;
  uint64_t passed = 0;

  void reset(int count) { *this = {count, 0, 0}; }
  void open_if_complete() {
    if (members == 0 || arrived < members) return;
    arrived = 0;
    ++passed;
  }
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  bool ended = false;
};

std::vector<std::unique_ptr<Thread>> threads;
ucontext_t scheduler;
Barrier block_barrier, warp_barriers[kMaxThreads / 32], numbered_barriers[16];
Shown shown_by[kMaxThreads];
const std::function<void()>* body;
uint64_t events;  // arrivals and ends: a round without any is a deadlock

Thread& current() { return *threads[thread_index.x]; }

void wait_at(Barrier& barrier) {
  const uint64_t before = barrier.passed;
  ++barrier.arrived;
  ++events;
  barrier.open_if_complete();
  while (barrier.passed == before) swapcontext(&current().context, &scheduler);
}

// Threads that have ended are waited for no longer.
void run_thread() {
  (*body)();
  current().ended = true;
  ++events;
  for (Barrier* barrier : {&block_barrier, &warp_barriers[thread_index.x / 32]}) {
    --barrier->members;
    barrier->open_if_complete();
  }
}

void start(Thread& thread) {
  thread.ended = false;
  ASAN_UNPOISON_MEMORY_REGION(thread.stack.get(), kStackBytes);
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = kStackBytes;
  thread.context.uc_link = &scheduler;
  makecontext(&thread.context, run_thread, 0);
}

// Nothing of another block's is left in shared memory.
void prepare_shared(int bytes) {
  ASAN_UNPOISON_MEMORY_REGION(cuda::memory, sizeof(cuda::memory));
  std::memset(cuda::memory, 0xff, sizeof(cuda::memory));
  ASAN_POISON_MEMORY_REGION(cuda::memory + bytes, sizeof(cuda::memory) - bytes);
}

void run_block(int count, int shared_bytes) {
  prepare_shared(shared_bytes);
  block_barrier.reset(count);
  for (Barrier& barrier : numbered_barriers) barrier.reset(0);
  for (int w = 0; w < count / 32; ++w) warp_barriers[w].reset(32);
  for (int t = 0; t < count; ++t) start(*threads[t]);
  for (bool all_ended = false; !all_ended;) {
    all_ended = true;
    const uint64_t before = events;
    for (unsigned t = 0; t < unsigned(count); ++t) {
      if (threads[t]->ended) continue;
      thread_index = {t, 0, 0};
      swapcontext(&scheduler, &threads[t]->context);
      all_ended &= threads[t]->ended;
    }
    if (events == before && !all_ended) {
      std::fprintf(stderr, "block (%u, %u, %u) waits forever\n", block_index.x, block_index.y,
                   block_index.z);
      std::abort();
    }
  }
}

}  // namespace

void meet_block() { wait_at(block_barrier); }
void meet_warp() { wait_at(warp_barriers[thread_index.x / 32]); }
void meet_threads(int barrier, int threads) {
  numbered_barriers[barrier].members = threads;
  wait_at(numbered_barriers[barrier]);
}
Shown& shown(unsigned lane) { return shown_by[thread_index.x / 32 * 32 + lane]; }

void run(const std::function<void()>& kernel, dim3 grid, int count, int shared_bytes) {
  body = &kernel;
  block_size = dim3(static_cast<unsigned>(count));
  grid_size = grid;
  while (threads.size() < size_t(count)) threads.push_back(std::make_unique<Thread>());
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        block_index = {x, y, z};
        run_block(count, shared_bytes);
      }
  ASAN_UNPOISON_MEMORY_REGION(cuda::memory, sizeof(cuda::memory));
}

}  // namespace replayssm::emulation
