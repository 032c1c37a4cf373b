// Vocabulary shared by every layer: element types, recurrence families and decode routes.
#pragma once

#include <cstdint>

namespace replayssm {

// Element type of a tensor in memory. The 8-bit types hold read copies only, with a scale per row.
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kInt8 };

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat8E4M3:
    case DType::kInt8: return 1;
  }
  return 0;
}

// "float32", "float16", "bfloat16": the spelling of configuration files and flags.
constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kInt8: return "int8";
  }
  return "?";
}

// Largest magnitude of an 8-bit type: what the largest element of a row becomes.
constexpr float dtype_max_8bit(DType dtype) { return dtype == DType::kInt8 ? 127.0f : 448.0f; }

// The recurrence S <- (S a)(I - d b k k^T) + b v k^T of a value head (ops.h): Mamba-2 has d = 0 and
// a scalar decay, Gated DeltaNet d = 1 and a scalar decay, Kimi Delta Attention d = 1 and a decay
// per column. k and q are L2-normalised where d = 1.
enum class Family : uint8_t { kMamba2, kGatedDelta, kKimiDelta };

constexpr bool is_delta(Family family) { return family != Family::kMamba2; }

constexpr const char* family_name(Family family) {
  switch (family) {
    case Family::kMamba2: return "mamba2";
    case Family::kGatedDelta: return "gdn";
    case Family::kKimiDelta: return "kda";
  }
  return "?";
}

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
