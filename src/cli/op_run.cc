#include "cli/op_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "core/dispatch.h"
#include "ops/cpu/recurrent.h"

namespace replayssm::cli {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

template <class Fn>
int64_t most(const OpSetup& setup, Fn&& fn) {
  int64_t result = 0;
  for (const OpVariant& variant : setup.variants) result = std::max<int64_t>(result, fn(variant));
  return result;
}

// Of one call.
int64_t most_tokens(const OpSetup& setup) {
  return setup.batch *
         most(setup, [](const OpVariant& variant) { return variant.schedule.window; });
}

bool any(const OpSetup& setup, OpKind kind) {
  return std::ranges::any_of(setup.variants, [&](const OpVariant& v) { return v.kind == kind; });
}

DType activation(const OpSetup& setup) { return setup.variants.front().schedule.activation_dtype; }

int64_t slot_ring_rows(const OpSetup& setup) {
  return most(setup, [&](const OpVariant& variant) {
    const bool keeps_ring = variant.kind == OpKind::kFold || variant.kind == OpKind::kStep;
    if (!keeps_ring || variant.schedule.route == Route::kConventional) return int64_t{0};
    const RingConfig ring = setup.ring(variant);
    return ring_rows(ring.buffer_len, ring.max_window);
  });
}

int64_t slot_snapshot_bytes(const OpSetup& setup) {
  return most(setup, [&](const OpVariant& variant) {
    const DecodeSchedule& schedule = variant.schedule;
    return variant.kind == OpKind::kSnapshots
               ? schedule.window * checkpoint_bytes(setup.shape, schedule.checkpoint_dtype)
               : 0;
  });
}

int64_t slot_conv_bytes(const OpSetup& setup) {
  if (!any(setup, OpKind::kConv)) return 0;
  const RingConfig ring = setup.ring(setup.variants.front());
  return conv_rows(ring.conv_kernel, ring.max_window) * setup.channels() *
         dtype_bytes(activation(setup));
}

int64_t slot_checkpoint_bytes(const OpSetup& setup) {
  if (any(setup, OpKind::kConv)) return 0;
  return checkpoint_bytes(setup.shape, setup.variants.front().schedule.checkpoint_dtype);
}

// Gives the pages their memory. As a number of any type the pattern is an ordinary one.
Buffer filled(int64_t bytes, ThreadPool& pool) {
  Buffer buffer(bytes);
  pool.for_ranges(bytes, [&](int64_t begin, int64_t end, int) {
    std::memset(buffer.as<char>() + begin, 0x38, static_cast<size_t>(end - begin));
  });
  return buffer;
}

Array<float> constant(int64_t count, float value) {
  Array<float> array(count);
  std::ranges::fill(array, value);
  return array;
}

// `count` values of `dtype`, random ones repeated.
Buffer random_values(int64_t count, DType dtype) {
  constexpr int64_t kPeriod = 65521;
  Buffer buffer(count * dtype_bytes(dtype));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  dispatch_float(dtype, [&]<class T>() {
    T* data = buffer.as<T>();
    for (int64_t i = 0; i < count; ++i)
      data[i] = i < kPeriod ? from_float<T>(normal(random)) : data[i - kPeriod];
  });
  return buffer;
}

}  // namespace

int64_t OpSetup::channels() const {
  return shape.heads * shape.head_dim + 2 * shape.key_heads * shape.state_dim;
}

RingConfig OpSetup::ring(const OpVariant& variant) const {
  const bool prompt = variant.kind == OpKind::kPrefill || variant.kind == OpKind::kTokens;
  return {.buffer_len = static_cast<int32_t>(variant.schedule.buffer_len),
          .max_window = prompt ? 1 : static_cast<int32_t>(variant.schedule.window),
          .conv_kernel = conv_kernel};
}

int64_t call_tokens(const OpSetup& setup, const OpVariant& variant) {
  const DecodeSchedule& schedule = variant.schedule;
  return setup.batch *
         (variant.kind == OpKind::kFold ? int64_t{schedule.buffer_len} : schedule.window);
}

StateTraffic call_traffic(const OpSetup& setup, const OpVariant& variant) {
  const DecodeSchedule& schedule = variant.schedule;
  const auto one = [&]() -> StateTraffic {
    switch (variant.kind) {
      case OpKind::kStep: return state_traffic(setup.shape, schedule);
      case OpKind::kSnapshots: return snapshot_traffic(setup.shape, schedule);
      case OpKind::kTokens: {
        DecodeSchedule single = schedule;
        single.window = single.accepted = 1;
        return state_traffic(setup.shape, single) * static_cast<double>(schedule.window);
      }
      case OpKind::kPrefill: return prefill_traffic(setup.shape, schedule);
      case OpKind::kFold: return fold_traffic(setup.shape, schedule, schedule.buffer_len);
      case OpKind::kConv:
        return conv_traffic(setup.channels(), setup.ring(variant), schedule.window,
                            schedule.activation_dtype);
      case OpKind::kShiftingConv:
        return shifting_conv_traffic(setup.channels(), setup.conv_kernel, schedule.window,
                                     schedule.activation_dtype);
    }
    return {};
  };
  return one() * static_cast<double>(setup.batch);
}

int64_t slot_bytes(const OpSetup& setup) {
  int64_t bytes = slot_checkpoint_bytes(setup) + slot_snapshot_bytes(setup) +
                  slot_conv_bytes(setup) +
                  slot_ring_rows(setup) * ring_row_bytes(setup.shape, activation(setup));
  for (const OpVariant& variant : setup.variants) {
    if (variant.schedule.read_copy)
      bytes += read_copy_bytes(setup.shape, *variant.schedule.read_copy);
  }
  return bytes;
}

double call_bytes(const OpSetup& setup) {
  const RecurrentShape& s = setup.shape;
  const int64_t activations = s.heads * (s.head_dim + s.state_dim) + 2 * s.key_heads * s.state_dim;
  const int64_t floats = 2 * (s.heads + setup.channels());
  const int64_t token = activations * dtype_bytes(activation(setup)) + floats * kFloatBytes;
  return static_cast<double>(token) * static_cast<double>(most_tokens(setup));
}

OpMemory::OpMemory(const OpSetup& setup, ThreadPool& pool) {
  const RecurrentShape& s = setup.shape;
  const DType dtype = activation(setup);
  const int64_t slots = setup.slots(), rows = slots * slot_ring_rows(setup);
  checkpoint_ = filled(slots * slot_checkpoint_bytes(setup), pool);
  snapshots = filled(slots * slot_snapshot_bytes(setup), pool);
  conv_inputs = filled(slots * slot_conv_bytes(setup), pool);
  ring_v_ = filled(rows * s.heads * s.head_dim * dtype_bytes(dtype), pool);
  ring_k_ = filled(rows * s.key_heads * s.state_dim * dtype_bytes(dtype), pool);
  ring_b_ = constant(rows * s.heads, 0.5f);
  if (s.family == Family::kKimiDelta) {
    ring_gate_ = filled(rows * s.heads * s.state_dim * dtype_bytes(dtype), pool);
  } else {
    ring_g_ = constant(rows * s.heads, -0.05f);
  }
  for (const OpVariant& variant : setup.variants) {
    const int64_t elements = variant.schedule.read_copy ? slots * state_elements(s) : 0;
    copies_.push_back(
        filled(elements * dtype_bytes(variant.schedule.read_copy.value_or(dtype)), pool));
    copy_scales_.push_back(constant(elements / s.state_dim, 1e-3f));
  }

  const int64_t tokens = most_tokens(setup);
  v = random_values(tokens * s.heads * s.head_dim, dtype);
  k = random_values(tokens * s.key_heads * s.state_dim, dtype);
  q = random_values(tokens * s.key_heads * s.state_dim, dtype);
  gate = random_values(tokens * s.heads * s.state_dim, dtype);
  b = constant(tokens * s.heads, 0.5f);
  g = constant(tokens * s.heads, -0.05f);
  scale = constant(s.heads, -0.05f);
  bias = constant(s.heads * s.state_dim, 0);
  x = random_values(tokens * setup.channels(), DType::kFloat32);
  weight = constant(kMaxConvKernel * setup.channels(), 0.25f);
  o = Buffer(tokens * setup.channels() * kFloatBytes);
  source = Array<int32_t>(setup.batch);
  for (int32_t& accepted : source)
    accepted = static_cast<int32_t>(setup.variants.front().schedule.accepted) - 1;
  slot = Array<int32_t>(slots);
  std::iota(slot.begin(), slot.end(), 0);
}

RecurrentState OpMemory::state(const OpSetup& setup, const OpVariant& variant) const {
  RecurrentState state;
  state.checkpoint = checkpoint_.as<void>();
  state.ring_v = ring_v_.as<void>();
  state.ring_k = ring_k_.as<void>();
  state.ring_b = ring_b_.data();
  state.ring_g = ring_g_.data();
  state.ring_gate = ring_gate_.as<void>();
  state.checkpoint_dtype = variant.schedule.checkpoint_dtype;
  state.activation_dtype = variant.schedule.activation_dtype;
  if (variant.schedule.read_copy) {
    const auto index = static_cast<size_t>(&variant - setup.variants.data());
    state.read_copy = {.data = copies_[index].as<void>(),
                       .scale = copy_scales_[index].data(),
                       .dtype = *variant.schedule.read_copy};
  }
  return state;
}

OpRun::OpRun(const OpSetup& setup, const OpVariant& variant, const OpMemory& memory,
             ThreadPool& pool)
    : setup_(setup),
      variant_(variant),
      memory_(memory),
      pool_(pool),
      ring_(setup.ring(variant)),
      cursors_(static_cast<size_t>(setup.slots()), reset_cursor(ring_)),
      workspace_(cpu::recurrent_workspace_bytes(setup.shape, ring_, pool.size())) {
  const DecodeSchedule& schedule = variant.schedule;
  const int64_t window = variant.kind == OpKind::kTokens ? 1 : schedule.window;
  for (int64_t i = 0; i <= setup.batch; ++i)
    query_start_.push_back(static_cast<int32_t>(i * window));
  const bool cycles = variant.kind == OpKind::kStep && schedule.route != Route::kConventional;
  const int64_t cycle = cycles ? cycle_steps(schedule) : 1;
  for (int64_t i = 0; i < setup.slots(); ++i) {
    const int64_t rows =
        variant.kind == OpKind::kFold ? schedule.buffer_len : schedule.accepted * (i % cycle);
    cursors_[static_cast<size_t>(i)].ring_count = static_cast<int32_t>(rows);
  }
  // Where the slots do not share out evenly over the cycle, it takes all its steps.
  const int64_t whole = setup.slots() % cycle == 0 ? 1 : cycle;
  for (int64_t i = 0; i < whole; ++i) pass();
  double seconds = 0;
  for (int64_t i = 0; i < whole; ++i) seconds += pass();
  constexpr double kShortest = 0.02;  // seconds
  passes_ = whole * static_cast<int64_t>(std::ceil(std::max(1.0, kShortest / seconds)));
}

double OpRun::measure() {
  double seconds = 0;
  for (int64_t i = 0; i < passes_; ++i) seconds += pass();
  return seconds / static_cast<double>(passes_ * setup_.calls);
}

// The cursors move once for all layers of a model: they are left out of the time.
double OpRun::pass() {
  begin();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < setup_.calls; ++i) call(i * setup_.batch);
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  commit();
  return time.count();
}

void OpRun::begin() {
  if (variant_.kind != OpKind::kStep) return;
  for (Cursor& cursor : cursors_) begin_step(cursor, variant_.schedule.window, ring_);
}

void OpRun::commit() {
  if (variant_.kind != OpKind::kStep) return;
  const DecodeSchedule& schedule = variant_.schedule;
  for (Cursor& cursor : cursors_) commit_step(cursor, schedule.accepted, schedule.route);
}

SequenceBatch OpRun::batch_at(int64_t first_slot) const {
  return {.sequences = setup_.batch,
          .query_start = query_start_.data(),
          .slot = memory_.slot.data() + first_slot,
          .cursors = cursors_.data(),
          .ring = ring_,
          .parent = nullptr};
}

RecurrentStepParams OpRun::step_params(int64_t first_slot) const {
  const RecurrentShape& s = setup_.shape;
  RecurrentStepParams p;
  p.shape = s;
  p.route = variant_.schedule.route;
  p.batch = batch_at(first_slot);
  p.state = memory_.state(setup_, variant_);
  p.v = memory_.v.as<void>();
  p.k = memory_.k.as<void>();
  p.q = memory_.q.as<void>();
  p.v_stride = s.heads * s.head_dim;
  p.k_stride = p.q_stride = s.key_heads * s.state_dim;
  p.b = memory_.b.data();
  if (s.family == Family::kKimiDelta) {
    p.gate = memory_.gate.as<void>();
    p.gate_stride = s.heads * s.state_dim;
    p.channel_gate = {.scale = memory_.scale.data(), .bias = memory_.bias.data()};
  } else {
    p.g = memory_.g.data();
  }
  p.o = memory_.o.as<void>();
  return p;
}

// Token i of every sequence, then token i + 1: a decode loop's order.
void OpRun::run_tokens(int64_t first_slot) {
  const auto advance = [](const void*& data, int64_t bytes) {
    if (data != nullptr) data = static_cast<const std::byte*>(data) + bytes;
  };
  RecurrentStepParams p = step_params(first_slot);
  const int64_t element = dtype_bytes(p.state.activation_dtype), batch = setup_.batch;
  for (int64_t i = 0; i < variant_.schedule.window; ++i) {
    cpu::recurrent_step(p, workspace_.as<void>(), pool_);
    advance(p.v, batch * p.v_stride * element);
    advance(p.k, batch * p.k_stride * element);
    advance(p.q, batch * p.q_stride * element);
    advance(p.gate, batch * p.gate_stride * element);
    p.b += batch * p.shape.heads;
    if (p.g != nullptr) p.g += batch * p.shape.heads;
    p.o = static_cast<std::byte*>(p.o) +
          batch * p.shape.heads * p.shape.head_dim * dtype_bytes(p.o_dtype);
  }
}

void OpRun::call(int64_t first_slot) {
  void* workspace = workspace_.as<void>();
  switch (variant_.kind) {
    case OpKind::kStep: return cpu::recurrent_step(step_params(first_slot), workspace, pool_);
    case OpKind::kSnapshots: {
      SnapshotStepParams p{step_params(first_slot)};
      p.snapshots = memory_.snapshots.as<void>();
      p.source = memory_.source.data();
      return cpu::snapshot_step(p, workspace, pool_);
    }
    case OpKind::kTokens: return run_tokens(first_slot);
    case OpKind::kPrefill:
      return cpu::recurrent_prefill({step_params(first_slot)}, workspace, pool_);
    case OpKind::kFold: {
      RecurrentFoldParams p;
      p.shape = setup_.shape;
      p.batch = batch_at(first_slot);
      p.state = memory_.state(setup_, variant_);
      p.channel_gate = {.scale = memory_.scale.data(), .bias = memory_.bias.data()};
      return cpu::recurrent_fold(p, workspace, pool_);
    }
    case OpKind::kConv:
    case OpKind::kShiftingConv: {
      ConvParams p;
      p.batch = batch_at(first_slot);
      p.channels = setup_.channels();
      p.activation_dtype = variant_.schedule.activation_dtype;
      p.x = memory_.x.as<float>();
      p.x_stride = p.channels;
      p.weight = memory_.weight.data();
      p.inputs = memory_.conv_inputs.as<void>();
      p.y = memory_.o.as<void>();
      return variant_.kind == OpKind::kConv ? cpu::causal_conv(p, pool_)
                                            : cpu::shifting_conv(p, pool_);
    }
  }
}

}  // namespace replayssm::cli
