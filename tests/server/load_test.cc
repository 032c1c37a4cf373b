// Many clients at once over an engine whose model depends on each sequence's own state: whatever is
// mixed up on the way shows in a text.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "core/philox.h"
#include "engine/requests.h"
#include "server/app.h"
#include "server/json_fields.h"
#include "server/raw_client.h"

namespace replayssm::server {
namespace {

using testing::expected_output;
using testing::FakeModel;
using testing::RawClient;

int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// The address sanitizer does for a while.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kKeepsWhatIsFreed = true;
#else
constexpr bool kKeepsWhatIsFreed = false;
#endif

int64_t resident_pages() {
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  int64_t size = 0, resident = 0;
  if (std::fscanf(file, "%ld %ld", &size, &resident) != 2) resident = 0;
  std::fclose(file);
  return resident;
}

// Tokens that are whole characters, so that any sequence of them is a text.
const Tokenizer& tokenizer() {
  static const Tokenizer instance(std::string(REPLAYSSM_SOURCE_DIR) + "/models/tiny-qwen3.5");
  return instance;
}

// An engine with too little of everything, behind a server.
class LoadTest : public ::testing::Test {
 protected:
  static constexpr int64_t kVocab = 64;
  static constexpr int kClients = 12, kRequests = 40;

  LoadTest() : model_(kVocab, 320), engine_(model_, &tokenizer(), options()) {
    ServedModel served{.name = "fake", .tokenizer = &tokenizer(), .engine = &engine_};
    served.vocab_size = kVocab;
    AppOptions app;
    app.http.port = 0;
    app_ = std::make_unique<App>(engine_, std::move(served), app);
    thread_ = std::thread([this] { app_->run(); });
  }
  ~LoadTest() override {
    app_->stop();
    thread_.join();
  }

  static EngineOptions options() {
    EngineOptions options;
    options.max_num_seqs = 6;
    options.max_num_batched_tokens = 80;
    options.kv_blocks = 14;
    options.prefix_cache_bytes = 20000;
    options.prefix_interval = 64;
    options.swap_bytes = 40000;
    return options;
  }

  void ask(uint64_t seed);
  void ask_all(uint64_t round);
  std::string settled_metrics(int64_t descriptors);

  FakeModel model_;
  Engine engine_;
  std::unique_ptr<App> app_;
  std::thread thread_;
  std::atomic<int> answers_{0}, gone_{0};
};

// One random request: answered whole, streamed, or left in the middle.
void LoadTest::ask(uint64_t seed) {
  int64_t drawn = 0;
  const auto random = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(uniform(seed, drawn++) * static_cast<double>(high - low + 1));
  };
  Request request;
  const int64_t family = random(0, 2), shared = random(0, 3) * 50;
  for (int64_t i = 0; i < shared; ++i)
    request.prompt.push_back(static_cast<int32_t>((family + i * i) % kVocab));
  for (int64_t i = random(1, 40); i > 0; --i)
    request.prompt.push_back(static_cast<int32_t>(random(0, kVocab - 1)));
  request.max_tokens = random(1, 60);
  Json body = {{"prompt", request.prompt}, {"max_tokens", request.max_tokens},
               {"temperature", 0},         {"ignore_eos", true},
               {"priority", random(0, 2)}, {"stream", random(0, 1) == 1}};
  std::string expected = tokenizer().decode(expected_output(request));
  if (random(0, 2) == 0 && expected.size() > 6) {
    const std::string stop = expected.substr(expected.size() / 2, 2);
    if ((stop[0] & 0xc0) != 0x80 && Json::accept("\"" + stop + "\"")) {
      body["stop"] = stop;
      expected.resize(expected.find(stop));
    }
  }
  RawClient client(app_->port());
  ASSERT_TRUE(client.connected());
  client.post("/v1/completions", to_text(body));
  if (random(0, 4) == 0) {
    if (random(0, 1) == 0) client.more();
    ++gone_;
    return;
  }
  const std::string answer = client.read();
  std::string text;
  if (body["stream"] == true) {
    for (size_t at = answer.find("data: {"); at != std::string::npos;
         at = answer.find("data: {", at + 1)) {
      const Json event = Json::parse(answer.substr(at + 6, answer.find("\n\n", at) - at - 6));
      ASSERT_TRUE(event.contains("choices")) << answer;
      text += event["choices"][0]["text"].get<std::string>();
    }
  } else {
    const Json whole = Json::parse(answer);
    ASSERT_TRUE(whole.contains("choices")) << answer;
    text = whole["choices"][0]["text"].get<std::string>();
  }
  EXPECT_EQ(text, expected) << "seed " << seed;
  ++answers_;
}

// A round of requests from several clients at once.
void LoadTest::ask_all(uint64_t round) {
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([this, round, c] {
      for (int i = 0; i < kRequests; ++i)
        ask(round * 1000003 + static_cast<uint64_t>(c * kRequests + i));
    });
  }
  for (std::thread& client : clients) client.join();
}

double number_of(const std::string& metrics, const std::string& name) {
  const size_t at = metrics.find("\n" + name + " ");
  return at == std::string::npos ? -1.0
                                 : std::strtod(metrics.c_str() + at + name.size() + 1, nullptr);
}

// Once nothing runs any more.
std::string LoadTest::settled_metrics(int64_t descriptors) {
  std::string metrics;
  for (int tries = 0; tries < 500; ++tries) {
    RawClient client(app_->port());
    client.get("/metrics");
    metrics = client.read();
    if (number_of(metrics, "replayssm_requests_running") == 0 &&
        number_of(metrics, "replayssm_requests_waiting") == 0 &&
        open_descriptors() <= descriptors + 2)
      break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return metrics;
}

TEST_F(LoadTest, EveryAnswerIsThatOfTheRequestAloneAndNothingIsLeft) {
  constexpr int kRounds = 4;
  const int64_t descriptors = open_descriptors();
  int64_t pages = 0;
  for (int round = 1; round <= kRounds; ++round) {
    ask_all(static_cast<uint64_t>(round));
    if (round == 2) pages = resident_pages();  // what grows once has grown
  }
  EXPECT_EQ(answers_ + gone_, kRounds * kClients * kRequests);
  EXPECT_GT(answers_, kRounds * kClients * kRequests / 2);

  const std::string metrics = settled_metrics(descriptors);
  EXPECT_EQ(number_of(metrics, "replayssm_requests_running"), 0);
  EXPECT_EQ(number_of(metrics, "replayssm_requests_waiting"), 0);
  EXPECT_EQ(number_of(metrics, "replayssm_kv_blocks{state=\"free\"}") +
                number_of(metrics, "replayssm_prefix_blocks"),
            14);
  for (const char* name : {"preemptions", "swaps", "cached_tokens", "folds", "prefix_evictions"})
    EXPECT_GT(number_of(metrics, std::string("replayssm_") + name + "_total"), 0) << name;
  EXPECT_LE(open_descriptors(), descriptors + 2);  // a connection that is just being closed
  if (!kKeepsWhatIsFreed) {
    EXPECT_LT(resident_pages(), pages + 1024);
  }
}

}  // namespace
}  // namespace replayssm::server
