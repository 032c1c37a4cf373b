// Paged decode steps on the device against the recurrence in double: every kernel, caches filled
// with NaN where nothing may be read and compared bit for bit where nothing may be written.
// tests/python has long runs over flushes and rejection.
#include "ops/cuda/paged.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>

#include "ops/cuda/device_numbers.h"
#include "replayssm/ops.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kSlots = 5;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Row {
  int history, window;
  bool flushes;
};

struct PagedCase {
  replayssm_family family;
  int64_t heads, key_heads, head_dim, state_dim;
  DType act, state;
  int64_t ring, window;  // window 0: the rule of single tokens
  std::vector<Row> rows;
  int multiprocessors = 0;  // of a device that it is launched as for; 0: of the one that there is
};
void PrintTo(const PagedCase& c, std::ostream* out) {
  *out << (c.family == REPLAYSSM_MAMBA2 ? "Mamba-2 " : "Gated Delta ") << c.heads << "x"
       << c.head_dim << "x" << c.state_dim << " " << dtype_name(c.act) << ", state "
       << dtype_name(c.state) << ", window " << c.window;
}

template <class T>
PagedIntegers integers(const DeviceArray<T>& x) {
  return {x.data(), 1, sizeof(T)};
}

// A value with the magnitude of the terms that it is the sum of.
struct Term {
  double value = 0, size = 0;
};
Term operator+(Term x, Term y) { return {x.value + y.value, x.size + y.size}; }
Term operator-(Term x, Term y) { return {x.value - y.value, x.size + y.size}; }
Term operator*(Term x, Term y) { return {x.value * y.value, x.size * y.size}; }
Term exact(double x) { return {x, std::abs(x)}; }

class PagedRun {
 public:
  explicit PagedRun(const PagedCase& c)
      : c_(c),
        tokens_(count_tokens(c)),
        state_(c.state, kSlots * c.heads * c.head_dim * c.state_dim),
        cache_v_(c.act, kSlots * c.heads * c.ring * c.head_dim),
        cache_k_(c.act, kSlots * c.key_heads * c.ring * c.state_dim),
        cache_g_(DType::kFloat32, kSlots * c.heads * c.ring),
        v_(c.act, tokens_ * c.heads * c.head_dim),
        k_(c.act, tokens_ * c.key_heads * c.state_dim),
        q_(c.act, tokens_ * c.key_heads * c.state_dim),
        dt_(c.act, tokens_ * c.heads),
        beta_(c.act, tokens_ * c.heads),
        a_(DType::kFloat32, c.heads),
        bias_(DType::kFloat32, c.heads),
        skip_(c.act, c.heads),
        out_(c.act, tokens_ * c.heads * c.head_dim) {
    for (Array* x : {&v_, &k_, &q_, &dt_, &beta_, &a_, &bias_, &skip_}) x->draw(random_, 1);
    if (!delta())
      for (int64_t h = 0; h < c.heads; ++h) a_[h] = -std::abs(a_[h]);
    for (size_t i = 0; i < c.rows.size(); ++i) fill(static_cast<int64_t>(i));
  }

  void run() {
    PagedStep p = step();
    const auto before = caches();
    cuda::Device device = cuda::current_device();
    if (c_.multiprocessors > 0) device.multiprocessors = c_.multiprocessors;
    cuda::paged_step(p, device, nullptr);
    cuda::check_cuda(cudaDeviceSynchronize(), "paged_step");
    after_ = caches();
    expected_ = before;
    outputs_ = out_.download();
    int64_t token = 0;
    for (size_t i = 0; i < c_.rows.size(); ++i) {
      for (int64_t h = 0; h < c_.heads; ++h) check(static_cast<int64_t>(i), h, token);
      token += c_.rows[i].window;
    }
    // Where nothing was checked nothing was written. NaN equals NaN here.
    for (size_t n = 0; n < after_.size(); ++n)
      EXPECT_EQ(std::memcmp(after_[n].data(), expected_[n].data(), after_[n].size() * 4), 0)
          << "array " << n;
    cuda::paged_step(p, device, nullptr);  // idempotent where nothing flushes
    if (!flushes()) {
      EXPECT_EQ(out_.download(), outputs_);
    }
  }

 private:
  static int64_t count_tokens(const PagedCase& c) {
    int64_t sum = 0;
    for (const Row& row : c.rows) sum += row.window;
    return sum;
  }
  bool delta() const { return c_.family != REPLAYSSM_MAMBA2; }
  bool single() const { return c_.window == 0; }
  bool flushes() const {
    for (const Row& row : c_.rows)
      if (row.flushes) return true;
    return false;
  }
  // Row i of the batch has slot i + 1, and in rings that wrap a start of its own.
  static int64_t slot(int64_t i) { return i + 1; }
  int64_t place(int64_t i, int64_t j) const { return single() ? j : ((i + 1) * 5 + j) % c_.ring; }
  int64_t at_state(int64_t i, int64_t h, int64_t r) const {
    return ((slot(i) * c_.heads + h) * c_.head_dim + r) * c_.state_dim;
  }
  int64_t at_v(int64_t i, int64_t h, int64_t j) const {
    return ((slot(i) * c_.heads + h) * c_.ring + place(i, j)) * c_.head_dim;
  }
  int64_t at_k(int64_t i, int64_t h, int64_t j) const {
    const int64_t g = h / (c_.heads / c_.key_heads);
    return ((slot(i) * c_.key_heads + g) * c_.ring + place(i, j)) * c_.state_dim;
  }
  int64_t at_g(int64_t i, int64_t h, int64_t j) const {
    return (slot(i) * c_.heads + h) * c_.ring + place(i, j);
  }

  void fill(int64_t i) {
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(0.01f, 0.5f);
    for (int64_t h = 0; h < c_.heads; ++h) {
      for (int64_t e = 0; e < c_.head_dim * c_.state_dim; ++e)
        state_[at_state(i, h, 0) + e] = normal(random_);
      for (int64_t j = 0; j < c_.rows[i].history; ++j) {
        for (int64_t e = 0; e < c_.head_dim; ++e) cache_v_[at_v(i, h, j) + e] = normal(random_);
        for (int64_t e = 0; e < c_.state_dim; ++e)
          cache_k_[at_k(i, h, j) + e] = normal(random_) / std::sqrt(float(c_.state_dim));
        cache_g_[at_g(i, h, j)] = uniform(random_) * (delta() ? -1.0f : 1.0f);
      }
    }
  }

  PagedStep step() {
    const auto& c = c_;
    PagedStep p{};
    p.family = c.family;
    p.rule = single() ? REPLAYSSM_PAGED_SINGLE : REPLAYSSM_PAGED_WINDOW;
    p.softplus = p.normalise = 1;
    p.sequences = static_cast<int64_t>(c.rows.size()) + 1;
    p.heads = c.heads, p.key_heads = c.key_heads;
    p.head_dim = c.head_dim, p.state_dim = c.state_dim;
    p.ring = c.ring, p.max_window = std::max<int64_t>(c.window, 1);
    p.scale = 1 / std::sqrt(float(c.state_dim));
    place_rows(p);
    const int64_t hv = c.heads * c.head_dim, hk = c.key_heads * c.state_dim;
    p.v = v_.upload(hv, c.head_dim);
    p.k = k_.upload(hk, c.state_dim);
    p.q = q_.upload(hk, c.state_dim);
    p.dt = dt_.upload(c.heads, 1);
    if (delta()) p.beta = beta_.upload(c.heads, 1);
    p.a = a_.upload(1);
    p.dt_bias = bias_.upload(1);
    if (!delta()) p.skip = skip_.upload(1, 0);
    p.out = out_.upload(hv, c.head_dim);
    p.state = state_.upload(hv * c.state_dim, c.head_dim * c.state_dim, c.state_dim);
    p.cache_v = cache_v_.upload(hv * c.ring, c.ring * c.head_dim, c.head_dim);
    p.cache_k = cache_k_.upload(hk * c.ring, c.ring * c.state_dim, c.state_dim);
    p.cache_g = cache_g_.upload(c.heads * c.ring, c.ring, 1);
    return p;
  }
  void place_rows(PagedStep& p) {
    std::vector<int32_t> slots, starts{0}, write_pos(kSlots), origin(kSlots);
    std::vector<int8_t> is_flush(kSlots);
    for (size_t i = 0; i < c_.rows.size(); ++i) {
      const auto n = static_cast<int64_t>(i);
      const size_t key = single() ? i : static_cast<size_t>(slot(n));
      slots.push_back(static_cast<int32_t>(slot(n)));
      starts.push_back(starts.back() + c_.rows[i].window);
      write_pos[key] = c_.rows[i].history;
      origin[key] = static_cast<int32_t>(place(n, 0));
      is_flush[key] = c_.rows[i].flushes;
    }
    slots.push_back(0);  // padding
    starts.push_back(starts.back());
    slots_ = slots, starts_ = starts, write_pos_ = write_pos, origin_ = origin;
    is_flush_ = is_flush;
    p.slot = integers(slots_);
    p.write_pos = integers(write_pos_);
    p.is_flush = integers(is_flush_);
    if (single()) {
      // A token a row: the padded row has the last one, whose output it leaves or zeroes.
      p.sequences = static_cast<int64_t>(c_.rows.size());
      return;
    }
    p.query_start = integers(starts_);
    p.origin = integers(origin_);
  }
  std::vector<std::vector<float>> caches() const {
    return {state_.download(), cache_v_.download(), cache_k_.download(), cache_g_.download()};
  }

  double step_of(double raw, int64_t h) const { return std::log1p(std::exp(raw + bias_[h])); }
  double log_decay(double dt, int64_t h) const {
    return (delta() ? -std::exp(double{a_[h]}) : double{a_[h]}) * dt;
  }

  // The recurrence over head h of row i, all rows of its state at once.
  void check(int64_t i, int64_t h, int64_t token) {
    const Row& row = c_.rows[i];
    const int64_t n = c_.state_dim, dim = c_.head_dim;
    std::vector<Term> s(dim * n);
    for (int64_t e = 0; e < dim * n; ++e) s[e] = exact(state_[at_state(i, h, 0) + e]);
    for (int64_t j = 0; j < row.history; ++j) {
      const double g = cache_g_[at_g(i, h, j)], dt = single() ? g : step_of(g, h);
      advance(
          s, std::exp(delta() ? g : log_decay(dt, h)), exact(delta() ? 1 : dt),
          [&](int64_t r) { return exact(cache_v_[at_v(i, h, j) + r]); },
          [&](int64_t e) { return double{cache_k_[at_k(i, h, j) + e]}; });
    }
    if (row.flushes && !single()) check_state(i, h, s);
    for (int64_t t = 0; t < row.window; ++t) check_token(i, h, token + t, row.history + t, s);
    if (row.flushes && single()) check_state(i, h, s);
  }
  template <class Value, class Key>
  void advance(std::vector<Term>& s, double decay, Term weight, Value&& v, Key&& k) const {
    for (int64_t r = 0; r < c_.head_dim; ++r) {
      const Term write = weight * v(r);
      for (int64_t e = 0; e < c_.state_dim; ++e) {
        Term& x = s[r * c_.state_dim + e];
        x = exact(decay) * x + write * exact(k(e));
      }
    }
  }
  std::vector<double> vector_of(const Array& x, int64_t token, int64_t h, double scale) const {
    const int64_t g = h / (c_.heads / c_.key_heads), n = c_.state_dim;
    std::vector<double> y(n);
    double sum = kL2NormEps;
    for (int64_t e = 0; e < n; ++e) y[e] = x[(token * c_.key_heads + g) * n + e];
    if (!delta()) return y;
    for (const double value : y) sum += value * value;
    for (double& value : y) value *= scale / std::sqrt(sum);
    return y;
  }
  // Token `token`, whose place behind the oldest cached row is j.
  void check_token(int64_t i, int64_t h, int64_t token, int64_t j, std::vector<Term>& s) {
    const int64_t n = c_.state_dim, dim = c_.head_dim;
    const bool keeps = !single() || !c_.rows[i].flushes;
    const double raw = dt_[token * c_.heads + h], dt = step_of(raw, h);
    const double decay = std::exp(log_decay(dt, h));
    const std::vector<double> q = vector_of(q_, token, h, 1 / std::sqrt(double(n)));
    std::vector<double> k = vector_of(k_, token, h, 1);
    for (int64_t e = 0; keeps && e < n; ++e) {
      expect_near("key", 2, at_k(i, h, j) + e, exact(k[e]), cache_k_.rounding(), 32);
      // Windows go on with keys as they are cached.
      if (!single()) k[e] = after_[2][at_k(i, h, j) + e];
    }
    Term beta = exact(1 / (1 + std::exp(-double{beta_[token * c_.heads + h]})));
    std::vector<Term> write(dim);
    for (int64_t r = 0; r < dim; ++r) {
      write[r] = exact(v_[(token * c_.heads + h) * dim + r]);
      Term known;
      for (int64_t e = 0; e < n; ++e) known = known + exact(decay) * s[r * n + e] * exact(k[e]);
      if (delta()) write[r] = beta * (write[r] - known);
      if (keeps) expect_near("value", 1, at_v(i, h, j) + r, write[r], cache_v_.rounding(), terms());
    }
    advance(
        s, decay, exact(delta() ? 1 : dt), [&](int64_t r) { return write[r]; },
        [&](int64_t e) { return k[e]; });
    if (keeps) {
      const double gate = delta() ? log_decay(dt, h) : single() ? dt : raw;
      expect_near("gate", 3, at_g(i, h, j), exact(gate), 0x1p-24, 32);
    }
    for (int64_t r = 0; r < dim; ++r) {
      Term o;
      for (int64_t e = 0; e < n; ++e) o = o + s[r * n + e] * exact(q[e]);
      if (!delta()) o = o + write[r] * exact(skip_[h]);
      const int64_t at = (token * c_.heads + h) * dim + r;
      EXPECT_NEAR(outputs_[at], o.value, bound(o, out_.rounding(), terms()))
          << "row " << i << " head " << h << " token " << token << " element " << r;
    }
  }
  void check_state(int64_t i, int64_t h, const std::vector<Term>& s) {
    for (int64_t e = 0; e < c_.head_dim * c_.state_dim; ++e)
      expect_near("state", 0, at_state(i, h, 0) + e, s[e], state_.rounding(), terms());
  }
  double terms() const { return double(4 * c_.state_dim + 8 * c_.ring); }
  static double bound(const Term& x, double rounding, double terms) {
    return 1.01 * rounding * std::abs(x.value) + terms * 0x1p-24 * x.size + 1e-30;
  }
  void expect_near(const char* what, int array, int64_t at, const Term& x, double rounding,
                   double terms) {
    EXPECT_NEAR(after_[array][at], x.value, bound(x, rounding, terms)) << what << " at " << at;
    expected_[array][at] = after_[array][at];
  }

  const PagedCase& c_;
  const int64_t tokens_;
  std::mt19937 random_{11};
  Array state_, cache_v_, cache_k_, cache_g_, v_, k_, q_, dt_, beta_, a_, bias_, skip_, out_;
  DeviceArray<int32_t> slots_, starts_, write_pos_, origin_;
  DeviceArray<int8_t> is_flush_;
  std::vector<std::vector<float>> after_, expected_;
  std::vector<float> outputs_;
};

constexpr auto kMamba = REPLAYSSM_MAMBA2, kGdn = REPLAYSSM_GATED_DELTA;
constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBf16 = DType::kBFloat16;
const std::vector<Row> kSingles{{0, 1, false}, {7, 1, false}, {15, 1, true}};
const std::vector<Row> kFives{{0, 5, false}, {11, 3, false}, {14, 5, true}};
const std::vector<Row> kMany{{0, 16, false}, {9, 11, false}, {16, 16, true}};

const PagedCase kCases[] = {
    {kMamba, 4, 2, 64, 128, kBf16, kF32, 16, 0, kSingles},
    {kMamba, 2, 1, 80, 128, kBf16, kBf16, 16, 0, kSingles},
    {kMamba, 2, 1, 24, 64, kF16, kF16, 16, 0, kSingles},
    {kMamba, 2, 1, 16, 256, kF32, kF32, 16, 0, kSingles},
    {kGdn, 4, 2, 128, 128, kBf16, kF32, 16, 0, kSingles},
    {kGdn, 2, 1, 32, 128, kBf16, kF16, 16, 0, kSingles},
    {kGdn, 2, 2, 16, 64, kF32, kF32, 16, 0, kSingles},
    {kGdn, 2, 1, 16, 128, kBf16, kF32, 41, 0, {{0, 1, false}, {37, 1, false}, {40, 1, true}}},
    {kMamba, 4, 2, 64, 128, kBf16, kF32, 32, 5, kFives},
    {kMamba, 2, 1, 80, 128, kBf16, kBf16, 32, 5, kFives},
    {kMamba, 2, 1, 16, 128, kF32, kF32, 32, 16, kMany},
    {kMamba, 2, 1, 16, 64, kBf16, kF32, 64, 32, {{0, 32, false}, {31, 30, false}, {32, 7, true}}},
    {kGdn, 4, 2, 128, 128, kBf16, kF32, 32, 5, kFives},
    {kGdn, 2, 1, 32, 128, kF16, kF16, 32, 4, {{3, 4, false}, {0, 1, false}, {17, 3, true}}},
    {kGdn, 2, 1, 32, 128, kF32, kF32, 32, 5, kFives},
    {kGdn, 2, 1, 16, 64, kBf16, kBf16, 32, 16, kMany},
    {kGdn, 2, 1, 16, 64, kBf16, kF32, 64, 32, {{0, 32, false}, {31, 30, false}, {32, 7, true}}},
    {kMamba, 3, 1, 10, 20, kBf16, kF32, 16, 0, kSingles},
    {kMamba, 3, 1, 10, 20, kBf16, kF32, 32, 5, kFives},
    {kGdn, 3, 1, 10, 20, kBf16, kF32, 16, 0, kSingles},
    {kGdn, 3, 1, 10, 20, kBf16, kF32, 32, 5, kFives},
    // Several heads for a warp, and long pieces.
    {kMamba, 16, 2, 32, 128, kBf16, kF32, 32, 5, kFives, 1},
    {kMamba, 16, 2, 80, 128, kF16, kF32, 32, 3, {{3, 3, false}, {0, 1, false}, {17, 3, true}}, 1},
    {kGdn, 16, 4, 16, 128, kBf16, kBf16, 32, 5, kFives, 1},
    {kGdn, 8, 2, 128, 128, kBf16, kF32, 16, 0, kSingles, 1},
    // Histories longer than what is copied with the state.
    {kMamba, 2, 1, 48, 256, kBf16, kF32, 64, 6, {{29, 6, false}, {40, 6, true}, {58, 2, false}}},
    {kGdn, 2, 1, 24, 128, kBf16, kF32, 64, 8, {{29, 8, false}, {40, 5, true}, {0, 2, true}}},
    // More than a block's shared memory where vectors were kept there.
    {kGdn, 1, 1, 4, 1024, kF32, kBf16, 64, 32, {{31, 32, false}}},
};

class CudaPaged : public ::testing::TestWithParam<PagedCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, CudaPaged, ::testing::ValuesIn(kCases));

TEST_P(CudaPaged, IsTheRecurrence) {
  REQUIRE_DEVICE();
  PagedRun(GetParam()).run();
}

}  // namespace
}  // namespace replayssm::testing
