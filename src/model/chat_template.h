// Chat templates: the Jinja subset that Hugging Face models publish.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace replayssm {

class ChatTemplate {
 public:
  // Parses `source`. Throws Error with line and column for a syntax error.
  explicit ChatTemplate(std::string_view source);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // Renders with the members of `variables` (messages, add_generation_prompt, tools, bos_token ...)
  // as the template's globals. Throws Error for a run-time error and for the template's
  // raise_exception.
  std::string render(const nlohmann::ordered_json& variables) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The template of a model folder: chat_template.jinja, else tokenizer_config.json's chat_template
// (a string, or a list of named ones of which "default" is taken). Empty when the model has none.
std::optional<std::string> load_chat_template(const std::filesystem::path& folder);

// bos_token, eos_token, pad_token and unk_token of a model folder, as variables for its template.
nlohmann::ordered_json template_special_tokens(const std::filesystem::path& folder);

}  // namespace replayssm
