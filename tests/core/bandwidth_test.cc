#include "core/bandwidth.h"

#include <gtest/gtest.h>

namespace replayssm {
namespace {

TEST(BandwidthProbe, MeasuresSomethingPlausible) {
  ThreadPool pool(2);
  BandwidthProbe probe((4 << 20) + 1, pool);
  EXPECT_GT(probe.bytes(), 4 << 20);
  for (int i = 0; i < 3; ++i) {  // each sample checks what it reads back
    const Bandwidth bandwidth = probe.sample();
    EXPECT_GT(bandwidth.read, 1e7);
    EXPECT_GT(bandwidth.read_modify_write, 1e7);
    EXPECT_GT(bandwidth.write, 1e7);
    EXPECT_LT(bandwidth.read, 1e13);
    EXPECT_LT(bandwidth.write, 1e13);
    EXPECT_LT(bandwidth.read_modify_write, 1e13);
  }
}

}  // namespace
}  // namespace replayssm
