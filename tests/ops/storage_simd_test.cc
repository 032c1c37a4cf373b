// Storage formats, stochastic rounding and Kimi Delta's gates on every instruction set of the
// machine; the tests of whole ops run on the best one alone.
#include <cmath>
#include <limits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/storage_simd_test.cc"
#include "hwy/foreach_target.h"
// clang-format off: after foreach_target.h
#include "ops/cpu/channel_gate-inl.h"
#include "ops/cpu/state_writer-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class T>
void decode(const T* codes, size_t count, float* y) {
  ForVectors(D(), count, [&](size_t i, auto n) {
    StoreF32N(hn::Mul(LoadF32N(D(), codes + i, n), hn::Set(D(), kLoadFactor<T>)), D(), y + i, n);
  });
}
template <class T>
void encode(const float* x, size_t count, T* codes) {
  ForVectors(D(), count,
             [&](size_t i, auto n) { StoreF32N(LoadF32N(D(), x + i, n), D(), codes + i, n); });
}

void decode_e4m3(const e4m3* codes, size_t count, float* y) { decode(codes, count, y); }
void decode_int8(const int8* codes, size_t count, float* y) { decode(codes, count, y); }
void encode_e4m3(const float* x, size_t count, e4m3* codes) { encode(x, count, codes); }
void encode_int8(const float* x, size_t count, int8* codes) { encode(x, count, codes); }
void copy_e4m3(const float* row, int64_t count, e4m3* copy, float* scale) {
  store_copy_rows<e4m3, 1>(row, count, count, copy, scale);
}
void copy_int8(const float* row, int64_t count, int8* copy, float* scale) {
  store_copy_rows<int8, 1>(row, count, count, copy, scale);
}
void round_bf16(const float* row, int64_t count, uint64_t seed, int64_t at, bf16* y) {
  store_stochastic(row, count, RowBits(seed, at, 7, 3, count), y);
}
void round_fp16(const float* row, int64_t count, uint64_t seed, int64_t at, fp16* y) {
  store_stochastic(row, count, RowBits(seed, at, 7, 3, count), y);
}
void form_decays(const float* raw, int64_t count, const ChannelGate& gate, float* a) {
  channel_decays(raw, count, padded(count), gate, 0, a);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "core/buffer.h"
#include "ops/reference/number_format.h"

namespace replayssm::cpu {
namespace {

HWY_EXPORT(decode_e4m3);
HWY_EXPORT(decode_int8);
HWY_EXPORT(encode_e4m3);
HWY_EXPORT(encode_int8);
HWY_EXPORT(copy_e4m3);
HWY_EXPORT(copy_int8);
HWY_EXPORT(round_bf16);
HWY_EXPORT(round_fp16);
HWY_EXPORT(form_decays);

// Runs the test body on one instruction set after the other.
class StorageSimd : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

INSTANTIATE_TEST_SUITE_P(Targets, StorageSimd,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

template <class T>
uint32_t code_of(T x) {
  return x.bits & (sizeof(T) == 1 ? 0xffu : 0xffffu);
}

template <class T, class Decode, class Encode>
void check_codes(Decode decode, Encode encode) {
  std::vector<T> codes(256);
  for (size_t i = 0; i < 256; ++i) codes[i].bits = static_cast<decltype(T::bits)>(i);
  std::vector<float> values(256), x;
  decode(codes.data(), codes.size(), values.data());
  const auto is_number = [](size_t i) { return sizeof(T) != 1 || (i & 0x7f) != 0x7f; };
  for (size_t i = 0; i < 256; ++i) {
    const bool nan = dtype_of<T>() == DType::kFloat8E4M3 && !is_number(i);
    if (!nan) {
      ASSERT_EQ(values[i], reference::decode(dtype_of<T>(), static_cast<uint32_t>(i))) << i;
    }
  }
  // Values, the middles between them, and their neighbours.
  for (float size = 0; size < 500; size += 0x1p-11f * std::max(1.0f, std::floor(size))) {
    for (const float value : {size, -size}) {
      x.push_back(value);
      x.push_back(std::nextafter(value, 1e9f));
      x.push_back(std::nextafter(value, -1e9f));
    }
  }
  codes.resize(x.size());
  encode(x.data(), x.size(), codes.data());
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_EQ(code_of(codes[i]), reference::encode(dtype_of<T>(), x[i])) << x[i];
}

TEST_P(StorageSimd, EightBitCodesAreTheirValues) {
  check_codes<e4m3>([](auto... a) { HWY_DYNAMIC_DISPATCH(decode_e4m3)(a...); },
                    [](auto... a) { HWY_DYNAMIC_DISPATCH(encode_e4m3)(a...); });
  check_codes<int8>([](auto... a) { HWY_DYNAMIC_DISPATCH(decode_int8)(a...); },
                    [](auto... a) { HWY_DYNAMIC_DISPATCH(encode_int8)(a...); });
}

// Rows of random and of short numbers, whose quotients fall on middles between codes.
template <class T, class Fn>
void check_rows(Fn copy) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 200; ++trial) {
    const int64_t count = 1 + static_cast<int64_t>(random() % 70);
    Array<float> row(padded(count));
    const float unit = std::ldexp(1.0f + static_cast<float>(random() % 8) / 8, trial % 40 - 20);
    for (int64_t i = 0; i < count; ++i)
      row[i] = trial % 2 ? normal(random) : unit * (static_cast<float>(random() % 509) - 254) / 2;
    if (trial == 7) std::fill(row.begin(), row.end(), 0.0f);
    std::vector<T> codes(count);
    float scale = -1;
    copy(row.data(), count, codes.data(), &scale);
    const auto want =
        reference::encode_row(dtype_of<T>(), {row.data(), static_cast<size_t>(count)});
    ASSERT_EQ(scale, want.scale);
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(code_of(codes[i]), want.codes[i]) << row[i];
  }
  Array<float> row(padded(20));
  row[17] = std::numeric_limits<float>::quiet_NaN();
  T codes[20];
  float scale = 0;
  copy(row.data(), int64_t{20}, codes, &scale);
  EXPECT_TRUE(std::isnan(scale));
}

TEST_P(StorageSimd, RowsOfCopiesAreTheNearestCodes) {
  check_rows<e4m3>([](auto... a) { HWY_DYNAMIC_DISPATCH(copy_e4m3)(a...); });
  check_rows<int8>([](auto... a) { HWY_DYNAMIC_DISPATCH(copy_int8)(a...); });
}

template <class T, class Fn>
void check_rounding(Fn round) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t count = 1 + static_cast<int64_t>(random() % 200);
    Array<float> row(padded(count));
    for (int64_t i = 0; i < count; ++i) {
      // Any normal number; infinities and NaN are not rounded.
      const auto exponent = static_cast<uint32_t>(1 + random() % 254);
      row[i] =
          std::bit_cast<float>((static_cast<uint32_t>(random()) & 0x807fffffu) | exponent << 23);
      if (trial % 2)
        row[i] = std::ldexp(row[i], -std::ilogb(row[i]) - static_cast<int>(random() % 30));
    }
    const uint64_t seed = (uint64_t{random()} << 32) | random();
    const auto at = static_cast<int64_t>((uint64_t{random() % 16} << 32) | random());
    std::vector<T> y(count);
    round(row.data(), count, seed, at, y.data());
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = reference::rounding_bits(seed, at, 7, 3, i, count);
      ASSERT_EQ(code_of(y[i]), reference::encode_stochastic(dtype_of<T>(), row[i], bits)) << row[i];
    }
  }
}

TEST_P(StorageSimd, StochasticRoundingIsTheDefinition) {
  check_rounding<bf16>([](auto... a) { HWY_DYNAMIC_DISPATCH(round_bf16)(a...); });
  check_rounding<fp16>([](auto... a) { HWY_DYNAMIC_DISPATCH(round_fp16)(a...); });
}

TEST_P(StorageSimd, DecaysOfAnyGate) {
  std::vector<float> raw = {0.0f, -0.0f, 1e4f, -1e4f, 88.0f, -88.0f, 1e-6f, -1e-6f};
  for (float x = -30; x < 30; x += 0.0371f) raw.push_back(x);
  const auto count = static_cast<int64_t>(raw.size());
  const std::vector<float> bias(raw.size(), 0.0f);
  Array<float> a(padded(count));
  for (const float scale : {-1e-3f, -1.0f, -16.0f}) {
    for (const float bound : {0.0f, -5.0f}) {
      HWY_DYNAMIC_DISPATCH(form_decays)(raw.data(), count, {&scale, bias.data(), bound}, a.data());
      for (int64_t i = 0; i < count; ++i) {
        const double x = raw[i];
        const double log_decay =
            bound < 0 ? bound / (1 + std::exp(double{scale} * x))
                      : scale * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
        // A few roundings of the logarithm's size, and those of the exponential.
        const double want = std::exp(log_decay);
        const double error = want * (8 * std::abs(log_decay) + 4) * 0x1p-24;
        EXPECT_NEAR(a[i], want, error + std::numeric_limits<float>::min()) << scale << " " << x;
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::cpu

#endif  // HWY_ONCE
