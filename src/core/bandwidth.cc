#include "core/bandwidth.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/check.h"

namespace replayssm {
namespace {

constexpr int64_t kLanes = 16;  // independent accumulators, few enough for the registers
constexpr int64_t kLineBytes = kLanes * static_cast<int64_t>(sizeof(uint64_t));

uint64_t sum(const uint64_t* data, int64_t lines) {
  std::array<uint64_t, kLanes> total{};
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t lane = 0; lane < kLanes; ++lane) total[lane] += data[line * kLanes + lane];
  }
  uint64_t result = 0;
  for (const uint64_t value : total) result += value;
  return result;
}

void increment(uint64_t* data, int64_t lines) {
  for (int64_t i = 0; i < lines * kLanes; ++i) data[i] += 1;
}

// Writes `value` everywhere without reading what was there.
void fill(uint64_t* data, int64_t lines, uint64_t value) {
#if defined(__SSE2__)
  const auto pair = _mm_set1_epi64x(static_cast<int64_t>(value));
  for (int64_t i = 0; i < lines * kLanes; i += 2)
    _mm_stream_si128(reinterpret_cast<__m128i*>(data + i), pair);
  _mm_sfence();
#else
  std::fill_n(data, lines * kLanes, value);
#endif
}

template <class Fn>
double seconds(Fn&& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

BandwidthProbe::BandwidthProbe(int64_t bytes, ThreadPool& pool)
    : buffer_((bytes + kLineBytes - 1) / kLineBytes * kLineBytes), pool_(pool) {
  REPLAYSSM_CHECK(bytes > 0, "bytes=", bytes);
  sample();  // gives every page its memory
}

Bandwidth BandwidthProbe::sample() {
  auto* data = buffer_.as<uint64_t>();
  const int64_t lines = buffer_.bytes() / kLineBytes;
  const auto bytes = static_cast<double>(buffer_.bytes());
  const uint64_t value = data[0] + 1;
  const double writing = seconds([&] {
    pool_.for_ranges(lines, [&](int64_t begin, int64_t end, int) {
      fill(data + begin * kLanes, end - begin, value);
    });
  });
  const double rewriting = seconds([&] {
    pool_.for_ranges(lines, [&](int64_t begin, int64_t end, int) {
      increment(data + begin * kLanes, end - begin);
    });
  });
  std::atomic<uint64_t> total{0};  // keeps the sums alive
  const double reading = seconds([&] {
    pool_.for_ranges(lines, [&](int64_t begin, int64_t end, int) {
      total.fetch_add(sum(data + begin * kLanes, end - begin), std::memory_order_relaxed);
    });
  });
  const auto expected = static_cast<uint64_t>(lines * kLanes) * (value + 1);
  REPLAYSSM_CHECK(total == expected, "memory reads back wrong: ", total, " != ", expected);
  return {.read = bytes / reading,
          .read_modify_write = 2 * bytes / rewriting,
          .write = bytes / writing};
}

}  // namespace replayssm
