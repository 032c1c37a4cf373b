// What /metrics tells.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/engine_thread.h"

namespace replayssm::server {

class Metrics {
 public:
  explicit Metrics(const Engine& engine);
  ~Metrics();

  void answered(const std::string& path, int status);
  void prompt(int64_t tokens);
  void first_token(double seconds);  // since the request came
  void next_token(double seconds);   // since the one before
  void finished(double seconds);     // since the request came
  void stepped(const StepReport& report);
  void connections(int64_t count);

  std::string text() const;  // Prometheus' text format
  // Median seconds of the latest decode steps of a route; 0 where there were none.
  double step_seconds(Route route) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm::server
