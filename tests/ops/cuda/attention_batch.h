// A batch of sequences with its paged cache on the device, and the oracle of what attention reads.
#pragma once

#include <numeric>

#include "ops/cuda/attention.h"
#include "ops/cuda/device_rows.h"

namespace replayssm::testing {

struct AttentionSequence {
  int64_t position, tokens;
};

struct AttentionCase {
  int64_t heads, kv_heads, head_dim;
  DType dtype;
  bool shared = false;  // values are the keys
  int64_t block_size = 16;
};

// NaN wherever no token of a sequence is, blocks dealt in shuffled order, block numbers that exist
// nowhere behind a sequence's own.
class AttentionBatch {
 public:
  AttentionBatch(const AttentionCase& c, const std::vector<AttentionSequence>& given,
                 float q_scale = 1)
      : case_(c), sequences_(given) {
    const int64_t all = layout();
    for (auto* side : {&k_, &v_})
      *side = std::vector<uint8_t>(
          all * c.kv_heads * c.block_size * c.head_dim * dtype_bytes(c.dtype), 0xff);
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const int64_t keys = sequences_[s].position + sequences_[s].tokens;
      keys_.push_back(rounded_values(keys * width(), 100 + s, 1));
      values_.push_back(c.shared ? keys_.back() : rounded_values(keys * width(), 200 + s, 1));
      queries_.push_back(
          rounded_values(sequences_[s].tokens * c.heads * c.head_dim, 300 + s, q_scale));
    }
    store(true);
    store(false);
  }

  int64_t tokens() const { return start_.back(); }
  int64_t width() const { return case_.kv_heads * case_.head_dim; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(case_.head_dim)); }
  KvCache cache() const {
    return {k_.data(),      case_.shared ? k_.data() : v_.data(),
            case_.dtype,    case_.block_size,
            case_.kv_heads, case_.head_dim};
  }
  KvBatch batch() const {
    return {static_cast<int64_t>(sequences_.size()), device_start_.data(), device_position_.data(),
            device_table_.data(), table_stride_};
  }
  cuda::AttentionShape shape() const {
    cuda::AttentionShape shape{.sequences = batch().sequences,
                               .tokens = tokens(),
                               .heads = case_.heads,
                               .kv_heads = case_.kv_heads,
                               .head_dim = case_.head_dim};
    for (const auto& s : sequences_) {
      shape.max_window = std::max(shape.max_window, s.tokens);
      shape.max_context = std::max(shape.max_context, s.position + s.tokens);
    }
    return shape;
  }
  // [tokens, heads, head_dim] of all sequences.
  std::vector<float> queries() const {
    std::vector<float> all;
    for (const auto& q : queries_) all.insert(all.end(), q.begin(), q.end());
    return all;
  }

  // One row of a token's output.
  void check(const std::vector<float>& out, DType out_dtype, const std::vector<float>& gate) const {
    const int64_t dim = case_.head_dim, group = case_.heads / case_.kv_heads;
    for (size_t s = 0; s < sequences_.size(); ++s)
      for (int64_t t = 0; t < sequences_[s].tokens; ++t)
        for (int64_t h = 0; h < case_.heads; ++h) {
          const int64_t keys = sequences_[s].position + t + 1;
          const int64_t first = ((start_[s] + t) * case_.heads + h) * dim;
          const auto part = [&](const std::vector<float>& x, int64_t at) {
            return std::vector<float>(x.begin() + at, x.begin() + at + dim);
          };
          check_row(part(out, first), out_dtype,
                    gate.empty() ? std::vector<float>() : part(gate, first),
                    to_double(part(queries_[s], (t * case_.heads + h) * dim)),
                    head(keys_[s], keys, h / group), head(values_[s], keys, h / group), keys);
          if (::testing::Test::HasFatalFailure()) {
            ADD_FAILURE() << "sequence " << s << " token " << t << " head " << h;
            return;
          }
        }
  }

 private:
  int64_t blocks_of(const AttentionSequence& s) const {
    return (s.position + s.tokens + case_.block_size - 1) / case_.block_size;
  }
  std::vector<float> rounded_values(int64_t count, size_t seed, float scale) const {
    auto x = random_values(count, static_cast<uint32_t>(seed), scale);
    dispatch_float(case_.dtype, [&]<class T>() {
      for (float& value : x) value = rounded<T>(value);
    });
    return x;
  }

  // Returns how many blocks there are; block 0 stays unused.
  int64_t layout() {
    int64_t longest = 1, blocks = 1;
    std::vector<int64_t> position;
    for (const auto& s : sequences_) {
      start_.push_back(start_.back() + static_cast<int32_t>(s.tokens));
      position.push_back(s.position);
      longest = std::max(longest, blocks_of(s));
      blocks += blocks_of(s);
    }
    table_stride_ = longest + 1;
    std::vector<int32_t> order(blocks - 1), table(sequences_.size() * table_stride_, -1000000000);
    std::iota(order.begin(), order.end(), 1);
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    for (size_t s = 0; s < sequences_.size(); ++s)
      for (int64_t b = 0; b < blocks_of(sequences_[s]); ++b) {
        table[s * table_stride_ + b] = order.back();
        order.pop_back();
      }
    device_start_ = start_;
    device_position_ = position;
    device_table_ = table;
    return blocks;
  }

  // The cached tokens, or the new ones.
  void store(bool past) {
    std::vector<int32_t> start = {0};
    std::vector<float> k, v;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const auto [position, tokens] = sequences_[s];
      const int64_t first = past ? 0 : position, count = past ? position : tokens;
      start.push_back(start.back() + static_cast<int32_t>(count));
      for (auto [from, to] : {std::pair(&keys_[s], &k), {&values_[s], &v}})
        to->insert(to->end(), from->begin() + first * width(),
                   from->begin() + (first + count) * width());
    }
    if (start.back() == 0) return;
    const DeviceArray<int32_t> device_start(start);
    const DeviceArray<int64_t> zero(std::vector<int64_t>(sequences_.size()));
    const Rows k_rows(k, width(), width() + 8, DType::kFloat32),
        v_rows(v, width(), width() + 8, case_.dtype);
    cuda::AttentionInputParams p;
    p.k = k_rows;
    p.v = v_rows;
    p.tokens = start.back();
    p.cache = cache();
    p.batch = batch();
    p.batch.query_start = device_start.data();
    if (past) p.batch.position = zero.data();
    run_call([&](cudaStream_t stream) { cuda::prepare_attention(p, stream); });
  }

  reference::Values head(const std::vector<float>& x, int64_t keys, int64_t kv_head) const {
    reference::Values y;
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < case_.head_dim; ++i)
        y.push_back(x[(j * case_.kv_heads + kv_head) * case_.head_dim + i]);
    return y;
  }

  // A score errs by (head_dim + 3) roundings of its sum of magnitudes, plus three of itself: the
  // factors before the power of two. That errs by a few units, as do those that rescale earlier
  // keys. Errors of all weights enter a row twice: in the sum of values and in the normaliser. With
  // a 16-bit cache a weight is rounded to it where it meets a value.
  void check_row(const std::vector<float>& got, DType out_dtype, const std::vector<float>& gate,
                 const reference::Values& q, const reference::Values& k, const reference::Values& v,
                 int64_t keys) const {
    const double u = 0x1p-24;
    const size_t dim = q.size();
    double magnitude = 0, largest = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double sum = 0, absolute = 0;
      for (size_t i = 0; i < dim; ++i) {
        sum += scale() * q[i] * k[j * dim + i];
        absolute += std::abs(scale() * q[i] * k[j * dim + i]);
      }
      magnitude = std::max(magnitude, absolute);
      largest = std::max(largest, std::abs(sum));
    }
    const double exponent = (static_cast<double>(dim) + 3) * u * magnitude + 6 * u * largest;
    const double weight = exponent + (static_cast<double>(keys) * 1.25 + 32) * u;
    const auto want = reference::attention(q, k, v, keys, scale());
    reference::Values absolute_v(v);
    for (auto& x : absolute_v) x = std::abs(x);
    const auto bound = reference::attention(q, k, absolute_v, keys, scale());
    const double rounded = case_.dtype == DType::kFloat32 ? 0 : unit(case_.dtype);
    for (size_t i = 0; i < dim; ++i) {
      const double factor = gate.empty() ? 1 : reference::sigmoid(gate[i]);
      ASSERT_NEAR(got[i], want[i] * factor,
                  factor * ((4 * weight + rounded) * bound[i] +
                            std::abs(want[i]) * (unit(out_dtype) + 16 * u)) +
                      (out_dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-126))
          << "dimension " << i;
    }
  }

  AttentionCase case_;
  std::vector<AttentionSequence> sequences_;
  std::vector<int32_t> start_ = {0};
  int64_t table_stride_ = 0;
  std::vector<std::vector<float>> keys_, values_, queries_;  // per sequence
  DeviceArray<uint8_t> k_, v_;
  DeviceArray<int32_t> device_start_, device_table_;
  DeviceArray<int64_t> device_position_;
};

// Memory of a plan and a workspace for a shape, a call on it.
class AttentionRun {
 public:
  explicit AttentionRun(const cuda::AttentionShape& shape) : shape_(shape) {
    plan_ = std::vector<uint8_t>(cuda::attention_plan_bytes(shape), 0xff);
    workspace_ = std::vector<uint8_t>(cuda::attention_workspace_bytes(shape), 0);
  }
  // Returns [tokens, heads, head_dim].
  std::vector<float> operator()(const AttentionBatch& batch, DType out_dtype,
                                const std::vector<float>& gate = {}, bool graph = false) {
    const int64_t row = shape_.heads * shape_.head_dim;
    const Rows q(batch.queries(), row, row + 8, batch.cache().dtype),
        gates(gate, row, row + 3, DType::kFloat32);
    const OutputRows out(batch.tokens(), row, row + 5, out_dtype);
    cuda::AttentionParams p;
    p.shape = shape_;
    p.cache = batch.cache();
    p.batch = batch.batch();
    p.q = q;
    p.scale = batch.scale();
    if (!gate.empty()) p.gate = gates;
    p.out = out;
    p.plan = plan_.data();
    p.workspace = workspace_.data();
    run_call(
        [&](cudaStream_t stream) {
          cuda::plan_attention(shape_, p.batch, plan_.data(), stream);
          // Twice: the workspace is left as the next layer needs it.
          cuda::paged_attention(p, stream);
          cuda::paged_attention(p, stream);
        },
        graph);
    return out.values();
  }

 private:
  cuda::AttentionShape shape_;
  DeviceArray<uint8_t> plan_, workspace_;
};

}  // namespace replayssm::testing
