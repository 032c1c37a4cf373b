#include <algorithm>
#include <numeric>

#include "ops/cpu/dense.h"
#include "ops/dense_test_util.h"
#include "replayssm/error.h"

namespace replayssm::cpu {
namespace {

class Attention : public PerTarget {};

INSTANTIATE_TEST_SUITE_P(Targets, Attention, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         target_name);

struct Sequence {
  int64_t position, tokens;
};

struct Shape {
  int64_t heads, kv_heads, head_dim, block_size;
  DType dtype;
};

// A batch with its cache: NaN wherever no token of a sequence is, blocks dealt in shuffled order.
class Fixture {
 public:
  Fixture(const Shape& shape, std::vector<Sequence> sequences, float q_scale = 1)
      : shape_(shape), sequences_(std::move(sequences)) {
    int64_t longest = 1, blocks = 1;  // block 0 stays unused
    start_.push_back(0);
    for (const auto& s : sequences_) {
      start_.push_back(start_.back() + static_cast<int32_t>(s.tokens));
      position_.push_back(s.position);
      longest = std::max(longest, blocks_of(s));
      blocks += blocks_of(s);
    }
    table_stride_ = longest + 1;
    std::vector<int32_t> order(static_cast<size_t>(blocks - 1));
    std::iota(order.begin(), order.end(), 1);
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    table_.assign(sequences_.size() * static_cast<size_t>(table_stride_), -1000000);
    for (size_t s = 0; s < sequences_.size(); ++s)
      for (int64_t b = 0; b < blocks_of(sequences_[s]); ++b) {
        table_[s * static_cast<size_t>(table_stride_) + static_cast<size_t>(b)] = order.back();
        order.pop_back();
      }
    const auto values = blocks * shape.kv_heads * shape.block_size * shape.head_dim;
    for (auto* side : {&k_, &v_}) {
      side->resize(static_cast<size_t>(values * dtype_bytes(shape.dtype)));
      dispatch_float(shape.dtype, [&]<class T>() {
        std::fill_n(reinterpret_cast<T*>(side->data()), values, from_float<T>(kNan));
      });
    }
    q_ = random_values(tokens() * shape.heads * shape.head_dim, 11, q_scale);
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const auto [position, count] = sequences_[s];
      const auto size = (position + count) * width();
      keys_.push_back(random_values(size, 100 + static_cast<uint32_t>(s)));
      values_.push_back(random_values(size, 200 + static_cast<uint32_t>(s)));
    }
  }

  KvCache cache() {
    return {k_.data(),         v_.data(),       shape_.dtype,
            shape_.block_size, shape_.kv_heads, shape_.head_dim};
  }
  KvBatch batch() const {
    return {static_cast<int64_t>(sequences_.size()), start_.data(), position_.data(), table_.data(),
            table_stride_};
  }
  int64_t tokens() const { return start_.back(); }
  int64_t width() const { return shape_.kv_heads * shape_.head_dim; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(shape_.head_dim)); }

  // Stores the cached tokens, then the new ones, both through store_kv.
  void store(ThreadPool& pool) {
    std::vector<int32_t> start = {0};
    std::vector<float> k, v;
    const std::vector<int64_t> zero(sequences_.size());
    for (size_t s = 0; s < sequences_.size(); ++s) {
      start.push_back(start.back() + static_cast<int32_t>(sequences_[s].position));
      append(s, 0, sequences_[s].position, k, v);
    }
    auto past = batch();
    past.query_start = start.data();
    past.position = zero.data();
    store_rows(past, k, v, pool);
    k.clear();
    v.clear();
    for (size_t s = 0; s < sequences_.size(); ++s)
      append(s, sequences_[s].position, sequences_[s].tokens, k, v);
    store_rows(batch(), k, v, pool);
  }

  std::vector<float> attend(ThreadPool& pool) {
    const int64_t row = shape_.heads * shape_.head_dim;
    const auto q = spread(q_, row, row + 7);
    std::vector<float> out(static_cast<size_t>(tokens() * row), kNan);
    paged_attention(cache(), batch(), q.data(), row + 7, shape_.heads, scale(), out.data(), pool);
    return out;
  }

  // Compares with the reference on the keys and values as the cache rounds them.
  void check(const std::vector<float>& out) {
    const int64_t dim = shape_.head_dim, group = shape_.heads / shape_.kv_heads;
    for (size_t s = 0; s < sequences_.size(); ++s)
      for (int64_t t = 0; t < sequences_[s].tokens; ++t)
        for (int64_t h = 0; h < shape_.heads; ++h) {
          const int64_t keys = sequences_[s].position + t + 1;
          const auto first = static_cast<size_t>(((start_[s] + t) * shape_.heads + h) * dim);
          const std::vector<float> q(&q_[first], &q_[first] + dim);
          const std::vector<float> got(&out[first], &out[first] + dim);
          check_row(got, to_double(q), head(keys_[s], keys, h / group),
                    head(values_[s], keys, h / group), keys);
          if (testing::Test::HasFatalFailure()) {
            ADD_FAILURE() << "sequence " << s << " token " << t << " head " << h;
            return;
          }
        }
  }

  void set_value(size_t sequence, int64_t token, float value) {
    std::fill_n(values_[sequence].begin() + token * width(), width(), value);
    std::fill_n(keys_[sequence].begin() + token * width(), width(), value);
  }

 private:
  int64_t blocks_of(const Sequence& s) const {
    return (s.position + s.tokens + shape_.block_size - 1) / shape_.block_size;
  }

  void append(size_t s, int64_t first, int64_t count, std::vector<float>& k,
              std::vector<float>& v) const {
    const auto begin = first * width(), end = (first + count) * width();
    k.insert(k.end(), keys_[s].begin() + begin, keys_[s].begin() + end);
    v.insert(v.end(), values_[s].begin() + begin, values_[s].begin() + end);
  }

  void store_rows(const KvBatch& rows, const std::vector<float>& k, const std::vector<float>& v,
                  ThreadPool& pool) {
    const auto k_rows = spread(k, width(), width() + 5), v_rows = spread(v, width(), width() + 5);
    store_kv(cache(), rows, k_rows.data(), v_rows.data(), width() + 5, pool);
  }

  reference::Values head(const std::vector<float>& x, int64_t keys, int64_t kv_head) const {
    reference::Values y;
    dispatch_float(shape_.dtype, [&]<class T>() {
      for (int64_t j = 0; j < keys; ++j)
        for (int64_t i = 0; i < shape_.head_dim; ++i)
          y.push_back(rounded<T>(
              x[static_cast<size_t>((j * shape_.kv_heads + kv_head) * shape_.head_dim + i)]));
    });
    return y;
  }

  // A score errs by (head_dim + 3) roundings of its sum of magnitudes, plus one of its distance to
  // the maximum; an exponential by that and 2 ulp, and so do the factors that rescale earlier
  // chunks. Errors of all weights enter a row twice: in the sum of values and in the normaliser.
  void check_row(const std::vector<float>& got, const reference::Values& q,
                 const reference::Values& k, const reference::Values& v, int64_t keys) const {
    const double u = 0x1p-24;
    const auto dim = static_cast<size_t>(shape_.head_dim);
    double magnitude = 0, high = -INFINITY, low = INFINITY;
    for (size_t j = 0; j < static_cast<size_t>(keys); ++j) {
      double sum = 0, absolute = 0;
      for (size_t i = 0; i < dim; ++i) {
        sum += scale() * q[i] * k[j * dim + i];
        absolute += std::abs(scale() * q[i] * k[j * dim + i]);
      }
      magnitude = std::max(magnitude, absolute);
      high = std::max(high, sum);
      low = std::min(low, sum);
    }
    const double exponent = (static_cast<double>(dim) + 3) * u * magnitude + u * (high - low);
    const double weight = exponent + (static_cast<double>(keys) * 1.25 + 16) * u;
    const auto want = reference::attention(q, k, v, keys, scale());
    reference::Values absolute_v(v);
    for (auto& x : absolute_v) x = std::abs(x);
    const auto bound = reference::attention(q, k, absolute_v, keys, scale());
    for (size_t i = 0; i < dim; ++i)
      ASSERT_NEAR(got[i], want[i], 4 * weight * bound[i] + 0x1p-126) << "dimension " << i;
  }

  Shape shape_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> start_, table_;
  std::vector<int64_t> position_;
  int64_t table_stride_ = 0;
  std::vector<std::byte> k_, v_;
  std::vector<float> q_;
  std::vector<std::vector<float>> keys_, values_;  // per sequence: [tokens, kv_heads, head_dim]
};

// A decode row, a prefill, a chunk behind a context, a sequence without tokens.
const std::vector<Sequence> kMixed = {{200, 1}, {0, 70}, {60, 9}, {17, 0}, {0, 1}, {63, 2}};

TEST_P(Attention, EqualsTheReference) {
  size_t i = 0;
  for (const int64_t head_dim : {1, 7, 64, 80, 96, 128, 192, 256}) {
    const Shape shape{6, 2, head_dim, 16, kDtypes[i++ % std::size(kDtypes)]};
    SCOPED_TRACE(testing::Message() << head_dim << " " << dtype_name(shape.dtype));
    std::vector<float> first;
    for (const int threads : {1, 2, 3}) {
      ThreadPool pool(threads);
      Fixture f(shape, kMixed);
      f.store(pool);
      const auto out = f.attend(pool);
      if (threads == 1) {
        first = out;
        f.check(out);
      }
      EXPECT_TRUE(same_bits(first, out)) << threads << " threads";
    }
  }
}

TEST_P(Attention, TakesAnyGroupAndBlockSize) {
  ThreadPool pool(2);
  for (const auto& [heads, kv_heads] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 5}, {40, 2}, {80, 1}})
    for (const int64_t block_size : {1, 3, 16, 256}) {
      Fixture f({heads, kv_heads, 24, block_size, DType::kBFloat16}, {{0, 21}, {130, 1}, {5, 3}});
      f.store(pool);
      f.check(f.attend(pool));
    }
}

TEST_P(Attention, LargeLogitsDoNotOverflow) {
  ThreadPool pool(2);
  Fixture f({4, 2, 64, 16, DType::kFloat32}, {{0, 100}, {300, 1}}, 3000);
  f.store(pool);
  f.check(f.attend(pool));
}

// A window at once gives the bits of one token at a time: a row's result is its own.
TEST_P(Attention, APrefillEqualsItsDecodeSteps) {
  ThreadPool pool(2);
  const Shape shape{6, 2, 80, 16, DType::kBFloat16};
  Fixture all(shape, {{50, 90}});
  all.store(pool);
  const auto together = all.attend(pool);
  const int64_t row = 6 * 80;
  const auto q = random_values(90 * row, 11);
  const auto table = std::vector<int32_t>(all.batch().block_table, all.batch().block_table + 9);
  for (int64_t t = 0; t < 90; ++t) {
    const int32_t start[] = {0, 1};
    const int64_t position = 50 + t;
    const KvBatch one{1, start, &position, table.data(), 9};
    std::vector<float> out(static_cast<size_t>(row));
    paged_attention(all.cache(), one, q.data() + t * row, row, 6, all.scale(), out.data(), pool);
    ASSERT_TRUE(same_bits(out, {together.begin() + t * row, together.begin() + (t + 1) * row}))
        << t;
  }
}

TEST_P(Attention, ALaterTokenNeverReachesAnEarlierOne) {
  ThreadPool pool(2);
  const Shape shape{8, 2, 64, 16, DType::kFloat32};
  Fixture clean(shape, {{30, 75}}), poisoned(shape, {{30, 75}});
  poisoned.set_value(0, 104, kNan);
  poisoned.set_value(0, 103, INFINITY);
  clean.store(pool);
  poisoned.store(pool);
  const auto a = clean.attend(pool), b = poisoned.attend(pool);
  const int64_t row = 8 * 64;
  EXPECT_TRUE(same_bits({a.begin(), a.begin() + 73 * row}, {b.begin(), b.begin() + 73 * row}));
  for (int64_t i = 74 * row; i < 75 * row; ++i)
    EXPECT_TRUE(std::isnan(b[static_cast<size_t>(i)])) << "a NaN was lost";
}

// More of them than any implementation takes at once.
TEST_P(Attention, KeysOfMinusInfinityWeighNothing) {
  constexpr int64_t kTokens = 200, kFirst = 150;
  ThreadPool pool(1);
  std::vector<float> k(kTokens, -INFINITY), v(kTokens, 5), q(kTokens, 1), out(kTokens);
  k[kFirst] = 0;
  v[kFirst] = 7;
  std::vector<float> cached_k(kTokens, kNan), cached_v(kTokens, kNan);
  const KvCache cache{cached_k.data(), cached_v.data(), DType::kFloat32, kTokens, 1, 1};
  const int32_t start[] = {0, kTokens}, table[] = {0};
  const int64_t position = 0;
  const KvBatch batch{1, start, &position, table, 1};
  store_kv(cache, batch, k.data(), v.data(), 1, pool);
  paged_attention(cache, batch, q.data(), 1, 1, 1, out.data(), pool);
  for (int64_t t = kFirst; t < kTokens; ++t) EXPECT_EQ(out[static_cast<size_t>(t)], 7) << t;
}

TEST(AttentionContracts, EmptyBatchesAreLegalAndBadShapesRefused) {
  ThreadPool pool(2);
  const KvCache cache{nullptr, nullptr, DType::kFloat32, 16, 2, 64};
  paged_attention(cache, {}, nullptr, 0, 4, 1, nullptr, pool);
  store_kv(cache, {}, nullptr, nullptr, 0, pool);
  EXPECT_THROW(paged_attention(cache, {}, nullptr, 0, 3, 1, nullptr, pool), Error);
}

}  // namespace
}  // namespace replayssm::cpu
