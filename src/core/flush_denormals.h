// Floating-point mode of all numerical work: values below 2^-126 count as zero.
//
// A state that decays fast makes such values in bulk, and a CPU takes a hundred times longer for an
// operation on one. They are 1e-38 of nothing: no result depends on them.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace replayssm {

// Sets the mode of the calling thread for its own lifetime.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(get()) { set(saved_ | kFlush); }
  ~FlushDenormals() { set(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // results and operands
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = uint64_t{1} << 24;
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif

  uint64_t saved_;
};

}  // namespace replayssm
