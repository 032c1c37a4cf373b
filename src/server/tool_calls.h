// Calls of tools, told from the text that models write.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace replayssm::server {

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON
};

// Splits a growing text into what is for the reader and calls, in the notations
//   <tool_call>{"name": ..., "arguments": {...}}</tool_call>                      (Hermes, Qwen)
//   <tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>  (Qwen Coder)
//   <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>                      (Nemotron)
// What is none of these after all stays text.
class ToolCallParser {
 public:
  // Returns the text that became certain.
  std::string push(std::string_view text);
  // At the end: the rest of the text. calls() is whole then.
  std::string finish();
  const std::vector<ToolCall>& calls() const { return calls_; }

 private:
  std::string held_;
  std::vector<ToolCall> calls_;
};

}  // namespace replayssm::server
