// The OpenAI-compatible server: an engine on a thread of its own behind HTTP.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/http.h"
#include "server/job.h"

namespace replayssm::server {

struct AppOptions {
  http::Options http{};
  std::vector<std::string> api_keys{};         // none: everybody may ask
  std::vector<std::string> allowed_origins{};  // of pages elsewhere; "*" = all
  int64_t max_waiting = 1024;                  // sequences; more are refused
  double request_seconds = 600;                // of a request, after which it is given up
  double drain_seconds = 30;                   // for what runs when a signal ends the program
  std::string version{};
  std::function<void(const std::string& line)> log = [](const std::string&) {};
};

class App {
 public:
  // Binds. `model` points to the engine's own tokenizer.
  App(Engine& engine, ServedModel model, const AppOptions& options);
  ~App();

  uint16_t port() const;
  void run();   // until SIGTERM, SIGINT or stop(), and what runs then has been answered
  void stop();  // from any thread

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm::server
