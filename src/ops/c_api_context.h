// What the files of the C interface share: the context behind its handle, and exceptions as a
// status.
#pragma once

#include <bit>
#include <cstdio>
#include <new>
#include <type_traits>

#include "core/buffer.h"
#include "core/check.h"
#include "core/thread_pool.h"
#include "replayssm/replayssm.h"

struct replayssm_context {
  explicit replayssm_context(int threads) : pool(threads) {}

  replayssm::ThreadPool pool;
  replayssm::Buffer workspace{};
  char error[1024] = "";
};

namespace replayssm {

// A C struct as its C++ twin (c_api_layout.h).
template <class To, class From>
To twin(const From& from) {
  static_assert(std::is_trivially_copyable_v<To> && sizeof(To) == sizeof(From));
  return std::bit_cast<To>(from);
}

inline replayssm_status note(replayssm_context* context, replayssm_status status,
                             const char* what) {
  std::snprintf(context->error, sizeof context->error, "%s", what);
  return status;
}

// Calls fn(arguments) where none of them is null; exceptions become a status.
template <class Fn, class... Args>
replayssm_status guarded(replayssm_context* context, Fn&& fn, const Args*... arguments) noexcept {
  if (context == nullptr) return REPLAYSSM_INVALID_ARGUMENT;
  try {
    if (((arguments == nullptr) || ...)) fail("arguments: expected structs, got a null pointer");
    fn(*arguments...);
    return REPLAYSSM_OK;
  } catch (const std::bad_alloc&) {
    return note(context, REPLAYSSM_OUT_OF_MEMORY, "out of memory");
  } catch (const Error& error) {
    return note(context, REPLAYSSM_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return note(context, REPLAYSSM_INTERNAL_ERROR, error.what());
  } catch (...) {
    return note(context, REPLAYSSM_INTERNAL_ERROR, "unknown error");
  }
}

}  // namespace replayssm
