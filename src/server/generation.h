// One request for text while it is answered. Lives on the HTTP server's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/answer.h"
#include "server/api_error.h"
#include "server/engine_thread.h"
#include "server/http.h"
#include "server/job.h"
#include "server/metrics.h"

namespace replayssm::server {

// What became of a request, for the log.
struct Outcome {
  int status = 200;
  Usage usage{};
  double first_token_seconds = 0;
  std::string finish;
};

class Generation {
 public:
  using Clock = std::chrono::steady_clock;
  struct Setup {
    http::ExchangePtr exchange;
    http::Headers headers;  // of the answer
    Clock::time_point start;
    Metrics* metrics = nullptr;
    std::function<void(uint64_t key)> cancel;  // at the engine
    std::function<void(const Outcome&)> done;  // called once, at the end; may destroy *this
  };

  // `keys`: one per request of the job, as submitted to the engine.
  Generation(const Job& job, std::vector<uint64_t> keys, AnswerWriter writer, Setup setup);

  // What a stream makes of events is sent by send(), so that many of them share a piece.
  void take(const EngineEvent& event);
  void send();
  bool has_unsent() const { return !unsent_.empty(); }
  // Ends it before its time: with an error for the client, or without where nobody listens.
  void fail(const ApiError& error);
  void abandon();
  Clock::time_point start() const { return setup_.start; }

 private:
  struct Progress {
    Choice choice;
    ToolCallParser parser;
    int64_t tokens = 0, cached = 0;
    double logprob_sum = 0;
    Clock::time_point last{};
    bool begun = false, done = false;
  };

  size_t position_of(uint64_t key) const;
  void time(Progress& progress, Clock::time_point made);
  void add_text(size_t index, const EngineEvent& event);
  void end_choice(size_t index, FinishReason reason);
  void finish();
  std::vector<Choice> best_choices();
  Usage usage() const;
  void cancel_rest();
  void report(int status, const std::string& finish);
  std::string echoed(size_t index) const;

  std::vector<uint64_t> keys_;
  bool stream_, tools_, logprobs_, include_usage_;
  int64_t n_, best_of_, prompt_tokens_;
  std::vector<std::string> prompts_;  // for echo
  AnswerWriter writer_;
  std::string unsent_;
  Setup setup_;
  std::vector<Progress> progress_;
  size_t unfinished_;
  bool answering_ = false, reported_ = false;
  double first_token_seconds_ = 0;
};

}  // namespace replayssm::server
