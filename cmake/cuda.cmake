# The CUDA language, set up for toolkits newer than the CMake that drives them.

# Without a list, CMake asks for an architecture that the toolkit may no longer have. "a-real" makes
# machine code for that architecture's own instructions and no portable code, which cannot hold them.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()

# Toolkits install themselves where PATH rarely points.
if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "REPLAYSSM_CUDA is on, but there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda")
  endif()
endif()
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)

# CMake 3.25 knows nvcc only up to C++17 and would silently pass no standard at all.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

# Device code calls the host's constexpr functions: cursor arithmetic is written once.
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")

# Spilled registers turn a memory-bound kernel into a slow one: ptxas shall say so.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills;-Xcompiler=-Wall,-Wextra,-ffp-contract=off>")
