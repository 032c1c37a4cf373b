# Options of every host translation unit. nvcc gets its own in cuda.cmake.

# States are compared bit for bit: the compiler must not contract a * b + c where it likes.
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-ffp-contract=off>")

# g++ 12 sees overlapping copies in the library's own string concatenation.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>")
endif()

if(REPLAYSSM_SANITIZE)
  # SIMD code for AVX2 alone: sanitizers make a kernel take minutes to compile.
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-march=haswell;-maes>")
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${REPLAYSSM_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=undefined>")
  add_link_options(-fsanitize=${REPLAYSSM_SANITIZE})
endif()

# Coverage feedback in everything that a fuzz target links; the targets add -fsanitize=fuzzer.
if(REPLAYSSM_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "REPLAYSSM_FUZZ needs clang (preset fuzz), not ${CMAKE_CXX_COMPILER_ID}")
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=fuzzer-no-link>")
endif()
