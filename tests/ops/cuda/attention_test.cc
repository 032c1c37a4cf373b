// Paged attention on the device against its definition.
#include "ops/cuda/attention.h"

#include "ops/cuda/attention_batch.h"
#include "ops/cuda/attention_plan.h"

namespace replayssm::testing {
namespace {

using Sequences = std::vector<AttentionSequence>;

// One token each, some behind contexts that are cut into ranges; windows of a few; prompts.
const Sequences kDecode = {{200, 1}, {0, 1}, {1000, 1}, {17, 0}, {63, 1}, {1855, 1}};
const Sequences kVerify = {{700, 5}, {0, 3}, {63, 0}, {64, 4}, {511, 1}};
const Sequences kPrompt = {{0, 130}, {60, 9}, {17, 0}, {0, 1}, {300, 70}};

void expect_right(const AttentionCase& c, const Sequences& sequences, DType out_dtype, bool gated,
                  float q_scale = 1) {
  SCOPED_TRACE(::testing::Message()
               << c.heads << "/" << c.kv_heads << " x " << c.head_dim << " " << dtype_name(c.dtype)
               << " blocks of " << c.block_size << " windows of " << sequences[0].tokens);
  const AttentionBatch batch(c, sequences, q_scale);
  const auto gate =
      gated ? random_values(batch.tokens() * c.heads * c.head_dim, 9, 2) : std::vector<float>();
  const auto out = same_in_every_run([&](bool graph) {
    AttentionRun run(batch.shape());
    return run(batch, out_dtype, gate, graph);
  });
  batch.check(out, out_dtype, gate);
}

TEST(CudaAttention, EveryHeadDimMatchesTheDefinition) {
  REQUIRE_DEVICE();
  size_t i = 0;
  for (const int64_t head_dim : {64, 80, 96, 128, 192, 256})
    for (const DType dtype : kDtypes)
      for (const auto& sequences : {kDecode, kVerify, kPrompt}) {
        const DType out = kDtypes[i % 3];
        expect_right({6, 2, head_dim, dtype}, sequences, out, i++ % 2 == 0);
      }
}

// Two windows are enough to know what all up to the longest need.
TEST(CudaAttention, NoWindowNeedsMoreThanTheLongestAndTheLongestThatIsCut) {
  for (const int64_t group : {1, 3, 5, 8, 16, 40, 128}) {
    for (const int64_t longest : {1, 2, 5, 7, 13, 16, 64, 100, 1000}) {
      for (const int64_t sequences : {1, 3, 40}) {
        const auto needs = [&](int64_t window) {
          const cuda::AttentionShape shape{.sequences = sequences,
                                           .tokens = sequences * longest,
                                           .max_window = window,
                                           .max_context = 4096,
                                           .heads = 2 * group,
                                           .kv_heads = 2,
                                           .head_dim = 128};
          return std::pair(cuda::attention_plan_bytes(shape),
                           cuda::attention_workspace_bytes(shape));
        };
        const int64_t cut = std::min(cuda::longest_cut_window(group, 128), longest);
        const auto [plan, workspace] = needs(cut);
        const auto [longest_plan, longest_workspace] = needs(longest);
        for (int64_t window = 1; window <= longest; ++window) {
          const auto [bytes, work] = needs(window);
          EXPECT_LE(bytes, std::max(plan, longest_plan)) << group << " " << window;
          EXPECT_LE(work, std::max(workspace, longest_workspace)) << group << " " << window;
        }
      }
    }
  }
}

TEST(CudaAttention, KeysServeAsValues) {
  REQUIRE_DEVICE();
  for (const DType dtype : kDtypes)
    for (const auto& sequences : {kDecode, kVerify, kPrompt}) {
      expect_right({8, 1, 576, dtype, true}, sequences, dtype, false);
      expect_right({5, 5, 64, dtype, true}, sequences, dtype, false);
    }
}

TEST(CudaAttention, AnyGroupAndBlockSize) {
  REQUIRE_DEVICE();
  for (const auto& [heads, kv_heads] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 5}, {40, 2}, {32, 1}})
    for (const int64_t block_size : {1, 3, 16, 256})
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
        expect_right({heads, kv_heads, 64, dtype, false, block_size}, {{0, 21}, {330, 1}, {5, 3}},
                     dtype, false);
}

TEST(CudaAttention, LargeScoresDoNotOverflow) {
  REQUIRE_DEVICE();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    expect_right({4, 2, 64, dtype}, {{0, 100}, {300, 1}}, dtype, false, 300);
}

// A captured call serves other lengths, and sequences that leave.
TEST(CudaAttention, PlansFollowTheLengthsInMemory) {
  REQUIRE_DEVICE();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    const AttentionCase c{6, 2, 128, dtype};
    const AttentionBatch largest(c, {{2000, 1}, {2000, 1}, {2000, 1}});
    AttentionRun run(largest.shape());
    run(largest, dtype);
    for (const Sequences& sequences :
         {Sequences{{0, 1}, {1, 0}, {700, 1}}, Sequences{{600, 1}, {1999, 1}, {255, 1}}}) {
      const AttentionBatch batch(c, sequences);
      batch.check(run(batch, dtype, {}, true), dtype, {});
    }
  }
}

TEST(CudaAttention, NeighboursChangeNoBit) {
  REQUIRE_DEVICE();
  for (const DType dtype : kDtypes) {
    const AttentionCase c{4, 2, 128, dtype};
    const AttentionBatch together(c, {{1500, 2}, {3, 1}, {900, 2}}), alone(c, {{1500, 2}});
    AttentionRun run(together.shape());
    const auto both = run(together, dtype), one = run(alone, dtype);
    EXPECT_TRUE(same_bits(one, {both.begin(), both.begin() + static_cast<int64_t>(one.size())}));
  }
}

struct InputCase {
  int64_t heads, kv_heads, head_dim, norm_dim, rotary_dim;
  DType in, cache;
};

// [rows, dim] through norm and rotation.
reference::Values prepared(const InputCase& c, const std::vector<float>& x, int64_t heads,
                           const std::vector<float>& weight, const std::vector<int64_t>& position,
                           const std::vector<float>& frequency) {
  const int64_t rows = static_cast<int64_t>(x.size()) / c.head_dim;
  auto y = to_double(x);
  for (int64_t r = 0; r < rows && c.norm_dim > 0; ++r) {
    const reference::Values head(y.begin() + r * c.head_dim,
                                 y.begin() + r * c.head_dim + c.norm_dim);
    const auto normed = reference::rms_norm(head, to_double(weight), 1, c.norm_dim, double{1e-6f});
    std::copy(normed.begin(), normed.end(), y.begin() + r * c.head_dim);
  }
  return reference::rotary(y, position, frequency, static_cast<int64_t>(position.size()), heads,
                           c.head_dim, c.rotary_dim);
}

// Nine tokens of three sequences, of which the last is padding, through prepare_attention.
struct PreparedInputs {
  static constexpr int64_t kBlock = 4, kTokens = 9, kLive = 8;
  static constexpr int32_t kTable[] = {2, 9, 9, 9, 9, 9, 1, 3, 0};
  const std::vector<int64_t> position = {1, 2, 3, 4, 5, 6, 7, 8};  // of the live tokens

  PreparedInputs(const InputCase& c, int64_t gap)
      : q(kTokens, c.heads * c.head_dim, c.heads * c.head_dim + gap, c.in, 1, 2),
        k(kTokens, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim + gap, c.in, 2, 2),
        v(kTokens, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim + gap, c.in, 3, 2),
        q_norm(random_values(std::max<int64_t>(c.norm_dim, 1), 4)),
        k_norm(random_values(std::max<int64_t>(c.norm_dim, 1), 5)) {
    for (int64_t i = 0; i < c.rotary_dim / 2; ++i)
      frequency.push_back(
          std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(c.rotary_dim)));
    const DeviceArray<int32_t> start(std::vector<int32_t>{0, 3, 3, 8}),
        table(std::vector<int32_t>(std::begin(kTable), std::end(kTable)));
    const DeviceArray<int64_t> past(std::vector<int64_t>{1, 2, 4});
    const DeviceArray<float> device_q(q_norm), device_k(k_norm), device_frequency(frequency);
    // Blocks of the cache as rows of heads: [blocks, kv_heads, block] x head_dim.
    const OutputRows q_out(kTokens, c.heads * c.head_dim, q.stride, c.cache),
        keys(4 * c.kv_heads * kBlock, c.head_dim, c.head_dim, c.cache),
        values(4 * c.kv_heads * kBlock, c.head_dim, c.head_dim, c.cache);
    cuda::AttentionInputParams p;
    p.q = q, p.k = k, p.v = v;
    p.tokens = kTokens;
    p.heads = c.heads;
    if (c.norm_dim > 0) p.q_norm = device_q.data(), p.k_norm = device_k.data();
    p.norm_dim = c.norm_dim;
    p.eps = 1e-6f;
    p.inverse_frequency = device_frequency.data();
    p.rotary_dim = c.rotary_dim;
    p.cache = {cuda::OutRows(keys).data,
               cuda::OutRows(values).data,
               c.cache,
               kBlock,
               c.kv_heads,
               c.head_dim};
    p.batch = {3, start.data(), past.data(), table.data(), 3};
    p.q_out = q_out;
    run_call([&](cudaStream_t stream) { cuda::prepare_attention(p, stream); });
    got_q = q_out.values(), got_k = keys.values(), got_v = values.values();
  }

  Rows q, k, v;
  std::vector<float> q_norm, k_norm, frequency, got_q, got_k, got_v;
};

void check_inputs(const InputCase& c, int64_t gap) {
  SCOPED_TRACE(::testing::Message() << c.heads << "/" << c.kv_heads << " x " << c.head_dim << " "
                                    << dtype_name(c.in) << " to " << dtype_name(c.cache));
  const PreparedInputs run(c, gap);
  const auto live = [&](const Rows& x, int64_t heads) {
    return std::vector<float>(x.values.begin(),
                              x.values.begin() + PreparedInputs::kLive * heads * c.head_dim);
  };
  // A norm, then two products of which one may cancel the other.
  const auto expect_near = [&](float got, double want, double magnitude) {
    ASSERT_NEAR(got, want,
                magnitude * (static_cast<double>(c.head_dim) / 2 + 32) * 0x1p-24 +
                    std::abs(want) * unit(c.cache) + 0x1p-25);
  };
  const auto want_q =
      prepared(c, live(run.q, c.heads), c.heads, run.q_norm, run.position, run.frequency);
  const auto want_k =
      prepared(c, live(run.k, c.kv_heads), c.kv_heads, run.k_norm, run.position, run.frequency);
  for (size_t i = 0; i < run.got_q.size(); ++i) {
    if (i < want_q.size()) {
      expect_near(run.got_q[i], want_q[i], 8);
    } else {
      ASSERT_TRUE(std::isnan(run.got_q[i])) << "padding " << i;
    }
  }
  std::vector<bool> written(run.got_k.size());
  for (int64_t t = 0; t < PreparedInputs::kLive; ++t) {
    constexpr int64_t kBlock = PreparedInputs::kBlock;
    const int64_t place = run.position[t],
                  block = PreparedInputs::kTable[(t < 3 ? 0 : 2) * 3 + place / kBlock];
    for (int64_t h = 0; h < c.kv_heads; ++h)
      for (int64_t i = 0; i < c.head_dim; ++i) {
        const int64_t at = ((block * c.kv_heads + h) * kBlock + place % kBlock) * c.head_dim + i;
        const int64_t from = (t * c.kv_heads + h) * c.head_dim + i;
        expect_near(run.got_k[at], want_k[from], 8);
        expect_near(run.got_v[at], run.v.values[from], 0);
        written[at] = true;
      }
  }
  for (size_t i = 0; i < written.size(); ++i)
    ASSERT_TRUE(written[i] || (std::isnan(run.got_k[i]) && std::isnan(run.got_v[i]))) << i;
}

TEST(CudaAttention, InputsAreNormedRotatedAndStored) {
  REQUIRE_DEVICE();
  for (const DType in : kDtypes)
    for (const DType cache : kDtypes)
      for (const int64_t gap : {8, 3}) {
        check_inputs({4, 2, 128, 128, 128, in, cache}, gap);
        check_inputs({8, 2, 256, 256, 64, in, cache}, gap);
        check_inputs({3, 3, 80, 0, 0, in, cache}, gap);
        check_inputs({9, 1, 576, 512, 0, in, cache}, gap);
        check_inputs({5, 1, 7, 5, 6, in, cache}, gap);
      }
}

TEST(CudaAttention, WrongArgumentsAreNamed) {
  alignas(16) float data[4] = {};
  int32_t index[2] = {0, 1};
  int64_t position = 0;
  cuda::AttentionParams right;
  right.shape = {1, 1, 1, 1, 2, 1, 64};
  right.cache = {data, data, DType::kBFloat16, 16, 1, 64};
  right.batch = {1, index, &position, index, 1};
  right.q = {data, 128, DType::kBFloat16};
  right.out = {data, 128, DType::kBFloat16};
  right.plan = data;
  const auto message = [&](auto&& change) {
    auto p = right;
    change(p);
    return error_of([&] { cuda::paged_attention(p, nullptr); });
  };
  using P = cuda::AttentionParams;
  EXPECT_EQ(message([](P& p) { p.q.dtype = DType::kFloat32; }),
            "q: expected the cache's bfloat16, got float32");
  EXPECT_EQ(message([](P& p) { p.cache.head_dim = 128; }),
            "cache.head_dim: expected the shape's 64, got 128");
  EXPECT_EQ(message([](P& p) { p.shape.heads = 0; }),
            "heads: expected a multiple of the 1 of the keys, got 0");
  EXPECT_EQ(message([](P& p) { p.plan = nullptr; }), "plan: expected memory, got a null pointer");
  EXPECT_EQ(message([](P& p) { p.shape.head_dim = p.cache.head_dim = 72; }),
            "head_dim: expected 64, 80, 96, 128, 192, 256 or 576, got 72");
}

}  // namespace
}  // namespace replayssm::testing
