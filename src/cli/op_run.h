// The variants of an op that `bench op` compares, on memory that they share.
//
// A pool of slots stands for the layers of a model: a pass calls the op once per `batch` slots, so
// that every call meets states that are not in cache. The slots' flushes are spread over a cycle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "core/thread_pool.h"
#include "replay/bytes.h"
#include "replayssm/ops.h"

namespace replayssm::cli {

// kTokens: a window's tokens one by one, each updating the state.
enum class OpKind : uint8_t { kStep, kSnapshots, kTokens, kPrefill, kFold, kConv, kShiftingConv };

struct OpVariant {
  std::string name;
  OpKind kind = OpKind::kStep;
  DecodeSchedule schedule;
};

struct OpSetup {
  RecurrentShape shape;
  int32_t conv_kernel = 4;
  int64_t batch = 1;
  int64_t calls = 1;  // of a pass
  std::vector<OpVariant> variants{};

  int64_t slots() const { return batch * calls; }
  int64_t channels() const;                         // of the convolution in front
  RingConfig ring(const OpVariant& variant) const;  // that the variant's slots are built for
};

// Tokens of all sequences of a call.
int64_t call_tokens(const OpSetup& setup, const OpVariant& variant);

// What a call moves, and what a slot takes for all variants together.
StateTraffic call_traffic(const OpSetup& setup, const OpVariant& variant);
int64_t slot_bytes(const OpSetup& setup);
// What all inputs and outputs of one call take.
double call_bytes(const OpSetup& setup);

class OpMemory {
 public:
  OpMemory(const OpSetup& setup, ThreadPool& pool);

  RecurrentState state(const OpSetup& setup, const OpVariant& variant) const;

  Buffer snapshots;            // [slots, window, HV, V, K]
  Array<int32_t> source;       // of one call
  Buffer conv_inputs;          // [slots, conv_rows, channels]
  Buffer v, k, q, gate, x, o;  // of one call
  Array<float> b, g;           // of one call
  Array<float> scale, bias;    // Kimi Delta's gates
  Array<float> weight;         // of the convolution
  Array<int32_t> slot;         // 0, 1, ...

 private:
  Buffer checkpoint_, ring_v_, ring_k_, ring_gate_;
  Array<float> ring_b_, ring_g_;
  std::vector<Buffer> copies_;  // of each variant that reads one
  std::vector<Array<float>> copy_scales_;
};

class OpRun {
 public:
  OpRun(const OpSetup& setup, const OpVariant& variant, const OpMemory& memory, ThreadPool& pool);

  // One measurement: whole flush cycles, long enough for the clock. Seconds per call.
  double measure();

 private:
  double pass();
  void begin();
  void commit();
  void call(int64_t first_slot);
  SequenceBatch batch_at(int64_t first_slot) const;
  RecurrentStepParams step_params(int64_t first_slot) const;
  void run_tokens(int64_t first_slot);

  const OpSetup& setup_;
  const OpVariant& variant_;
  const OpMemory& memory_;
  ThreadPool& pool_;
  RingConfig ring_;
  std::vector<Cursor> cursors_;
  std::vector<int32_t> query_start_;
  Buffer workspace_;
  int64_t passes_ = 1;  // of a measurement
};

}  // namespace replayssm::cli
