// What a pool's read copies must hold.
#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "ops/recurrent_pool.h"
#include "ops/reference/number_format.h"

namespace replayssm::testing {

// Of a float32 checkpoint.
inline std::span<const float> checkpoint_rows(Pool& pool, int64_t slot) {
  return {reinterpret_cast<const float*>(pool.slot(slot).data()),
          static_cast<size_t>(pool.elements())};
}

// Row r of the copy as the reference would have written it.
inline reference::EncodedRow stored_row(const Case& c, Pool& pool, int64_t slot, int64_t r) {
  const int64_t k = c.shape.state_dim, bytes = dtype_bytes(*c.read_copy);
  reference::EncodedRow row;
  for (int64_t i = 0; i < k; ++i) {
    uint32_t code = 0;
    std::memcpy(&code, pool.read_copy.slot(slot).data() + (r * k + i) * bytes, bytes);
    row.codes.push_back(code);
  }
  if (pool.scaled())
    std::memcpy(&row.scale, pool.read_scale.slot(slot).data() + r * sizeof(float), sizeof(float));
  return row;
}

// The copy is what the format makes of the checkpoint, bit for bit (pitfalls 10, 28: scales read
// back after they were overwritten, or shared by several rows).
inline void expect_copy_of_checkpoint(const Case& c, Pool& pool, int64_t slot) {
  const auto rows = checkpoint_rows(pool, slot);
  const int64_t k = c.shape.state_dim;
  for (int64_t r = 0; r < c.shape.heads * c.shape.head_dim; ++r) {
    const auto want = reference::encode_row(*c.read_copy, rows.subspan(r * k, k));
    const auto got = stored_row(c, pool, slot, r);
    ASSERT_EQ(got.scale, want.scale) << name(c) << " row " << r;
    ASSERT_EQ(got.codes, want.codes) << name(c) << " row " << r;
  }
}

}  // namespace replayssm::testing
