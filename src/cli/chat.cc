#include "cli/chat.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "model/chat_template.h"

namespace replayssm::cli {
namespace {

// Adds a special token of tokenizer_config.json, which is a string or an object with its text.
void add_special_token(const nlohmann::json& config, const std::string& name,
                       nlohmann::ordered_json& variables) {
  const auto found = config.find(name);
  if (found == config.end()) return;
  if (found->is_string()) variables[name] = found->get<std::string>();
  if (found->is_object() && found->contains("content") && found->at("content").is_string()) {
    variables[name] = found->at("content").get<std::string>();
  }
}

}  // namespace

std::string chat_prompt(const std::filesystem::path& folder, const std::string& system,
                        const std::string& user) {
  const auto source = load_chat_template(folder);
  if (!source) fail("--chat: ", folder.string(), " has no chat template");
  nlohmann::ordered_json variables;
  auto& messages = variables["messages"] = nlohmann::ordered_json::array();
  if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
  messages.push_back({{"role", "user"}, {"content", user}});
  variables["add_generation_prompt"] = true;
  std::ifstream file(folder / "tokenizer_config.json");
  const auto config = nlohmann::json::parse(file, nullptr, false);
  if (config.is_object()) {
    for (const char* name : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
      add_special_token(config, name, variables);
    }
  }
  return ChatTemplate(*source).render(variables);
}

}  // namespace replayssm::cli
