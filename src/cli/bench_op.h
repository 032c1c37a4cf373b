// replayssm bench op: one op of the library on states of a given size, against its baseline.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replayssm/types.h"

namespace replayssm::cli {

struct OpOptions {
  std::string op;           // one of op_names()
  std::string model_shape;  // one of model_shape_names(); empty = the op's own default
  // 0 = as the model shape has it, or what the op is used with.
  int64_t heads = 0, key_heads = 0, head_dim = 0, state_dim = 0;
  int64_t window = 0;
  int64_t accepted = 0;
  int64_t batch_size = 1;
  int32_t buffer_len = 16;
  DType state_dtype = DType::kFloat32;
  DType dtype = DType::kBFloat16;
  std::vector<DType> read_dtypes{};
  std::optional<double> state_gib;  // 0 = one call's states; none = as large as memory allows
  int threads = 0;
  int64_t repeats = 5;
  bool json = false;
};

std::vector<std::string> op_names();
std::vector<std::string> model_shape_names();

void bench_op(const OpOptions& options);

}  // namespace replayssm::cli
