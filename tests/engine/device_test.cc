// Whole models under the engine, on every device: batches, preemption and captured passes change
// nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "engine/engine.h"
#include "engine/rows_fixture.h"
#include "model/temporary_folder.h"

namespace replayssm::testing {
namespace {

using Outputs = std::map<int64_t, std::vector<int32_t>>;

class ModelOnDevice : public ::testing::TestWithParam<ModelAndDevice> {
 protected:
  void SetUp() override {
    const auto folder = repository() / "models" / std::get<0>(GetParam());
    const Device device = std::get<1>(GetParam());
    if (const std::string reason = obstacle(folder, device); !reason.empty())
      GTEST_SKIP() << reason;
    model_ = load_model({folder}, DType::kFloat32, device, pool_);
  }

  ThreadPool pool_{1};
  std::unique_ptr<Model> model_;
};

INSTANTIATE_TEST_SUITE_P(Models, ModelOnDevice,
                         ::testing::Combine(::testing::Values("tiny-nemotron-h", "tiny-qwen3.5"),
                                            ::testing::Values("cpu", "cuda")),
                         test_name);

Request request_of(int seed, double temperature = 0) {
  Request request;
  for (int i = 0; i < 3 + 29 * seed % 60; ++i)
    request.prompt.push_back((seed * 331 + i * i * 7 + i) % 4000 + 10);
  request.max_tokens = 8 + 7 * seed % 25;
  request.sampling = {.temperature = temperature, .seed = static_cast<uint64_t>(seed)};
  request.ignore_eos = true;
  return request;
}

Outputs run(Model& model, const std::vector<Request>& requests, const EngineOptions& options,
            int64_t* preemptions = nullptr) {
  Engine engine(model, nullptr, options);
  for (const Request& request : requests) engine.add(request);
  Outputs outputs;
  while (!engine.idle()) {
    for (const RequestOutput& output : engine.step())
      outputs[output.request].push_back(output.token.id);
  }
  if (preemptions) *preemptions = engine.stats().preemptions;
  return outputs;
}

// Steps mix decodes and pieces of prompts; too few blocks make sequences wait and start again.
TEST_P(ModelOnDevice, TextsAreThoseOfEachRequestAlone) {
  std::vector<Request> requests;
  for (int i = 0; i < 7; ++i) requests.push_back(request_of(i, i % 3 == 2 ? 0.7 : 0));
  Outputs alone;
  for (size_t i = 0; i < requests.size(); ++i)
    alone[static_cast<int64_t>(i)] = run(*model_, {requests[i]}, {.max_model_len = 128})[0];
  EngineOptions options{.ring = {.buffer_len = 5}, .max_model_len = 128};
  options.max_num_seqs = 5;
  options.max_num_batched_tokens = 24;
  EXPECT_EQ(run(*model_, requests, options), alone);
  options.kv_blocks = 6;
  int64_t preemptions = 0;
  EXPECT_EQ(run(*model_, requests, options, &preemptions), alone);
  EXPECT_GT(preemptions, 0);
}

// Tokens that the device draws are those that the host draws from its logits.
TEST_P(ModelOnDevice, DrawnTokensAreTheSamplers) {
  std::vector<Request> plain, with_logprobs;
  for (int i = 0; i < 6; ++i) {
    Request request = request_of(i, i == 3 ? 0 : 0.5 + 0.2 * i);
    request.sampling.top_k = i == 1 ? 40 : 0;
    request.sampling.top_p = i == 2 ? 0.8 : 1;
    request.sampling.min_p = i == 4 ? 0.1 : 0;
    request.sampling.repetition_penalty = i >= 3 ? 1.3 : 1;
    request.sampling.presence_penalty = i == 5 ? 0.4 : 0;
    request.sampling.frequency_penalty = i == 3 ? 0.2 : 0;
    plain.push_back(request);
    request.sampling.logprobs = 0;  // needs the logits
    with_logprobs.push_back(request);
  }
  const EngineOptions options{.max_num_seqs = 6, .max_model_len = 128};
  EXPECT_EQ(run(*model_, plain, options), run(*model_, with_logprobs, options));
}

// A batch's second pass replays what the first has prepared, where the device captures passes.
TEST_P(ModelOnDevice, RepeatedPassesGiveTheSameBits) {
  const std::vector<std::vector<int32_t>> prompts = {{5, 6, 7, 8, 9}, {200}, {33, 1, 17, 250, 4}};
  for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly}) {
    Rows rows(*model_, {.route = route, .buffer_len = 3, .rows = 3, .context = 64});
    std::vector<std::vector<float>> first;
    for (int repeat = 0; repeat < 3; ++repeat) {
      rows.reset();
      std::vector<RowTokens> windows;
      for (size_t i = 0; i < prompts.size(); ++i)
        windows.push_back({static_cast<int64_t>(i), prompts[i]});
      rows.prefill(windows, {});
      for (int32_t step = 0; step < 9; ++step) {
        const auto logits = rows.decode(std::vector<int32_t>{step + 20, step + 90, step + 7});
        const std::vector<float> bits(logits.begin(), logits.end());
        if (repeat == 0) first.push_back(bits);
        ASSERT_EQ(bits, first[step]) << route_name(route) << " step " << step;
      }
    }
  }
}

// Small batches take kernels of their own. Roundings to 16 bits move a row by about 1% of the
// logits' scale (golden_test.cc); two rows that are rounded at other places differ by root two of
// that.
TEST_P(ModelOnDevice, ARowAloneIsTheRowAmongOthers) {
  const auto folder = repository() / "models" / std::get<0>(GetParam());
  model_ = load_model({folder}, DType::kBFloat16, std::get<1>(GetParam()), pool_);
  const std::vector<int32_t> prompt{5, 6, 7, 90, 14};
  for (const int64_t count : {3, 12}) {
    Rows alone(*model_, {.rows = 1, .context = 64}), among(*model_, {.rows = count, .context = 64});
    std::vector<RowTokens> windows;
    for (int64_t row = 0; row < count; ++row) windows.push_back({row, prompt});
    alone.prefill(std::span(windows).first(1), {});
    among.prefill(windows, {});
    for (int32_t step = 0; step < 20; ++step) {
      std::vector<int32_t> next(count, step + 40);
      next[0] = step + 20;
      const auto all = among.decode(next);
      const auto one = alone.decode(std::span(next).first(1));
      double error = 0, scale = 0;
      for (size_t i = 0; i < one.size(); ++i) {
        error += std::pow(one[i] - all[i], 2);
        scale += std::pow(one[i], 2);
      }
      ASSERT_LT(std::sqrt(error), 0.014 * std::sqrt(scale)) << count << " rows, step " << step;
    }
  }
}

// The likeliest tokens are those of the logits.
TEST_P(ModelOnDevice, LikeliestTokensAreThoseOfTheLogits) {
  Rows logits(*model_, {.rows = 2, .context = 64}), likeliest(*model_, {.rows = 2, .context = 64});
  const std::vector<int32_t> prompt{5, 6, 7};
  std::vector<int32_t> next{11, 12};
  for (Rows* rows : {&logits, &likeliest})
    rows->prefill(std::vector<RowTokens>{{0, prompt}, {1, prompt}}, {});
  const int64_t vocab = model_->config().vocab_size;
  for (int step = 0; step < 20; ++step) {
    const auto all = logits.decode(next);
    const auto chosen = likeliest.decode_greedy(next);
    for (size_t row = 0; row < 2; ++row) {
      const auto of_row = all.subspan(row * vocab, vocab);
      next[row] = static_cast<int32_t>(std::ranges::max_element(of_row) - of_row.begin());
      ASSERT_EQ(chosen[row], next[row]) << "step " << step;
    }
  }
  // Steps at once give what single ones do.
  const auto at_once = likeliest.decode_greedy(next, 9);
  for (int step = 0; step < 9; ++step) {
    const auto all = logits.decode(next);
    for (size_t row = 0; row < 2; ++row) {
      const auto of_row = all.subspan(row * vocab, vocab);
      next[row] = static_cast<int32_t>(std::ranges::max_element(of_row) - of_row.begin());
    }
  }
  EXPECT_EQ(std::vector(at_once.begin(), at_once.end()), next);
}

// The random checkpoints' architectures with the head sizes that kernels compute, and random
// weights. Two implementations in fp32 differ by rounding alone.
class FamilyOnDevice : public ::testing::TestWithParam<const char*> {
 protected:
  // A folder with the configuration.
  std::filesystem::path resized() {
    json config = read_json(repository() / "tests/golden/random" / GetParam() / "config.json");
    for (const char* key : {"ssm_state_size", "mamba_d_state", "state_size", "linear_head_dim",
                            "linear_key_head_dim"}) {
      if (config.contains(key)) config[key] = 128;
    }
    const std::string type = config["model_type"];
    if (type == "kimi_linear") {
      config.update({{"kv_lora_rank", 96}, {"qk_rope_head_dim", 32}, {"qk_head_dim", 64}});
    } else if (config.contains("head_dim") && type != "mamba2") {
      config["head_dim"] = 64;
    } else if (config.contains("num_attention_heads")) {  // heads of hidden_size / heads
      config.update({{"num_attention_heads", 1}, {"num_key_value_heads", 1}});
    }
    if (config.contains("rope_parameters") && config["rope_parameters"].contains("mrope_section"))
      config["rope_parameters"]["mrope_section"] = {3, 3, 2};
    folder_.write("config.json", config.dump());
    return folder_.path();
  }

  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Models, FamilyOnDevice,
                         ::testing::Values("bamba", "falcon_h1_scaled", "granitemoehybrid",
                                           "granitemoehybrid_dense_rope", "kimi_linear",
                                           "kimi_linear_groups", "mamba2",
                                           "nemotron_h_latent_moe_headdim80", "nemotron_h_moe",
                                           "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(FamilyOnDevice, LogitsAreTheHosts) {
  const ModelSource source{.folder = resized(), .dummy_weights = true};
  const ModelConfig config = load_config(source.folder);
  if (const std::string reason = cuda_obstacle(config); !reason.empty()) GTEST_SKIP() << reason;
  ThreadPool pool(1);
  const auto host = load_cpu_model(source, DType::kFloat32, pool);
  const auto device = load_cuda_model(source, DType::kFloat32);
  const std::vector<int32_t> prompt{5, 200, 33, 7, 8, 9, 120}, other{64, 3, 251};
  const std::vector<RowTokens> windows{{0, prompt}, {1, other}};
  const std::vector<int32_t> wanted{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  for (const Route route : {Route::kConventional, Route::kOutputOnly}) {
    const RowsOptions options{
        .route = route, .buffer_len = 3, .rows = 2, .context = 64, .max_logits = 10};
    Rows expected(*host, options), rows(*device, options);
    const auto compare = [&](std::span<const float> want, std::span<const float> got, int step) {
      double scale = 0;
      for (const float value : want) scale += value * value / static_cast<double>(want.size());
      for (size_t i = 0; i < want.size(); ++i)
        ASSERT_NEAR(got[i], want[i], 1e-3 * std::sqrt(scale)) << "step " << step << " at " << i;
    };
    compare(expected.prefill(windows, wanted), rows.prefill(windows, wanted), -1);
    for (int32_t step = 0; step < 8; ++step) {
      const std::vector<int32_t> next{step + 20, step + 90};
      compare(expected.decode(next), rows.decode(next), step);
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
