// Logits of every model family against reference implementations (tests/golden/README.md).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "engine/rows_fixture.h"
#include "engine/sampler.h"
#include "model/tokenizer.h"

namespace replayssm::testing {
namespace {

// Records hold five decimals; two implementations in fp32 differ by rounding alone.
constexpr double kLogitTolerance = 2e-3;  // of the logits' root mean square

double root_mean_square(const std::vector<float>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0) /
                   static_cast<double>(x.size()));
}

std::string first_characters(const std::string& text, int64_t count) {
  size_t end = 0;
  while (end < text.size()) {
    const bool starts_character = (static_cast<unsigned char>(text[end]) & 0xc0) != 0x80;
    if (starts_character && count-- == 0) break;
    ++end;
  }
  return text.substr(0, end);
}

// A folder's model on a device that has it; other tests are skipped.
class OnDevice : public ::testing::TestWithParam<ModelAndDevice> {
 protected:
  explicit OnDevice(const char* models)
      : folder_(repository() / models / std::get<0>(GetParam())),
        device_(std::get<1>(GetParam())) {}

  void SetUp() override {
    if (const std::string reason = obstacle(folder_, device_); !reason.empty())
      GTEST_SKIP() << reason;
    model_ = load(DType::kFloat32);
  }
  std::unique_ptr<Model> load(DType dtype) { return load_model({folder_}, dtype, device_, pool_); }

  std::filesystem::path folder_;
  Device device_;
  ThreadPool pool_{1};
  std::unique_ptr<Model> model_;
};

class BundledModel : public OnDevice {
 protected:
  BundledModel() : OnDevice("models") {}

  json record_ =
      read_json(repository() / "tests/golden" / (std::string(std::get<0>(GetParam())) + ".json"));
};

INSTANTIATE_TEST_SUITE_P(Models, BundledModel,
                         ::testing::Combine(::testing::Values("tiny-nemotron-h", "tiny-qwen3.5"),
                                            ::testing::Values("cpu", "cuda")),
                         test_name);

TEST_P(BundledModel, PromptLogitsMatchTheRecord) {
  for (const json& prompt : record_["prompts"]) {
    const auto ids = prompt["ids"].get<std::vector<int32_t>>();
    const auto logits = prompt_logits(*model_, ids);
    const int64_t vocab = model_->config().vocab_size;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto row = std::span(logits).subspan(i * vocab, vocab);
      const double scale = root_mean_square({row.begin(), row.end()});
      EXPECT_NEAR(log_sum_exp(row), prompt["logsumexp"][i].get<double>(), kLogitTolerance * scale);
      for (size_t k = 0; k < 10; ++k) {
        const int32_t id = prompt["top_ids"][i][k];
        ASSERT_NEAR(row[id], prompt["top_logits"][i][k].get<double>(), kLogitTolerance * scale)
            << "position " << i << " id " << id;
      }
    }
  }
}

// Every route and buffer length decodes the recorded text, up to the first end of text and wherever
// the two best logits are further apart than the tolerance.
TEST_P(BundledModel, GreedyTextMatchesTheRecordOnEveryRoute) {
  const auto& eos = model_->config().eos_ids;
  const std::pair<Route, int32_t> settings[] = {
      {Route::kConventional, 16},  {Route::kStateAndOutput, 16}, {Route::kOutputOnly, 16},
      {Route::kStateAndOutput, 3}, {Route::kOutputOnly, 1},      {Route::kOutputOnly, 2},
      {Route::kOutputOnly, 7},     {Route::kOutputOnly, 64}};
  for (const auto& [route, buffer_len] : settings) {
    int64_t compared = 0;
    for (const json& prompt : record_["prompts"]) {
      const auto ids = prompt["ids"].get<std::vector<int32_t>>();
      const auto want = prompt["greedy_ids"].get<std::vector<int32_t>>();
      Rows rows(*model_, {.route = route, .buffer_len = buffer_len, .rows = 1, .context = 256});
      const int32_t last = static_cast<int32_t>(ids.size()) - 1;
      auto logits = rows.prefill(std::vector<RowTokens>{{0, ids}}, std::vector{last});
      for (size_t i = 0; i < want.size(); ++i) {
        const double scale = root_mean_square({logits.begin(), logits.end()});
        if (prompt["greedy_margins"][i].get<double>() > 2 * kLogitTolerance * scale) {
          const auto best = std::ranges::max_element(logits) - logits.begin();
          ASSERT_EQ(best, want[i]) << route_name(route) << " B=" << buffer_len << " token " << i;
          ++compared;
        }
        if (std::ranges::count(eos, want[i])) break;
        logits = rows.decode(std::vector{want[i]});
      }
    }
    EXPECT_GT(compared, 100);
  }
}

// A read copy's rounding stays out of the recurrence and enters every layer's output once: by the
// relative error of its elements, given below as its root mean square, since the products of a row
// add up like a random walk, and so do the layers. Int8 rounds to 1/127 of a row's largest element,
// taken as four times the root mean square. Four deviations bound the error of a logit; where the
// best one leads by twice that, the text is the recorded one. With activations of 16 bits (below)
// another 3% are theirs.
TEST_P(BundledModel, GreedyTextWithReadCopiesMatchesTheRecord) {
  std::vector<std::pair<DType, double>> copies = {{DType::kFloat8E4M3, std::ldexp(1.0, -5)},
                                                  {DType::kInt8, 4.0 / (127 * std::sqrt(12.0))}};
  double other_errors = kLogitTolerance;
  if (device_ == "cuda") {  // its kernels read copies of 8 bits beside activations of 16
    model_ = load(DType::kBFloat16);
    other_errors = 0.03;
  } else {
    copies.insert(copies.end(), {{DType::kFloat16, std::ldexp(1.0, -12)},
                                 {DType::kBFloat16, std::ldexp(1.0, -9)}});
  }
  const double layers = std::sqrt(static_cast<double>(model_->config().recurrent_layers()));
  const json prompt = record_["prompts"][0];
  const auto ids = prompt["ids"].get<std::vector<int32_t>>();
  const auto want = prompt["greedy_ids"].get<std::vector<int32_t>>();
  const std::vector last = {static_cast<int32_t>(ids.size()) - 1};
  for (const auto& [dtype, deviation] : copies) {
    const double bound = 4 * deviation * layers + other_errors;
    Rows exact(*model_, {.rows = 1, .context = 256});
    Rows rounded(*model_, {.rows = 1, .context = 256, .read_dtype = dtype});
    auto expected = exact.prefill(std::vector<RowTokens>{{0, ids}}, last);
    auto logits = rounded.prefill(std::vector<RowTokens>{{0, ids}}, last);
    int64_t compared = 0, changed = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double scale = root_mean_square({expected.begin(), expected.end()});
      for (size_t id = 0; id < logits.size(); ++id) {
        ASSERT_NEAR(logits[id], expected[id], bound * scale) << dtype_name(dtype) << " token " << i;
        changed += logits[id] != expected[id];
      }
      if (prompt["greedy_margins"][i].get<double>() > 2 * bound * scale) {
        ASSERT_EQ(std::ranges::max_element(logits) - logits.begin(), want[i]) << dtype_name(dtype);
        ++compared;
      }
      const std::vector next = {want[i]};
      expected = exact.decode(next);
      logits = rounded.decode(next);
    }
    EXPECT_GT(changed, 0) << dtype_name(dtype);
    EXPECT_GT(compared, 0) << dtype_name(dtype);
  }
}

TEST_P(BundledModel, MeanLossMatchesTheRecord) {
  const Tokenizer tokenizer(folder_);
  const std::string text = read_text(repository() / "models/eval.txt");
  auto ids = tokenizer.encode(first_characters(text, 60000));
  ids.resize(8192);
  double nll = 0;
  int64_t tokens = 0;
  const int64_t vocab = model_->config().vocab_size;
  for (size_t start = 0; start < ids.size(); start += 2048) {
    const std::vector<int32_t> window(ids.begin() + start, ids.begin() + start + 2048);
    const auto logits = prompt_logits(*model_, window);
    for (size_t i = 0; i + 1 < window.size(); ++i, ++tokens) {
      const auto row = std::span(logits).subspan(i * vocab, vocab);
      nll += log_sum_exp(row) - row[window[i + 1]];
    }
  }
  EXPECT_EQ(tokens, record_["perplexity"]["tokens"].get<int64_t>());
  EXPECT_NEAR(nll / static_cast<double>(tokens), record_["perplexity"]["mean_nll"].get<double>(),
              2e-3);
}

// bf16 rounds each projection's input, the ring and the KV cache to 8 bits: a relative error of
// 2^-9 per rounding. Two dozen of them add up like a random walk to about 1% of the logits' scale,
// and the loss moves by the square of that.
TEST_P(BundledModel, Bfloat16StaysCloseToFloat32) {
  const auto narrow = load(DType::kBFloat16);
  const int64_t vocab = model_->config().vocab_size;
  for (const json& prompt : record_["prompts"]) {
    const auto ids = prompt["ids"].get<std::vector<int32_t>>();
    const auto exact = prompt_logits(*model_, ids), rounded = prompt_logits(*narrow, ids);
    double divergence = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto p = std::span(exact).subspan(i * vocab, vocab);
      const auto q = std::span(rounded).subspan(i * vocab, vocab);
      const double log_p = log_sum_exp(p), log_q = log_sum_exp(q);
      for (int64_t id = 0; id < vocab; ++id)
        divergence += std::exp(p[id] - log_p) * ((p[id] - log_p) - (q[id] - log_q));
    }
    EXPECT_LT(divergence / static_cast<double>(ids.size()), 2e-3);
  }
}

class RandomModel : public OnDevice {
 protected:
  RandomModel() : OnDevice("tests/golden/random") {}
};
INSTANTIATE_TEST_SUITE_P(
    Models, RandomModel,
    ::testing::Combine(::testing::Values("bamba", "falcon_h1", "falcon_h1_scaled",
                                         "granitemoehybrid", "granitemoehybrid_dense_rope",
                                         "kimi_linear", "kimi_linear_groups", "mamba2",
                                         "nemotron_h_latent_moe_headdim80", "nemotron_h_moe",
                                         "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
                       ::testing::Values("cpu", "cuda")),
    test_name);

TEST_P(RandomModel, LogitsMatchTheRecord) {
  const json record = read_json(folder_ / "golden.json");
  const auto ids = record["ids"].get<std::vector<int32_t>>();
  const auto logits = prompt_logits(*model_, ids);
  const int64_t vocab = model_->config().vocab_size;
  const int64_t first = record["logits_first_position"];
  const double scale = root_mean_square(logits);
  for (size_t i = 0; i < record["logits"].size(); ++i) {
    for (int64_t id = 0; id < vocab; ++id)
      ASSERT_NEAR(logits[(first + i) * vocab + id], record["logits"][i][id].get<double>(),
                  kLogitTolerance * scale)
          << "position " << first + i << " id " << id;
  }
}

TEST_P(RandomModel, StepsEqualThePromptOnEveryRoute) {
  const auto ids = read_json(folder_ / "golden.json")["ids"].get<std::vector<int32_t>>();
  const auto want = prompt_logits(*model_, ids);
  const int64_t vocab = model_->config().vocab_size;
  const double scale = root_mean_square(want);
  for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly}) {
    Rows rows(*model_, {.route = route, .buffer_len = 5, .rows = 2, .context = 64});
    const std::vector<int32_t> prompt(ids.begin(), ids.begin() + 3), other{9, 8, 7, 6};
    rows.prefill(std::vector<RowTokens>{{0, prompt}, {1, other}}, std::vector{2});
    for (size_t i = 3; i < ids.size(); ++i) {
      const auto logits = rows.decode(std::vector{ids[i], static_cast<int32_t>(i)});
      for (int64_t id = 0; id < vocab; ++id)
        ASSERT_NEAR(logits[id], want[i * vocab + id], 1e-4 * scale)
            << route_name(route) << " token " << i;
    }
  }
}

// bf16 weights are those of the files; every projection's input, the ring and the KV cache are
// rounded to 8 bits. Some dozen roundings of 2^-9 add up like a random walk to about 1% of the
// logits' scale. An expert chosen otherwise at a near tie moves its position and, through the
// states, those behind it much further: hence the median of a few positions.
TEST_P(RandomModel, Bfloat16StaysCloseToFloat32) {
  const auto narrow = load(DType::kBFloat16);
  auto ids = read_json(folder_ / "golden.json")["ids"].get<std::vector<int32_t>>();
  ids.resize(6);
  const auto exact = prompt_logits(*model_, ids), rounded = prompt_logits(*narrow, ids);
  const int64_t vocab = model_->config().vocab_size;
  std::vector<double> errors;
  for (size_t i = 0; i < ids.size(); ++i) {
    double sum = 0;
    for (int64_t id = 0; id < vocab; ++id)
      sum += std::pow(rounded[i * vocab + id] - exact[i * vocab + id], 2);
    errors.push_back(std::sqrt(sum / static_cast<double>(vocab)) / root_mean_square(exact));
  }
  std::ranges::nth_element(errors, errors.begin() + errors.size() / 2);
  EXPECT_LT(errors[errors.size() / 2], 0.03);
}

// Greedy decoding gives the recorded text wherever the two best logits are further apart than the
// tolerance.
TEST_P(RandomModel, GreedyTextMatchesTheRecord) {
  const json record = read_json(folder_ / "golden.json");
  const auto ids = record["ids"].get<std::vector<int32_t>>();
  const auto want = record["greedy_ids"].get<std::vector<int32_t>>();
  Rows rows(*model_, {.buffer_len = 7, .rows = 1, .context = 128});
  const int32_t last = static_cast<int32_t>(ids.size()) - 1;
  auto logits = rows.prefill(std::vector<RowTokens>{{0, ids}}, std::vector{last});
  int64_t compared = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double scale = root_mean_square({logits.begin(), logits.end()});
    if (record["greedy_margins"][i].get<double>() > 2 * kLogitTolerance * scale) {
      ASSERT_EQ(std::ranges::max_element(logits) - logits.begin(), want[i]) << "token " << i;
      ++compared;
    }
    logits = rows.decode(std::vector{want[i]});
  }
  EXPECT_GT(compared, 12);
}

// A row's logits do not depend on its neighbours, beyond the rounding of products over other
// numbers of rows.
TEST_P(RandomModel, BatchEqualsAlone) {
  const std::vector<std::vector<int32_t>> prompts = {
      {5, 6, 7, 8, 9}, {200}, {33, 1, 17, 250, 4, 90}};
  const int64_t vocab = model_->config().vocab_size;
  const auto count = static_cast<int64_t>(prompts.size());
  // Row by row the logits of the prompt's last token, then those of every step.
  const auto run = [&](const std::vector<size_t>& chosen) {
    Rows rows(*model_, {.buffer_len = 3, .rows = count, .context = 64, .max_logits = count});
    std::vector<std::vector<float>> all(chosen.size());
    std::vector<RowTokens> windows;
    std::vector<int32_t> wanted, next;
    for (size_t i = 0; i < chosen.size(); ++i) {
      windows.push_back({static_cast<int64_t>(i), prompts[chosen[i]]});
      const int32_t before = wanted.empty() ? -1 : wanted.back();
      wanted.push_back(before + static_cast<int32_t>(prompts[chosen[i]].size()));
    }
    const auto keep = [&](std::span<const float> logits) {
      for (size_t i = 0; i < chosen.size(); ++i) {
        const auto row = logits.subspan(i * vocab, vocab);
        all[i].insert(all[i].end(), row.begin(), row.end());
      }
    };
    keep(rows.prefill(windows, wanted));
    for (int32_t step = 0; step < 9; ++step) {
      next.clear();
      for (const size_t row : chosen) next.push_back(static_cast<int32_t>(row * 50) + step);
      keep(rows.decode(next));
    }
    return all;
  };
  const auto together = run({0, 1, 2});
  for (size_t row = 0; row < 3; ++row) {
    const auto alone = run({row})[0];
    const double scale = root_mean_square(alone);
    for (size_t i = 0; i < alone.size(); ++i)
      ASSERT_NEAR(together[row][i], alone[i], 1e-4 * scale) << "row " << row;
  }
}

// A checkpoint in other words is the same model: not a bit of its logits differs from its source's.
TEST(Dialects, LogitsEqualTheSources) {
  const std::filesystem::path fixtures = REPLAYSSM_DIALECTS_DIR;
  ThreadPool pool(1);
  const auto logits = [&](const std::filesystem::path& folder) {
    const auto model = load_cpu_model({folder}, DType::kFloat32, pool);
    return prompt_logits(*model, {5, 200, 33, 7, 8, 9, 120, 64, 5, 3, 251, 17});
  };
  const json manifest = read_json(fixtures / "manifest.json");
  std::map<std::string, std::vector<float>> sources;
  for (const json& fixture : manifest["fixtures"]) {
    const std::string name = fixture["name"], source = fixture["source"];
    constexpr std::string_view kFixture = "fixture:";
    if (!sources.contains(source))
      sources[source] =
          logits(source.starts_with(kFixture) ? fixtures / source.substr(kFixture.size())
                                              : repository() / source);
    const bool same = fixture["expect"] != "different logits";
    EXPECT_EQ(logits(fixtures / name) == sources[source], same) << name;
  }
  EXPECT_GT(sources.size(), 6);
}

}  // namespace
}  // namespace replayssm::testing
