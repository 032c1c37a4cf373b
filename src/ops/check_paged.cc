#include "ops/check_paged.h"

#include "core/check.h"
#include "replayssm/ops.h"

namespace replayssm {
namespace {

void check_size(const char* name, int64_t size, int64_t most) {
  if (size < 1 || size > most) fail("paged step: ", name, ": expected 1 .. ", most, ", got ", size);
}
void check_values(const char* name, const PagedValues& x, bool optional = false) {
  if (x.data == nullptr) {
    if (!optional) fail("paged step: ", name, ": expected memory, got a null pointer");
    return;
  }
  if (x.dtype > REPLAYSSM_BFLOAT16)
    fail("paged step: ", name, ": expected float32, float16 or bfloat16, got dtype ", int(x.dtype));
}
void check_integers(const char* name, const PagedIntegers& x, bool optional = false) {
  if (x.data == nullptr) {
    if (!optional) fail("paged step: ", name, ": expected memory, got a null pointer");
    return;
  }
  if (x.bytes != 1 && x.bytes != 4 && x.bytes != 8)
    fail("paged step: ", name, ": expected integers of 1, 4 or 8 bytes, got ", x.bytes);
}
bool is_power_of_two(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

}  // namespace

void check_paged(const PagedStep& p) {
  if (p.family != REPLAYSSM_MAMBA2 && p.family != REPLAYSSM_GATED_DELTA)
    fail("paged step: family: expected Mamba-2 or Gated Delta, got ", int(p.family));
  if (p.rule > REPLAYSSM_PAGED_WINDOW)
    fail("paged step: rule: expected single or window, got ", int(p.rule));
  const bool delta = p.family == REPLAYSSM_GATED_DELTA, window = p.rule == REPLAYSSM_PAGED_WINDOW;
  if (p.sequences < 0 || p.sequences > 65535)
    fail("paged step: sequences: expected 0 .. 65535, got ", p.sequences);
  check_size("heads", p.heads, 65535);
  check_size("head_dim", p.head_dim, 65535);
  check_size("state_dim", p.state_dim, kMaxStateDim);
  check_size("ring", p.ring, kMaxPagedRing);
  check_size("max_window", p.max_window, kMaxPagedWindow);
  if (p.key_heads < 1 || p.heads % p.key_heads != 0)
    fail("paged step: key_heads: expected a divisor of heads=", p.heads, ", got ", p.key_heads);
  if (window && !is_power_of_two(p.ring))
    fail("paged step: ring: expected a power of two, got ", p.ring);
  if (p.sequences == 0) return;
  check_values("state", p.state);
  check_values("v", p.v);
  check_values("k", p.k);
  check_values("q", p.q);
  check_values("dt", p.dt);
  check_values("beta", p.beta, !delta);
  check_values("a", p.a);
  check_values("dt_bias", p.dt_bias, true);
  check_values("skip", p.skip, true);
  check_values("z", p.z, true);
  check_values("out", p.out);
  check_values("cache_v", p.cache_v);
  check_values("cache_k", p.cache_k);
  check_values("cache_g", p.cache_g);
  if (p.cache_g.dtype != REPLAYSSM_FLOAT32)
    fail("paged step: cache_g: expected float32, got dtype ", int(p.cache_g.dtype));
  check_integers("slot", p.slot, !window);
  check_integers("query_start", p.query_start, !window);
  check_integers("write_pos", p.write_pos);
  check_integers("origin", p.origin, !window);
  check_integers("is_flush", p.is_flush, !window);
}

void check_paged(const PagedCursors& p, const PagedIntegers& rows) {
  check_integers("slot", p.slot);
  check_integers("rows", rows);
  if (p.write_pos == nullptr || p.origin == nullptr || p.is_flush == nullptr)
    fail("paged cursors: write_pos, origin, is_flush: expected memory, got a null pointer");
  if (p.max_window < 1) fail("paged cursors: max_window: expected 1 or more, got ", p.max_window);
  if (!is_power_of_two(p.ring)) fail("paged cursors: ring: expected a power of two, got ", p.ring);
}

}  // namespace replayssm
