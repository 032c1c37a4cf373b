#include "cli/sweep_flags.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace replayssm::cli {

void add_sweep_flags(CLI::App& app, AccuracyOptions& options, int64_t most_buffer) {
  CLI::Option* const sweep =
      app.add_flag("--precision-sweep", options.precision_sweep,
                   "What storage formats of the state cost: every read and recurrence format, "
                   "through output_only decode steps")
          ->disable_flag_override();
  for (const char* flag : {"--route", "--mamba-ssm-cache-dtype", "--replayssm-buffer-len"})
    sweep->excludes(app.get_option(flag));
  const auto add_formats = [&](const char* flag, std::vector<std::string>& names,
                               const char* help) {
    app.add_option(flag, names, help)
        ->type_name("NAME,...")
        ->delimiter(',')
        ->needs(sweep)
        ->capture_default_str();
  };
  add_formats("--read-formats", options.read_formats, "What steps between folds read");
  add_formats("--recurrence-formats", options.recurrence_formats, "What folds store");
  app.add_option("--buffer-lens", options.buffer_lens, "Buffer lengths of the sweep")
      ->check(CLI::Range(int64_t{1}, most_buffer))
      ->type_name("N,...")
      ->delimiter(',')
      ->needs(sweep)
      ->capture_default_str();
}

}  // namespace replayssm::cli
