// When events of requests are handed out.
#include "server/engine_thread.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/requests.h"

namespace replayssm::server {
namespace {

using testing::expected_output;
using testing::FakeModel;
using testing::request_of;
using Outputs = std::map<uint64_t, std::vector<int32_t>>;  // by key

// Its steps take longer than what happens between them, and less than events are gathered for.
class PausingModel final : public FakeModel {
 public:
  PausingModel() : FakeModel(64, 512) {}
  void forward(const Batch& batch, const StateView& state, const PassOutput& output) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    FakeModel::forward(batch, state, output);
  }
};

class EngineThreadTest : public ::testing::Test {
 protected:
  void take(EngineThread::Delivery delivery) {
    const std::lock_guard lock(mutex_);
    for (const EngineEvent& event : delivery.events) {
      ended_ += !event.error.empty() || event.output.finish != FinishReason::kNone;
    }
    steps_ += std::ssize(delivery.steps);
    deliveries_.push_back(std::move(delivery.events));
    changed_.notify_all();
  }
  void wait_for_ends(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ == count; });
  }

  PausingModel model_;
  Engine engine_{model_, nullptr, {}};
  std::mutex mutex_;
  std::condition_variable changed_;
  int ended_ = 0;
  int64_t steps_ = 0;
  std::vector<std::vector<EngineEvent>> deliveries_;
  EngineThread thread_{engine_, [this](auto delivery) { take(std::move(delivery)); }};
};

TEST_F(EngineThreadTest, GathersWhatIsNeitherFirstNorLast) {
  constexpr int64_t kTokens = 200;
  const Request requests[] = {request_of(1, 5, kTokens), request_of(2, 9, kTokens / 2)};
  for (uint64_t key : {1, 2}) thread_.submit(key, requests[key - 1]);
  wait_for_ends(2);
  Outputs outputs;
  int64_t with_events = 0;
  for (const std::vector<EngineEvent>& events : deliveries_) {
    with_events += !events.empty();
    std::map<uint64_t, int64_t> counts;
    for (const EngineEvent& event : events) ++counts[event.key];
    for (const auto& [key, count] : counts) {
      if (outputs.contains(key)) continue;
      EXPECT_EQ(count, 1) << "with the first of request " << key;
    }
    for (const EngineEvent& event : events) outputs[event.key].push_back(event.output.token.id);
  }
  EXPECT_LT(with_events, kTokens / 2);
  EXPECT_GE(steps_, kTokens);
  for (uint64_t key : {1, 2}) EXPECT_EQ(outputs[key], expected_output(requests[key - 1]));
}

// What is made later than a request's end is not in one delivery with it.
TEST_F(EngineThreadTest, HandsOutEndsAtOnce) {
  constexpr int kShort = 10;
  thread_.submit(0, request_of(1, 5, 300));
  for (int key = 1; key <= kShort; ++key) {
    thread_.submit(static_cast<uint64_t>(key), request_of(key, 5, 3));
    wait_for_ends(key);
  }
  wait_for_ends(kShort + 1);
  int64_t ends = 0;
  for (const std::vector<EngineEvent>& events : deliveries_) {
    for (size_t i = 0; i < events.size(); ++i) {
      if (events[i].output.finish == FinishReason::kNone) continue;
      ++ends;
      EXPECT_EQ(i + 1, events.size()) << "request " << events[i].key;
    }
  }
  EXPECT_EQ(ends, kShort + 1);
}

TEST_F(EngineThreadTest, TellsWhyARequestFails) {
  thread_.submit(7, {});
  wait_for_ends(1);
  const EngineEvent& event = deliveries_.front().front();
  EXPECT_EQ(event.key, 7u);
  EXPECT_NE(event.error.find("prompt"), std::string::npos) << event.error;
}

}  // namespace
}  // namespace replayssm::server
