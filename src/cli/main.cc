// The program: parses the arguments, runs one command, reports an error in one line.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string>

#include "cli/command_line.h"

int main(int argc, char** argv) {
  const auto log = spdlog::stderr_logger_st("replayssm");
  log->set_pattern("%n: %l: %v");
  spdlog::set_default_logger(log);
  try {
    if (const auto command = replayssm::cli::parse_command_line(argc, argv)) command();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::string message = error.what();
    std::ranges::replace(message, '\n', ' ');
    log->error("{}", message);
    return EXIT_FAILURE;
  }
}
