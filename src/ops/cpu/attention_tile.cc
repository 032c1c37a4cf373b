// Online softmax over chunks of keys, for a tile of query rows.
//
// The keys and values of a chunk are widened to fp32 once. Scores are kept with the rows in the
// lanes ([key][row]): products, maxima and exponentials then need no sum over lanes, and a key's
// element is one broadcast. The values are accumulated with the head's dimensions in the lanes.
#include "ops/cpu/attention_tile.h"

#include <algorithm>
#include <limits>

#include "core/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/attention_tile.cc"
#include "hwy/foreach_target.h"
// clang-format off: behind foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace replayssm::HWY_NAMESPACE;

constexpr hn::ScalableTag<float> d;
using Vec = hn::Vec<decltype(d)>;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Views of the scratch memory.
struct Work {
  int64_t lanes, rows, dim;  // rows and dim padded to whole vectors
  float* q;                  // [head_dim, rows], scaled
  float* k;                  // [kTileKeys, dim]
  float* v;                  // [kTileKeys, dim]
  float* p;                  // [kTileKeys, rows]: scores, then exponentials
  float* out;                // [rows, dim]: sums of exponential * v
  float* max;                // [rows]
  float* sum;                // [rows]
  float* decay;              // [rows]: what the last chunk scaled the sums by
  float* visible;            // [rows]: keys a row sees, from the start of the chunk

  Work(const AttentionTile& t, AttentionScratch& scratch)
      : lanes(static_cast<int64_t>(hn::Lanes(d))),
        rows(RoundUp(t.rows, lanes)),
        dim(RoundUp(t.cache->head_dim, lanes)) {
    const int64_t parts[] = {t.cache->head_dim * rows,
                             kTileKeys * dim,
                             kTileKeys * dim,
                             kTileKeys * rows,
                             rows * dim,
                             rows,
                             rows,
                             rows,
                             rows};
    float** const views[] = {&q, &k, &v, &p, &out, &max, &sum, &decay, &visible};
    int64_t total = 0;
    for (const int64_t part : parts) total += RoundUp(part, 16);
    if (scratch.memory.size() < total) scratch.memory = Array<float>(total);
    float* next = scratch.memory.data();
    for (size_t i = 0; i < std::size(parts); ++i) {
      *views[i] = next;
      next += RoundUp(parts[i], 16);
    }
  }
};

void LoadQueries(const AttentionTile& t, const Work& w) {
  const int64_t head_dim = t.cache->head_dim;
  for (int64_t i = 0; i < head_dim; ++i)
    for (int64_t r = 0; r < w.rows; ++r)
      w.q[i * w.rows + r] = r < t.rows ? t.q[r][i] * t.scale : 0.0f;
}

// Widens keys and values [first, first + count), zero behind head_dim.
template <class T>
void LoadChunk(const AttentionTile& t, const Work& w, int64_t first, int64_t count) {
  const auto& c = *t.cache;
  const int32_t* block = t.blocks + first / c.block_size;
  int64_t offset = first % c.block_size;
  for (int64_t i = 0; i < count; ++i) {
    if (offset == c.block_size) {
      ++block;
      offset = 0;
    }
    const int64_t row = (*block * c.kv_heads + t.kv_head) * c.block_size + offset++;
    const T* k = static_cast<const T*>(c.k) + row * c.head_dim;
    const T* v = static_cast<const T*>(c.v) + row * c.head_dim;
    ForVectors(d, static_cast<size_t>(c.head_dim), [&](size_t j, auto n) HWY_ATTR {
      hn::Store(LoadF32N(d, k + j, n), d, w.k + i * w.dim + j);
      hn::Store(LoadF32N(d, v + j, n), d, w.v + i * w.dim + j);
    });
  }
}

// p[key][row] = q[row] . k[key] for kVectors vectors of rows and kKeys keys.
template <int kVectors, int kKeys>
void ScoreBlock(const Work& w, int64_t head_dim, int64_t row, int64_t key) {
  Vec sum[kVectors][kKeys];
  for (auto& vector : sum)
    for (auto& s : vector) s = hn::Zero(d);
  for (int64_t i = 0; i < head_dim; ++i) {
    Vec q[kVectors];
    for (int a = 0; a < kVectors; ++a) q[a] = hn::Load(d, w.q + i * w.rows + row + a * w.lanes);
    for (int b = 0; b < kKeys; ++b) {
      const auto k = hn::Set(d, w.k[(key + b) * w.dim + i]);
      for (int a = 0; a < kVectors; ++a) sum[a][b] = hn::MulAdd(q[a], k, sum[a][b]);
    }
  }
  for (int a = 0; a < kVectors; ++a)
    for (int b = 0; b < kKeys; ++b)
      hn::Store(sum[a][b], d, w.p + (key + b) * w.rows + row + a * w.lanes);
}

template <int kVectors>
void ScoreRows(const Work& w, int64_t head_dim, int64_t row, int64_t count) {
  constexpr int kKeys = kVectors == 1 ? 8 : 4;
  int64_t key = 0;
  for (; key + kKeys <= count; key += kKeys) ScoreBlock<kVectors, kKeys>(w, head_dim, row, key);
  for (; key < count; ++key) ScoreBlock<kVectors, 1>(w, head_dim, row, key);
}

void Scores(const Work& w, int64_t head_dim, int64_t count) {
  int64_t row = 0;
  for (; row + 4 * w.lanes <= w.rows; row += 4 * w.lanes) ScoreRows<4>(w, head_dim, row, count);
  for (; row < w.rows; row += w.lanes) ScoreRows<1>(w, head_dim, row, count);
}

// Turns scores into exponentials and updates maxima and sums. Keys that a row does not see get 0.
void Softmax(const Work& w, int64_t count) {
  const auto minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < w.rows; row += w.lanes) {
    const auto visible = hn::Load(d, w.visible + row);
    const auto old_max = hn::Load(d, w.max + row);
    auto max = old_max;
    for (int64_t key = 0; key < count; ++key) {
      float* p = w.p + key * w.rows + row;
      const auto seen = hn::Lt(hn::Set(d, static_cast<float>(key)), visible);
      const auto score = hn::IfThenElse(seen, hn::Load(d, p), minus_infinity);
      hn::Store(score, d, p);
      max = hn::Max(score, max);
    }
    // As long as all scores are -inf there is nothing to subtract.
    const auto shift = hn::IfThenElse(hn::Eq(max, minus_infinity), hn::Zero(d), max);
    const auto decay = ExpF32(d, hn::Sub(old_max, shift));
    auto sum = hn::Mul(hn::Load(d, w.sum + row), decay);
    for (int64_t key = 0; key < count; ++key) {
      float* p = w.p + key * w.rows + row;
      const auto e = ExpF32(d, hn::Sub(hn::Load(d, p), shift));
      sum = hn::Add(sum, e);
      hn::Store(e, d, p);
    }
    hn::Store(max, d, w.max + row);
    hn::Store(sum, d, w.sum + row);
    hn::Store(decay, d, w.decay + row);
  }
}

// out[row] = decay[row] * out[row] + sum over `count` keys of p[key][row] * v[key], for kRows rows
// and kVectors vectors of dimensions.
template <int kRows, int kVectors>
void AccumulateBlock(const Work& w, int64_t row, int64_t i, int64_t count) {
  Vec sum[kRows][kVectors];
  for (int a = 0; a < kRows; ++a)
    for (int b = 0; b < kVectors; ++b)
      sum[a][b] = hn::Mul(hn::Load(d, w.out + (row + a) * w.dim + i + b * w.lanes),
                          hn::Set(d, w.decay[row + a]));
  for (int64_t key = 0; key < count; ++key) {
    Vec v[kVectors];
    for (int b = 0; b < kVectors; ++b) v[b] = hn::Load(d, w.v + key * w.dim + i + b * w.lanes);
    for (int a = 0; a < kRows; ++a) {
      const auto p = hn::Set(d, w.p[key * w.rows + row + a]);
      for (int b = 0; b < kVectors; ++b) sum[a][b] = hn::MulAdd(p, v[b], sum[a][b]);
    }
  }
  for (int a = 0; a < kRows; ++a)
    for (int b = 0; b < kVectors; ++b)
      hn::Store(sum[a][b], d, w.out + (row + a) * w.dim + i + b * w.lanes);
}

template <int kRows>
void AccumulateRows(const Work& w, int64_t row, int64_t count) {
  int64_t i = 0;
  for (; i + 4 * w.lanes <= w.dim; i += 4 * w.lanes) AccumulateBlock<kRows, 4>(w, row, i, count);
  for (; i < w.dim; i += w.lanes) AccumulateBlock<kRows, 1>(w, row, i, count);
}

// Keys of a tree's window that a row's token does not descend from.
void HideStrangers(const AttentionTile& t, const Work& w, int64_t first, int64_t count) {
  for (int64_t r = 0; r < t.rows; ++r) {
    if (t.ancestors[r] == 0) continue;
    for (int64_t key = std::max<int64_t>(t.window - first, 0); key < count; ++key) {
      const int64_t bit = first + key - t.window;
      if (bit > 63 || (t.ancestors[r] >> bit & 1) == 0)
        w.p[key * w.rows + r] = -std::numeric_limits<float>::infinity();
    }
  }
}

// Rows that see different parts of the chunk go one by one: a value that a row does not see must
// not reach it, not even times 0.
void Accumulate(const AttentionTile& t, const Work& w, int64_t first, int64_t count) {
  const auto seen = [&](int64_t r) { return std::clamp<int64_t>(t.visible[r] - first, 0, count); };
  for (int64_t row = 0; row < t.rows;) {
    if (row + 4 <= t.rows && seen(row) == seen(row + 3)) {
      AccumulateRows<4>(w, row, seen(row));
      row += 4;
    } else {
      AccumulateRows<1>(w, row, seen(row));
      row += 1;
    }
  }
}

void Finish(const AttentionTile& t, const Work& w) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const auto inverse = hn::Set(d, 1.0f / w.sum[r]);
    ForVectors(d, static_cast<size_t>(t.cache->head_dim), [&](size_t i, auto n) HWY_ATTR {
      StoreF32N(hn::Mul(hn::Load(d, w.out + r * w.dim + i), inverse), d, t.out[r] + i, n);
    });
  }
}

void Attend(const AttentionTile& t, AttentionScratch& scratch) {
  const Work w(t, scratch);
  LoadQueries(t, w);
  std::fill_n(w.out, w.rows * w.dim, 0.0f);
  std::fill_n(w.sum, w.rows, 0.0f);
  std::fill_n(w.max, w.rows, -std::numeric_limits<float>::infinity());
  for (int64_t first = 0; first < t.keys; first += kTileKeys) {
    const int64_t count = std::min(kTileKeys, t.keys - first);
    for (int64_t r = 0; r < w.rows; ++r)
      w.visible[r] = r < t.rows ? static_cast<float>(std::min(t.visible[r] - first, count)) : 0.0f;
    dispatch_float(t.cache->dtype, [&]<class T>() { LoadChunk<T>(t, w, first, count); });
    Scores(w, t.cache->head_dim, count);
    HideStrangers(t, w, first, count);
    Softmax(w, count);
    Accumulate(t, w, first, count);
  }
  Finish(t, w);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace replayssm::cpu {
namespace {

HWY_EXPORT(Attend);

}  // namespace

void attend(const AttentionTile& tile, AttentionScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(Attend)(tile, scratch);
}

}  // namespace replayssm::cpu

#endif  // HWY_ONCE
