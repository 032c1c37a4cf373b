// Any bytes as a chat template, and what follows a NUL as the JSON of its variables: either refused
// with an Error, or a text.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "model/chat_template.h"
#include "replayssm/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace replayssm;
  using Json = nlohmann::ordered_json;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t split = input.find('\0');
  Json variables;
  if (split != input.npos) variables = Json::parse(input.substr(split + 1), nullptr, false);
  if (!variables.is_object()) {
    variables = {{"messages", {{{"role", "user"}, {"content", "é 🙂"}}}},
                 {"l", {3, 1, 2.5, "x", nullptr}},
                 {"d", {{"a", 1}, {"b", {1, 2}}}}};
  }
  try {
    const ChatTemplate chat_template(input.substr(0, split));
    chat_template.render(variables);
  } catch (const Error&) {
  }
  return 0;
}
