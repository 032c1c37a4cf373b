// Requests for text: from OpenAI's schema to what the engine takes.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/grammar.h"
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "server/json_fields.h"
#include "server/tool_calls.h"

namespace replayssm::server {

// What is served. Used by several threads, changed by none.
struct ServedModel {
  std::string name;
  const Tokenizer* tokenizer = nullptr;
  const Engine* engine = nullptr;  // for what does not change: limits and checks
  std::optional<ChatTemplate> chat_template{};
  Json template_variables{};                           // special tokens
  ToolNotation tool_notation = ToolNotation::kObject;  // of its template
  int64_t vocab_size = 0;
  // Of the tokenizer; made when first asked for, by the thread that asks.
  std::shared_future<std::shared_ptr<const VocabularyTrie>> vocabulary{};
};

struct Job {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;
  bool tools = false;  // calls of tools are told from text
  int64_t n = 1, best_of = 1;
  std::vector<Request> requests;     // one per prompt and choice, best_of of a prompt together
  std::vector<std::string> prompts;  // their texts where they come in front of the answers (echo)
  std::shared_ptr<const Grammar> grammar{};  // of every answer; null = any text
  bool logprobs = false;                     // wanted in the answer
  int64_t prompt_tokens = 0;                 // of all prompts
};

// Throw ApiError for what cannot be done. Safe to call on several threads.
Job completion_job(const Json& body, const ServedModel& model);
Job chat_job(const Json& body, const ServedModel& model);

// The ids of {"prompt": ...} or {"messages": ...}.
std::vector<int32_t> tokenize(const Json& body, const ServedModel& model);
std::string detokenize(const Json& body, const ServedModel& model);

// Throws ApiError where a body names another model.
void check_model(const Json& body, const ServedModel& model);

}  // namespace replayssm::server
