#include "cli/chat.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "model/chat_template.h"

namespace replayssm::cli {

std::string chat_prompt(const std::filesystem::path& folder, const std::string& system,
                        const std::string& user) {
  const auto source = load_chat_template(folder);
  if (!source) fail("--chat: ", folder.string(), " has no chat template");
  nlohmann::ordered_json variables = template_special_tokens(folder);
  auto& messages = variables["messages"] = nlohmann::ordered_json::array();
  if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
  messages.push_back({{"role", "user"}, {"content", user}});
  variables["add_generation_prompt"] = true;
  return ChatTemplate(*source).render(variables);
}

}  // namespace replayssm::cli
