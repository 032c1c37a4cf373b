#include "server/answer.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace replayssm::server {
namespace {

constexpr float kLeastLogprob = -9999;  // in place of minus infinity, which JSON has not

float finite(float logprob) { return std::max(logprob, kLeastLogprob); }

Json usage_of(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

Json calls_of(const std::vector<ToolCall>& calls, const std::string& id, bool indexed) {
  Json list = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    Json call = Json::object();
    if (indexed) call["index"] = i;
    call["id"] = "call_" + id.substr(id.find('-') + 1) + "_" + std::to_string(i);
    call["type"] = "function";
    call["function"] = {{"name", calls[i].name}, {"arguments", calls[i].arguments}};
    list.push_back(std::move(call));
  }
  return list;
}

Json bytes_of(std::string_view text) {
  Json bytes = Json::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

}  // namespace

AnswerWriter::AnswerWriter(bool chat, std::string id, std::string model, const Tokenizer& tokenizer,
                           bool logprobs, bool include_usage)
    : chat_(chat),
      logprobs_(logprobs),
      include_usage_(include_usage),
      id_(std::move(id)),
      model_(std::move(model)),
      tokenizer_(tokenizer),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()) {
  event_head_ = "data: " + to_text(head(chat ? "chat.completion.chunk" : "text_completion"));
  event_head_.pop_back();
  event_head_ += R"(,"choices":[{"index":)";
}

Json AnswerWriter::head(const char* object) const {
  return {{"id", id_}, {"object", object}, {"created", created_}, {"model", model_}};
}

Json AnswerWriter::chat_logprobs(const std::vector<SampledToken>& tokens) const {
  const auto entry = [&](int32_t id, float logprob) {
    const std::string_view bytes = tokenizer_.token_bytes(id);
    return Json{{"token", bytes}, {"logprob", finite(logprob)}, {"bytes", bytes_of(bytes)}};
  };
  Json content = Json::array();
  for (const SampledToken& token : tokens) {
    Json item = entry(token.id, token.logprob);
    item["top_logprobs"] = Json::array();
    for (const auto& [id, logprob] : token.top_logprobs)
      item["top_logprobs"].push_back(entry(id, logprob));
    content.push_back(std::move(item));
  }
  return {{"content", std::move(content)}};
}

// `offset`: bytes of text in front of the first of the tokens.
Json AnswerWriter::logprobs(const std::vector<SampledToken>& tokens, int64_t offset) const {
  if (!logprobs_) return {};
  if (chat_) return chat_logprobs(tokens);
  Json lists = {{"text_offset", Json::array()},
                {"token_logprobs", Json::array()},
                {"tokens", Json::array()},
                {"top_logprobs", Json::array()}};
  for (const SampledToken& token : tokens) {
    const std::string_view text = tokenizer_.token_bytes(token.id);
    lists["text_offset"].push_back(offset);
    lists["token_logprobs"].push_back(finite(token.logprob));
    lists["tokens"].push_back(text);
    Json top = Json::object();
    for (const auto& [id, logprob] : token.top_logprobs)
      top[std::string(tokenizer_.token_bytes(id))] = finite(logprob);
    lists["top_logprobs"].push_back(std::move(top));
    offset += std::ssize(text);
  }
  return lists;
}

std::string AnswerWriter::whole(const std::vector<Choice>& choices, const Usage& usage) const {
  Json answer = head(chat_ ? "chat.completion" : "text_completion");
  answer["choices"] = Json::array();
  for (size_t i = 0; i < choices.size(); ++i) {
    const Choice& choice = choices[i];
    Json item = {{"index", i}};
    if (chat_) {
      Json message = {{"role", "assistant"}, {"content", choice.text}};
      if (!choice.calls.empty()) {
        if (choice.text.empty()) message["content"] = nullptr;
        message["tool_calls"] = calls_of(choice.calls, id_ + "_" + std::to_string(i), false);
      }
      item["message"] = std::move(message);
    } else {
      item["text"] = choice.text;
    }
    item["logprobs"] = logprobs(choice.tokens, 0);
    item["finish_reason"] = choice.finish;
    answer["choices"].push_back(std::move(item));
  }
  answer["usage"] = usage_of(usage);
  return to_text(answer);
}

// `body`: the choice's own member, as JSON.
void AnswerWriter::event(std::string& out, int64_t index, std::string_view body,
                         const Json& logprobs, const char* finish) const {
  out += event_head_;
  out += std::to_string(index);
  out += ',';
  out += body;
  out += R"(,"logprobs":)";
  out += logprobs.is_null() ? "null" : to_text(logprobs);
  out += R"(,"finish_reason":)";
  out += finish ? std::string("\"") + finish + "\"" : "null";
  out += include_usage_ ? "}],\"usage\":null}\n\n" : "}]}\n\n";
}

std::string AnswerWriter::event(int64_t index, std::string_view body, const char* finish) const {
  std::string text;
  event(text, index, body, {}, finish);
  return text;
}

std::string AnswerWriter::first(int64_t index) const {
  if (!chat_) return {};
  return event(index, R"("delta":{"role":"assistant","content":""})", nullptr);
}

void AnswerWriter::text(std::string& out, int64_t index, std::string_view text,
                        const SampledToken* token, int64_t offset) const {
  std::string body = chat_ ? R"("delta":{"content":)" : R"("text":)";
  append_quoted(body, text);
  if (chat_) body += "}";
  event(out, index, body, token ? logprobs({*token}, offset) : Json(), nullptr);
}

std::string AnswerWriter::calls(int64_t index, const std::vector<ToolCall>& calls) const {
  const Json list = calls_of(calls, id_ + "_" + std::to_string(index), true);
  return event(index, R"("delta":{"tool_calls":)" + to_text(list) + "}", nullptr);
}

std::string AnswerWriter::finish(int64_t index, const char* reason) const {
  return event(index, chat_ ? R"("delta":{})" : R"("text":"")", reason);
}

std::string AnswerWriter::usage(const Usage& usage) const {
  Json last = head(chat_ ? "chat.completion.chunk" : "text_completion");
  last["choices"] = Json::array();
  last["usage"] = usage_of(usage);
  return "data: " + to_text(last) + "\n\n";
}

std::string AnswerWriter::failure(const std::string& error_body) const {
  return "data: " + error_body + "\n\n";
}

}  // namespace replayssm::server
