#include "model/chat_template.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/text_file.h"
#include "model/jinja/interpreter.h"
#include "model/jinja/parser.h"
#include "model/text/json_field.h"

namespace replayssm {

struct ChatTemplate::Impl {
  jinja::Body body;
};

ChatTemplate::ChatTemplate(std::string_view source) : impl_(new Impl{jinja::parse(source)}) {}
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render(const nlohmann::ordered_json& variables) const {
  if (!variables.is_object()) {
    fail("chat template: expected an object of variables, got ", variables.type_name());
  }
  const jinja::Value globals = jinja::from_json(variables);
  jinja::Interpreter interpreter(*globals.dict());
  return interpreter.render(impl_->body);
}

std::optional<std::string> load_chat_template(const std::filesystem::path& folder) {
  const std::filesystem::path plain = folder / "chat_template.jinja";
  if (std::filesystem::exists(plain)) return read_text_file(plain);
  const std::filesystem::path path = folder / "tokenizer_config.json";
  if (!std::filesystem::exists(path)) return std::nullopt;

  const nlohmann::json config = text::parse_json_file(path);
  const text::JsonField root(config, path.string() + ": ");
  if (!root.has("chat_template")) return std::nullopt;
  const text::JsonField field = root["chat_template"];
  if (field.value().is_string()) return field.as_string();
  for (size_t i = 0; i < field.size(); ++i) {
    if (field[i]["name"].as_string() == "default") return field[i]["template"].as_string();
  }
  field.reject("expected a template named \"default\", got none");
}

nlohmann::ordered_json template_special_tokens(const std::filesystem::path& folder) {
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();
  const std::filesystem::path path = folder / "tokenizer_config.json";
  if (!std::filesystem::exists(path)) return variables;
  const nlohmann::json config = text::parse_json_file(path);
  const text::JsonField root(config, path.string() + ": ");
  for (const char* name : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
    if (!root.has(name)) continue;
    const text::JsonField token = root[name];  // a string, or an object with its text
    variables[name] = (token.value().is_object() ? token["content"] : token).as_string();
  }
  return variables;
}

}  // namespace replayssm
