// gtest_main, for programs that compute: REPLAYSSM_CPU_TARGET limits their instruction set, so that
// one machine tests several.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "ops/cpu/target.h"
#include "replayssm/error.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    if (const char* name = std::getenv("REPLAYSSM_CPU_TARGET")) {
      replayssm::cpu::limit_target(name);
    }
  } catch (const replayssm::Error& error) {
    std::cerr << "REPLAYSSM_CPU_TARGET: " << error.what() << "\n";
    return EXIT_FAILURE;
  }
  return RUN_ALL_TESTS();
}
