// Vocabulary shared by every layer: element types, recurrence families and decode routes.
#pragma once

#include <cstdint>

namespace replayssm {

// Element type of a tensor in memory.
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16 };

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// "float32", "float16", "bfloat16": the spelling of configuration files and flags.
constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
  }
  return "?";
}

// The recurrence S <- (S a)(I - d b k k^T) + b v k^T of a value head: Mamba-2 has d = 0 and a
// scalar decay, Gated DeltaNet d = 1 and a scalar decay. Both L2-normalise k and q only where d
// = 1.
enum class Family : uint8_t { kMamba2, kGatedDelta };

// How a decode step reads the state (docs/architecture.md):
//   conventional      updates and stores the state at every token
//   state_and_output  folds ring and window in registers, reads the output off the result
//   output_only       one mat-vec of the checkpoint with the query walked back through the ring
enum class Route : uint8_t { kConventional, kStateAndOutput, kOutputOnly };

constexpr const char* route_name(Route route) {
  switch (route) {
    case Route::kConventional: return "conventional";
    case Route::kStateAndOutput: return "state_and_output";
    case Route::kOutputOnly: return "output_only";
  }
  return "?";
}

}  // namespace replayssm
