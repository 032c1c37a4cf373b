// Turns a run-time value into a template argument; throws if the value has no instantiation.
#pragma once

#include "core/check.h"
#include "core/eight_bit.h"
#include "core/half.h"

namespace replayssm {

// Calls fn<T>() with the element type of `dtype`, which is one that numbers are computed in.
template <class Fn>
decltype(auto) dispatch_float(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn.template operator()<float>();
    case DType::kBFloat16: return fn.template operator()<bf16>();
    case DType::kFloat16: return fn.template operator()<fp16>();
    case DType::kFloat8E4M3:
    case DType::kInt8: break;
  }
  fail("unsupported dtype ", dtype_name(dtype));
}

// The same with every type that a read copy may have.
template <class Fn>
decltype(auto) dispatch_storage(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat8E4M3: return fn.template operator()<e4m3>();
    case DType::kInt8: return fn.template operator()<int8>();
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16: break;
  }
  return dispatch_float(dtype, fn);
}

}  // namespace replayssm
