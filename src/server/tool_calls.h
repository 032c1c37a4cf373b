// Calls of tools, told from the text that models write.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace replayssm::server {

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON
};

// How models write calls:
//   <tool_call>{"name": ..., "arguments": {...}}</tool_call>                      (Hermes, Qwen)
//   <tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>  (Qwen Coder)
//   <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>                      (Nemotron)
enum class ToolNotation : uint8_t { kObject, kTagged, kList };

// The one that a model's chat template has; that of objects where it has none.
ToolNotation tool_notation(std::string_view chat_template);

// Splits a growing text into what is for the reader and calls, in any notation. What is none after
// all stays text; blanks behind a call are nobody's.
class ToolCallParser {
 public:
  // Returns the text that became certain.
  std::string push(std::string_view text);
  // At the end: the rest of the text. calls() is whole then.
  std::string finish();
  const std::vector<ToolCall>& calls() const { return calls_; }

 private:
  void skip_blanks();

  std::string held_;
  bool behind_call_ = false;
  std::vector<ToolCall> calls_;
};

}  // namespace replayssm::server
