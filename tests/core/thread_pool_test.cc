#include "core/thread_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "replayssm/error.h"

namespace replayssm {
namespace {

using testing::Each;
using testing::HasSubstr;

class ThreadPools : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Sizes, ThreadPools, testing::Values(1, 2, 3, 8));

TEST_P(ThreadPools, RunCallsEveryThreadOnce) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.size(), GetParam());
  std::vector<int> calls(static_cast<size_t>(pool.size()));
  for (int region = 0; region < 2000; ++region)
    pool.run([&](int thread) { ++calls[static_cast<size_t>(thread)]; });
  EXPECT_THAT(calls, Each(2000));
}

TEST_P(ThreadPools, ThreadZeroIsTheCaller) {
  ThreadPool pool(GetParam());
  std::vector<std::thread::id> ids(static_cast<size_t>(pool.size()));
  pool.run([&](int thread) { ids[static_cast<size_t>(thread)] = std::this_thread::get_id(); });
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  for (size_t i = 0; i < ids.size(); ++i)
    for (size_t j = 0; j < i; ++j) EXPECT_NE(ids[i], ids[j]);
}

TEST_P(ThreadPools, RangesCoverEveryIndexOnceAndDependOnCountAndSizeAlone) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {0, 1, 2, 3, 7, 64, 1001}) {
    std::vector<int> owner(static_cast<size_t>(count), -1), again = owner;
    for (auto* out : {&owner, &again})
      pool.for_ranges(count, [&](int64_t begin, int64_t end, int thread) {
        EXPECT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) {
          EXPECT_EQ((*out)[static_cast<size_t>(i)], -1);
          (*out)[static_cast<size_t>(i)] = thread;
        }
      });
    EXPECT_EQ(owner, again);
    EXPECT_EQ(std::count(owner.begin(), owner.end(), -1), 0);
    EXPECT_TRUE(std::is_sorted(owner.begin(), owner.end()));
  }
}

TEST_P(ThreadPools, WritesOfARegionAreSeenByTheNext) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> values(1000, 1);
  for (int region = 0; region < 200; ++region) {
    // Each region reads what another thread wrote in the one before.
    const std::vector<int64_t> before = values;
    pool.for_ranges(1000, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        values[static_cast<size_t>(i)] = before[static_cast<size_t>(999 - i)] + 1;
    });
  }
  EXPECT_THAT(values, Each(201));
}

TEST_P(ThreadPools, ExceptionsReachTheCallerAndThePoolStaysUsable) {
  ThreadPool pool(GetParam());
  for (int failing = 0; failing < pool.size(); ++failing) {
    std::atomic<int> calls = 0;
    try {
      pool.run([&](int thread) {
        ++calls;
        if (thread == failing) throw std::runtime_error("thread " + std::to_string(thread));
      });
      ADD_FAILURE() << "nothing thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "thread " + std::to_string(failing));
    }
    EXPECT_EQ(calls, pool.size());
    pool.run([&](int) { ++calls; });
    EXPECT_EQ(calls, 2 * pool.size());
  }
  EXPECT_THROW(pool.run([](int) { throw std::logic_error("all"); }), std::logic_error);
  EXPECT_THROW(pool.for_ranges(100, [](int64_t, int64_t, int) { throw 7; }), int);
  EXPECT_NO_THROW(pool.run([](int) {}));
}

TEST_P(ThreadPools, WorkersThatSleptWakeUp) {
  ThreadPool pool(GetParam());
  std::atomic<int> calls = 0;
  for (int region = 0; region < 5; ++region) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    pool.run([&](int thread) {
      // The caller outlives its spinning as well.
      if (thread != 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++calls;
    });
  }
  EXPECT_EQ(calls, 5 * pool.size());
}

TEST_P(ThreadPools, ARegionInsideARegionIsRefused) {
  ThreadPool pool(GetParam());
  try {
    pool.run([&](int thread) {
      if (thread == 0) pool.run([](int) {});
    });
    ADD_FAILURE() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("running already"));
  }
  EXPECT_NO_THROW(pool.run([](int) {}));
}

struct Counter {
  Counter() = default;
  ~Counter() { ++destroyed(); }
  static int& destroyed() {
    static int count = 0;
    return count;
  }
  int value = 0;
};

TEST_P(ThreadPools, LocalObjectsBelongToTheirThreadAndDieWithThePool) {
  Counter::destroyed() = 0;
  {
    ThreadPool pool(GetParam());
    for (int region = 0; region < 100; ++region)
      pool.run([&](int thread) {
        pool.local<Counter>(thread).value += thread + 1;
        pool.local<std::vector<int>>(thread).push_back(thread);
      });
    for (int thread = 0; thread < pool.size(); ++thread) {
      EXPECT_EQ(pool.local<Counter>(thread).value, 100 * (thread + 1));
      EXPECT_THAT(pool.local<std::vector<int>>(thread), Each(thread));
      EXPECT_EQ(pool.local<std::vector<int>>(thread).size(), 100u);
    }
    EXPECT_EQ(Counter::destroyed(), 0);
  }
  EXPECT_EQ(Counter::destroyed(), GetParam());
}

TEST(ThreadPool, TakesTheAvailableCoresByDefault) {
  ThreadPool pool;
  EXPECT_GE(pool.size(), 1);
  EXPECT_LE(pool.size(), static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
}

TEST(ThreadPool, RefusesNegativeSizes) { EXPECT_THROW(ThreadPool(-1), Error); }

TEST(ThreadPool, StartsAndStopsWithoutARegion) {
  for (int i = 0; i < 200; ++i) ThreadPool pool(3);
}

TEST(ThreadPool, SeveralPoolsDoNotDisturbEachOther) {
  ThreadPool a(2), b(3);
  std::atomic<int> calls = 0;
  std::thread other([&] {
    for (int i = 0; i < 500; ++i) b.run([&](int) { ++calls; });
  });
  for (int i = 0; i < 500; ++i) a.run([&](int) { ++calls; });
  other.join();
  EXPECT_EQ(calls, 500 * 5);
}

}  // namespace
}  // namespace replayssm
