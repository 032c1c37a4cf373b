#include "server/tool_calls.h"

#include <algorithm>
#include <array>
#include <optional>

#include "server/json_fields.h"

namespace replayssm::server {
namespace {

struct Notation {
  std::string_view open, close;
};
constexpr std::array<Notation, 2> kNotations = {
    {{"<tool_call>", "</tool_call>"}, {"<TOOLCALL>", "</TOOLCALL>"}}};

constexpr std::string_view kSpace = " \t\r\n";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// A call as JSON.
std::optional<ToolCall> call_of(const Json& value) {
  if (!value.is_object() || !value.contains("name") || !value["name"].is_string()) return {};
  const char* member = value.contains("arguments") ? "arguments" : "parameters";
  const Json arguments = value.value(member, Json::object());
  return ToolCall{value["name"].get<std::string>(),
                  arguments.is_string() ? arguments.get<std::string>() : to_text(arguments)};
}

// What lies between `open` and `close` behind `at`, which moves behind it.
std::optional<std::string_view> between(std::string_view text, std::string_view open,
                                        std::string_view close, size_t& at) {
  const size_t begin = text.find(open, at);
  if (begin == std::string_view::npos) return {};
  const size_t first = begin + open.size();
  const size_t end = text.find(close, first);
  if (end == std::string_view::npos) return {};
  at = end + close.size();
  return text.substr(first, end - first);
}

// <function=NAME><parameter=P>value</parameter>...</function>; values that are JSON are taken so.
std::optional<ToolCall> tagged_call(std::string_view text) {
  size_t at = 0;
  const auto function = between(text, "<function=", "</function>", at);
  const size_t name_end = function ? function->find('>') : std::string_view::npos;
  if (name_end == std::string_view::npos) return {};
  ToolCall call{.name = std::string(function->substr(0, name_end)), .arguments = {}};
  Json arguments = Json::object();
  size_t next = name_end;
  while (const auto parameter = between(*function, "<parameter=", "</parameter>", next)) {
    const size_t end = parameter->find('>');
    if (end == std::string_view::npos) return {};
    const std::string_view value = trimmed(parameter->substr(end + 1));
    Json parsed = parse_embedded(value);
    arguments[std::string(parameter->substr(0, end))] =
        parsed.is_discarded() ? Json(std::string(value)) : std::move(parsed);
  }
  call.arguments = to_text(arguments);
  return call;
}

// The calls of one pair of tags; none where the text between is none.
std::vector<ToolCall> calls_of(std::string_view text) {
  text = trimmed(text);
  std::vector<ToolCall> calls;
  if (text.starts_with("<function=")) {
    if (auto call = tagged_call(text)) calls.push_back(*std::move(call));
    return calls;
  }
  const Json value = parse_embedded(text);
  for (const Json& item : value.is_array() ? value : Json::array({value})) {
    auto call = call_of(item);
    if (!call) return {};
    calls.push_back(*std::move(call));
  }
  return calls;
}

// The longest end of `text` that may be the start of a tag.
size_t possible_tag(std::string_view text) {
  size_t longest = 0;
  for (const Notation& notation : kNotations) {
    for (size_t n = std::min(notation.open.size() - 1, text.size()); n > longest; --n) {
      if (text.ends_with(notation.open.substr(0, n))) longest = n;
    }
  }
  return longest;
}

}  // namespace

ToolNotation tool_notation(std::string_view chat_template) {
  const auto has = [&](std::string_view tag) {
    return chat_template.find(tag) < std::string::npos;
  };
  if (has("<TOOLCALL>")) return ToolNotation::kList;
  return has("<function=") ? ToolNotation::kTagged : ToolNotation::kObject;
}

void ToolCallParser::skip_blanks() {
  if (!behind_call_) return;
  held_.erase(0, held_.find_first_not_of(kSpace));
  behind_call_ = held_.empty();
}

std::string ToolCallParser::push(std::string_view text) {
  held_ += text;
  std::string certain;
  while (true) {
    skip_blanks();
    size_t begin = std::string::npos;
    const Notation* notation = nullptr;
    for (const Notation& candidate : kNotations) {
      const size_t at = held_.find(candidate.open);
      if (at >= begin) continue;
      begin = at;
      notation = &candidate;
    }
    if (!notation) break;
    certain += held_.substr(0, begin);
    held_.erase(0, begin);
    const size_t end = held_.find(notation->close);
    if (end == std::string::npos) return certain;  // more to come
    const size_t whole = end + notation->close.size();
    const auto calls = calls_of(
        std::string_view(held_).substr(notation->open.size(), end - notation->open.size()));
    if (calls.empty()) certain += held_.substr(0, whole);
    calls_.insert(calls_.end(), calls.begin(), calls.end());
    held_.erase(0, whole);
    behind_call_ = !calls.empty();
  }
  const size_t certain_size = held_.size() - possible_tag(held_);
  certain += held_.substr(0, certain_size);
  held_.erase(0, certain_size);
  return certain;
}

// A call whose closing tag is missing counts where it is whole otherwise.
std::string ToolCallParser::finish() {
  std::string rest = std::exchange(held_, {});
  for (const Notation& notation : kNotations) {
    if (!rest.starts_with(notation.open)) continue;
    const auto calls = calls_of(std::string_view(rest).substr(notation.open.size()));
    if (calls.empty()) continue;
    calls_.insert(calls_.end(), calls.begin(), calls.end());
    return {};
  }
  return rest;
}

}  // namespace replayssm::server
