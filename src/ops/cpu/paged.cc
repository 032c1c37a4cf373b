#include "ops/cpu/paged.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/half.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {
namespace {

float value_at(const PagedValues& x, int64_t at) {
  switch (x.dtype) {
    case REPLAYSSM_BFLOAT16: return to_float(static_cast<const bf16*>(x.data)[at]);
    case REPLAYSSM_FLOAT16: return to_float(static_cast<const fp16*>(x.data)[at]);
    default: return static_cast<const float*>(x.data)[at];
  }
}
void set_value(const PagedValues& x, int64_t at, float value) {
  switch (x.dtype) {
    case REPLAYSSM_BFLOAT16: static_cast<bf16*>(x.data)[at] = from_float<bf16>(value); return;
    case REPLAYSSM_FLOAT16: static_cast<fp16*>(x.data)[at] = from_float<fp16>(value); return;
    default: static_cast<float*>(x.data)[at] = value;
  }
}
float rounded_as(const PagedValues& x, float value) {
  if (x.dtype == REPLAYSSM_BFLOAT16) return rounded<bf16>(value);
  if (x.dtype == REPLAYSSM_FLOAT16) return rounded<fp16>(value);
  return value;
}

int64_t index(const PagedValues& x, int64_t i, int64_t j, int64_t k = 0) {
  return i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}
void read_row(const PagedValues& x, int64_t at, int64_t count, float* to) {
  for (int64_t e = 0; e < count; ++e) to[e] = value_at(x, at + e);
}
void write_row(const PagedValues& x, int64_t at, int64_t count, const float* from) {
  for (int64_t e = 0; e < count; ++e) set_value(x, at + e, from[e]);
}
float dot(const float* x, const float* y, int64_t count) {
  float sum[8] = {};
  int64_t e = 0;
  for (; e + 8 <= count; e += 8)
    for (int n = 0; n < 8; ++n) sum[n] += x[e + n] * y[e + n];
  for (; e < count; ++e) sum[0] += x[e] * y[e];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// What a thread works with.
struct Scratch {
  std::vector<float> floats;
};

// One head of one sequence. Rows are counted from the oldest cached one; the window's come last.
class HeadStep {
 public:
  HeadStep(const PagedStep& p, const PagedRow& row, int64_t head, Scratch& scratch)
      : p_(p),
        row_(row),
        head_(head),
        key_head_(head / (p.heads / p.key_heads)),
        rows_(row.history + row.window),
        delta_(p.family != REPLAYSSM_MAMBA2),
        single_(p.rule == REPLAYSSM_PAGED_SINGLE) {
    const int64_t window = row.window, k = p.state_dim, v = p.head_dim;
    scratch.floats.resize(
        static_cast<size_t>(rows_ * (k + v + 3 + 2 * window) + window * (k + window + 2) + k));
    float* next = scratch.floats.data();
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    keys_ = take(rows_ * k);
    values_ = take(rows_ * v);
    log_decay_ = take(rows_);
    weight_ = take(rows_);
    cached_ = take(rows_);
    key_query_ = take(rows_ * window);
    key_key_ = take(rows_ * window);
    queries_ = take(window * k);
    within_ = take(window * window);
    prefix_ = take(window);
    beta_ = take(window);
    state_ = take(k);
  }

  void run() {
    form_gates();
    form_vectors();
    if (keeps_window()) cache_window();
    for (int64_t r = 0; r < p_.head_dim; ++r) step_row(r);
  }

 private:
  bool keeps_window() const { return !single_ || !row_.flushes; }
  int place(int j) const { return row_.place(j, p_.ring, !single_); }
  float* key(int j) const { return keys_ + j * p_.state_dim; }
  float* query(int s) const { return queries_ + s * p_.state_dim; }
  float& value(int j, int64_t r) const { return values_[j * p_.head_dim + r]; }
  float& key_query(int j, int s) const { return key_query_[j * row_.window + s]; }
  float& key_key(int j, int s) const { return key_key_[j * row_.window + s]; }

  void set_gate(int j, float value, bool is_raw) {
    const float a = value_at(p_.a, head_ * p_.a.stride[0]);
    cached_[j] = value;
    if (delta_ && !is_raw) {
      log_decay_[j] = value;
      weight_[j] = 1;
      return;
    }
    float dt = value;
    if (is_raw) {
      if (p_.dt_bias.data) dt += value_at(p_.dt_bias, head_ * p_.dt_bias.stride[0]);
      if ((delta_ || p_.softplus) && dt <= kSoftplusThreshold) dt = std::log1p(std::exp(dt));
    }
    log_decay_[j] = (delta_ ? -std::exp(a) : a) * dt;
    weight_[j] = delta_ ? 1.0f : dt;
    if (delta_) {
      cached_[j] = log_decay_[j];
    } else if (single_) {
      cached_[j] = dt;
    }
  }

  // Weights of cached rows and of the window's in each of its tokens; sums run from the newest row
  // backwards, so that no exponent is a difference of large numbers.
  void form_gates() {
    const int h = row_.history, window = row_.window;
    const bool raw_cache = !single_ && !delta_;
    for (int j = 0; j < h; ++j)
      set_gate(j, value_at(p_.cache_g, index(p_.cache_g, row_.slot, head_, place(j))), raw_cache);
    for (int i = 0; i < window; ++i) {
      const int64_t token = row_.token + i;
      set_gate(h + i, value_at(p_.dt, index(p_.dt, token, head_)), true);
      if (delta_) beta_[i] = 1 / (1 + std::exp(-value_at(p_.beta, index(p_.beta, token, head_))));
    }
    float newer = 0;
    for (int j = h - 1; j >= 0; --j) {
      const float own = weight_[j] * std::exp(std::min(newer, 0.0f));
      newer += log_decay_[j];
      weight_[j] = own;
    }
    decay_ = std::exp(std::min(newer, 0.0f));
    float all = 0;
    for (int s = 0; s < window; ++s) {
      all += log_decay_[h + s];
      prefix_[s] = std::exp(std::min(all, 0.0f));
      float since = 0;
      for (int i = s; i >= 0; --i) {
        within_[s * window + i] = weight_[h + i] * std::exp(std::min(since, 0.0f));
        since += log_decay_[h + i];
      }
    }
  }

  void scale_vector(float* x, float scale) const {
    if (p_.normalise) scale /= std::sqrt(dot(x, x, p_.state_dim) + kL2NormEps);
    for (int64_t e = 0; e < p_.state_dim; ++e) x[e] *= scale;
  }
  void form_vectors() {
    const int h = row_.history;
    for (int j = 0; j < h; ++j) {
      read_row(p_.cache_k, index(p_.cache_k, row_.slot, key_head_, place(j)), p_.state_dim, key(j));
      read_row(p_.cache_v, index(p_.cache_v, row_.slot, head_, place(j)), p_.head_dim,
               &value(j, 0));
    }
    for (int i = 0; i < row_.window; ++i) {
      const int64_t token = row_.token + i;
      float* k = key(h + i);
      read_row(p_.k, index(p_.k, token, key_head_), p_.state_dim, k);
      read_row(p_.q, index(p_.q, token, key_head_), p_.state_dim, query(i));
      read_row(p_.v, index(p_.v, token, head_), p_.head_dim, &value(h + i, 0));
      if (!delta_) continue;
      scale_vector(k, 1);
      scale_vector(query(i), p_.scale);
      if (!single_)
        for (int64_t e = 0; e < p_.state_dim; ++e) k[e] = rounded_as(p_.cache_k, k[e]);
    }
    for (int j = row_.flushes ? h : 0; j < rows_; ++j)
      for (int s = 0; s < row_.window; ++s) {
        key_query(j, s) = dot(key(j), query(s), p_.state_dim);
        if (delta_) key_key(j, s) = dot(key(j), key(h + s), p_.state_dim);
      }
  }

  void cache_window() const {
    const int64_t group = p_.heads / p_.key_heads;
    for (int i = 0; i < row_.window; ++i) {
      const int j = row_.history + i, at = place(j);
      set_value(p_.cache_g, index(p_.cache_g, row_.slot, head_, at), cached_[j]);
      if (head_ % group == 0)
        write_row(p_.cache_k, index(p_.cache_k, row_.slot, key_head_, at), p_.state_dim, key(j));
      if (!delta_)
        write_row(p_.cache_v, index(p_.cache_v, row_.slot, head_, at), p_.head_dim, &value(j, 0));
    }
  }

  void add_row(float write, const float* k) const {
    for (int64_t e = 0; e < p_.state_dim; ++e) state_[e] += write * k[e];
  }
  void step_row(int64_t r) {
    const int h = row_.history;
    const int64_t at = index(p_.state, row_.slot, head_, r);
    read_row(p_.state, at, p_.state_dim, state_);
    if (row_.flushes) {
      for (int64_t e = 0; e < p_.state_dim; ++e) state_[e] *= decay_;
      for (int j = 0; j < h; ++j) add_row(weight_[j] * value(j, r), key(j));
      if (!single_ && h > 0) write_row(p_.state, at, p_.state_dim, state_);
    }
    for (int s = 0; s < row_.window; ++s) finish_token(s, r);
    if (!row_.flushes || !single_) return;
    for (int64_t e = 0; e < p_.state_dim; ++e) state_[e] *= prefix_[0];
    add_row(weight_[h] * value(h, r), key(h));
    write_row(p_.state, at, p_.state_dim, state_);
  }

  // What state and cached rows give for a vector.
  float read(const float* vector, const float* products, int s, int64_t r) const {
    float sum = dot(state_, vector, p_.state_dim);
    if (!row_.flushes) {
      sum *= decay_;
      for (int j = 0; j < row_.history; ++j)
        sum += weight_[j] * products[j * row_.window + s] * value(j, r);
    }
    return prefix_[s] * sum;
  }
  void finish_token(int s, int64_t r) {
    const int h = row_.history, window = row_.window;
    const int64_t token = row_.token + s;
    if (delta_) {
      float known = read(key(h + s), key_key_, s, r);
      for (int i = 0; i < s; ++i)
        known += within_[s * window + i] * key_key(h + i, s) * value(h + i, r);
      float& v = value(h + s, r);
      v = beta_[s] * (v - known);
      if (keeps_window())
        set_value(p_.cache_v, index(p_.cache_v, row_.slot, head_, place(h + s)) + r, v);
    }
    float o = read(query(s), key_query_, s, r);
    for (int i = 0; i <= s; ++i)
      o += within_[s * window + i] * key_query(h + i, s) * value(h + i, r);
    if (p_.skip.data)
      o += value(h + s, r) * value_at(p_.skip, head_ * p_.skip.stride[0] + r * p_.skip.stride[1]);
    if (p_.z.data) {
      const float z = value_at(p_.z, index(p_.z, token, head_) + r);
      o *= z / (1 + std::exp(-z));
    }
    set_value(p_.out, index(p_.out, token, head_) + r, o);
  }

  const PagedStep& p_;
  const PagedRow& row_;
  const int64_t head_, key_head_;
  const int rows_;
  const bool delta_, single_;
  float decay_ = 1;
  float *keys_, *values_, *log_decay_, *weight_, *cached_, *key_query_, *key_key_;
  float *queries_, *within_, *prefix_, *beta_, *state_;
};

void pad_outputs(const PagedStep& p, const PagedRow& row, int64_t head) {
  if (p.family == REPLAYSSM_MAMBA2) return;
  for (int i = 0; i < row.window; ++i)
    for (int64_t r = 0; r < p.head_dim; ++r)
      set_value(p.out, index(p.out, row.token + i, head) + r, 0);
}

}  // namespace

void paged_step(const PagedStep& p, ThreadPool& pool) {
  pool.for_ranges(p.sequences * p.heads, [&](int64_t begin, int64_t end, int thread) {
    Scratch& scratch = pool.local<Scratch>(thread);
    for (int64_t n = begin; n < end; ++n) {
      PagedRow row = paged_row(p, n / p.heads);
      row.window = std::min(row.window, static_cast<int>(p.max_window));
      if (row.slot < 0) {
        pad_outputs(p, row, n % p.heads);
      } else if (row.window > 0 || row.flushes) {
        HeadStep(p, row, n % p.heads, scratch).run();
      }
    }
  });
}

void paged_commit(const PagedCursors& cursors, const PagedIntegers& accepted) {
  for (int64_t s = 0; s < cursors.sequences; ++s) {
    const int64_t slot = integer_at(cursors.slot, s);
    if (slot >= 0 && slot != cursors.null_slot)
      replayssm::paged_commit(cursors, slot, integer_at(accepted, s));
  }
}

void paged_reset(const PagedCursors& cursors, const PagedIntegers& first) {
  for (int64_t s = 0; s < cursors.sequences; ++s) {
    const int64_t slot = integer_at(cursors.slot, s);
    if (slot >= 0 && slot != cursors.null_slot && integer_at(first, s) != 0)
      replayssm::paged_reset(cursors, slot);
  }
}

}  // namespace replayssm::cpu
