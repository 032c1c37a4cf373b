// OpenAI's answers, whole and in pieces of a stream.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "model/tokenizer.h"
#include "server/json_fields.h"
#include "server/tool_calls.h"

namespace replayssm::server {

struct Usage {
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
};

// One choice, as far as it has come.
struct Choice {
  std::string text;
  std::vector<ToolCall> calls;
  std::vector<SampledToken> tokens;  // where their log-probabilities are wanted
  const char* finish = nullptr;      // finish_reason
};

class AnswerWriter {
 public:
  AnswerWriter(bool chat, std::string id, std::string model, const Tokenizer& tokenizer,
               bool logprobs, bool include_usage);

  std::string whole(const std::vector<Choice>& choices, const Usage& usage) const;

  // Events of a stream, each with its empty line.
  std::string first(int64_t index) const;  // a chat's role; empty for completions
  void text(std::string& out, int64_t index, std::string_view text, const SampledToken* token,
            int64_t offset) const;  // appends
  std::string calls(int64_t index, const std::vector<ToolCall>& calls) const;
  std::string finish(int64_t index, const char* reason) const;
  std::string usage(const Usage& usage) const;
  std::string failure(const std::string& error_body) const;
  std::string done() const { return "data: [DONE]\n\n"; }

 private:
  Json head(const char* object) const;
  Json logprobs(const std::vector<SampledToken>& tokens, int64_t offset) const;
  Json chat_logprobs(const std::vector<SampledToken>& tokens) const;
  void event(std::string& out, int64_t index, std::string_view body, const Json& logprobs,
             const char* finish) const;
  std::string event(int64_t index, std::string_view body, const char* finish) const;

  bool chat_, logprobs_, include_usage_;
  std::string id_, model_;
  const Tokenizer& tokenizer_;
  int64_t created_;
  std::string event_head_;  // of every event, up to the choice's index
};

}  // namespace replayssm::server
