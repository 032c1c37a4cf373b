// Sampling on the device against the engine's sampler.
#include "ops/cuda/sampling.h"

#include "engine/sampler.h"
#include "ops/cuda/device_rows.h"

namespace replayssm::testing {
namespace {

struct Row {
  SamplingParams params;
  std::vector<int32_t> prompt, output;
  int64_t position = 0;
};

cuda::SamplingRow device_row(const SamplingParams& p) {
  return {.temperature = p.temperature,
          .top_p = p.top_p,
          .min_p = p.min_p,
          .repetition_penalty = p.repetition_penalty,
          .presence_penalty = p.presence_penalty,
          .frequency_penalty = p.frequency_penalty,
          .seed = p.seed,
          .top_k = p.top_k};
}

// Tokens of all rows, twice with the same workspace: it is left as the next call needs it.
std::vector<int32_t> sample_rows(const Rows& logits, int64_t vocab, const std::vector<Row>& rows) {
  const auto count = static_cast<int64_t>(rows.size());
  const int64_t stride = 40;
  std::vector<cuda::SamplingRow> sampling;
  std::vector<int64_t> position;
  std::vector<int32_t> history(count * stride, -1000000000), slot, prompt, length;
  for (int64_t r = 0; r < count; ++r) {
    const Row& row = rows[r];
    sampling.push_back(device_row(row.params));
    position.push_back(row.position);
    slot.push_back(static_cast<int32_t>(count - 1 - r));
    int32_t* to = history.data() + slot.back() * stride;
    to = std::ranges::copy(row.prompt, to).out;
    std::ranges::copy(row.output, to);
    prompt.push_back(static_cast<int32_t>(row.prompt.size()));
    length.push_back(static_cast<int32_t>(row.prompt.size() + row.output.size()));
  }
  const DeviceArray<cuda::SamplingRow> device_sampling(sampling);
  const DeviceArray<int64_t> device_position(position);
  const DeviceArray<int32_t> device_history(history), device_slot(slot), device_prompt(prompt),
      device_length(length);
  const DeviceArray<uint8_t> workspace(
      std::vector<uint8_t>(cuda::sample_workspace_bytes(count, vocab, true), 0));
  const auto tokens = same_in_every_run([&](bool graph) {
    const DeviceArray<int32_t> token(std::vector<int32_t>(count, -9));
    cuda::SampleParams p;
    p.logits = logits;
    p.rows = count;
    p.vocab = vocab;
    p.sampling = device_sampling.data();
    p.position = device_position.data();
    p.history = {device_history.data(), stride, device_slot.data(), device_prompt.data(),
                 device_length.data()};
    p.token = token.data();
    p.workspace = workspace.data();
    run_call([&](cudaStream_t stream) { cuda::sample(p, stream); }, graph);
    std::vector<int32_t> tokens;
    token.download(tokens);
    return tokens;
  });
  std::vector<uint8_t> left;
  workspace.download(left);
  EXPECT_TRUE(std::ranges::all_of(left, [](uint8_t byte) { return byte == 0; }));
  return tokens;
}

// Every kind of row side by side.
std::vector<Row> mixed_rows(int64_t vocab, int64_t count) {
  std::mt19937 random(4);
  std::vector<Row> rows;
  for (int64_t r = 0; r < count; ++r) {
    Row row;
    SamplingParams& p = row.params;
    p.temperature = r % 5 == 0 ? 0 : 0.5 + 0.25 * static_cast<double>(r % 4);
    if (r % 3 == 1) p.top_k = static_cast<int32_t>(1 + random() % 60);
    if (r % 4 >= 2) p.top_p = 0.1 + 0.11 * static_cast<double>(r % 9);
    if (r % 7 == 3) p.min_p = 0.05;
    if (r % 6 >= 3) {
      p.repetition_penalty = 1.3;
      p.presence_penalty = r % 2 ? 0.7 : -0.4;
      p.frequency_penalty = r % 3 ? 0.2 : 0;
    }
    p.seed = random();
    row.position = static_cast<int64_t>(random() % 5000);
    for (int64_t i = 0; i < 18; ++i) {
      row.prompt.push_back(static_cast<int32_t>(random() % vocab));
      row.output.push_back(static_cast<int32_t>(random() % std::min<int64_t>(vocab, 9)));
    }
    rows.push_back(row);
  }
  return rows;
}

void expect_same(const Rows& logits, int64_t vocab, const std::vector<Row>& rows) {
  const auto tokens = sample_rows(logits, vocab, rows);
  for (size_t r = 0; r < rows.size(); ++r) {
    const Row& row = rows[r];
    const std::span<const float> mine(&logits.values[r * vocab], vocab);
    EXPECT_EQ(tokens[r], sample(mine, row.params, row.prompt, row.output, row.position).id)
        << "row " << r << " of " << vocab;
  }
}

TEST(CudaSampling, TokensAreThoseOfTheEngine) {
  REQUIRE_DEVICE();
  for (const int64_t vocab : {1, 2, 9, 1000, 8191, 50257})
    for (const DType dtype : kDtypes) {
      const int64_t count = vocab > 10000 ? 60 : 200;
      expect_same(Rows(count, vocab, vocab + 3, dtype, 17, 3), vocab, mixed_rows(vocab, count));
    }
}

// Few different logits: limits fall among equals, of which the lower ids are kept.
TEST(CudaSampling, TiesGoToTheLowerId) {
  REQUIRE_DEVICE();
  for (const int64_t vocab : {50, 3000}) {
    auto values = random_values(100 * vocab, 18, 2);
    for (float& x : values) x = std::round(x);
    expect_same(Rows(values, vocab, vocab, DType::kFloat32), vocab, mixed_rows(vocab, 100));
  }
}

TEST(CudaSampling, MaskedTokensAreNeverDrawn) {
  REQUIRE_DEVICE();
  const int64_t vocab = 2000;
  auto values = random_values(100 * vocab, 19, 2);
  for (size_t i = 0; i < values.size(); ++i)
    if (i % 3 != 0) values[i] = -std::numeric_limits<float>::infinity();
  expect_same(Rows(values, vocab, vocab, DType::kFloat32), vocab, mixed_rows(vocab, 100));
}

std::vector<int32_t> greedy_tokens(const Rows& logits, int64_t vocab, int64_t count) {
  return same_in_every_run([&](bool graph) {
    const DeviceArray<int32_t> token(std::vector<int32_t>(count, -9));
    cuda::SampleParams p;
    p.logits = logits;
    p.rows = count;
    p.vocab = vocab;
    p.token = token.data();
    run_call([&](cudaStream_t stream) { cuda::sample(p, stream); }, graph);
    std::vector<int32_t> tokens;
    token.download(tokens);
    return tokens;
  });
}

// Rows that are aligned and rows that are not; few different logits, so that maxima are ties.
TEST(CudaSampling, GreedyNeedsNoParameters) {
  REQUIRE_DEVICE();
  for (const auto& [vocab, count] : {std::pair<int64_t, int64_t>{1, 3},
                                     {9, 200},
                                     {1000, 200},
                                     {8192, 70},
                                     {20011, 40},
                                     {130000, 7}}) {
    auto values = random_values(count * vocab, 20, 2);
    for (float& x : values) x = std::round(x * 4) / 4;
    for (const DType dtype : kDtypes)
      for (const int64_t gap : {0, 3, 8}) {
        const Rows logits(values, vocab, vocab + gap, dtype);
        const auto tokens = greedy_tokens(logits, vocab, count);
        for (int64_t r = 0; r < count; ++r) {
          const std::span<const float> row(&logits.values[r * vocab], vocab);
          ASSERT_EQ(tokens[r], sample(row, {}, {}, {}, 0).id)
              << "row " << r << " of " << vocab << ", " << dtype_name(dtype) << ", gap " << gap;
        }
      }
  }
}

TEST(CudaSampling, RowsWithoutALargestGetNoToken) {
  REQUIRE_DEVICE();
  const int64_t vocab = 100;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  auto values = random_values(5 * vocab, 21);
  values[37] = kNan;
  values[vocab + 99] = kInf;
  std::fill_n(values.begin() + 2 * vocab, vocab, -kInf);
  values[3 * vocab] = -kInf;
  std::vector<Row> rows(5);
  for (size_t r = 0; r < 5; ++r) rows[r].params.temperature = static_cast<double>(r % 2);
  const Rows logits(values, vocab, vocab, DType::kFloat32);
  for (const auto& tokens : {sample_rows(logits, vocab, rows), greedy_tokens(logits, vocab, 5)}) {
    for (size_t r = 0; r < 3; ++r) EXPECT_EQ(tokens[r], cuda::kNoToken) << r;
    for (size_t r = 3; r < 5; ++r) EXPECT_GE(tokens[r], 0) << r;
  }
}

TEST(CudaSampling, WrongArgumentsAreNamed) {
  float data[4] = {};
  int32_t token = 0;
  cuda::SampleParams p;
  p.logits = {data, 4, DType::kFloat32};
  p.rows = 1;
  p.vocab = 0;
  p.token = &token;
  EXPECT_EQ(error_of([&] { cuda::sample(p, nullptr); }), "vocab: expected 1 to 4194304, got 0");
  p.vocab = 4;
  const cuda::SamplingRow row;
  p.sampling = &row;
  EXPECT_EQ(error_of([&] { cuda::sample(p, nullptr); }),
            "position: expected memory, got a null pointer");
}

}  // namespace
}  // namespace replayssm::testing
