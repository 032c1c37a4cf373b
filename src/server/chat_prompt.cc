#include "server/chat_prompt.h"

#include "replayssm/error.h"
#include "server/api_error.h"

namespace replayssm::server {
namespace {

// Texts as they are; lists of text parts joined.
Json content_of(const Json& content, const std::string& where) {
  if (content.is_string() || content.is_null()) return content;
  if (!content.is_array()) bad_field(where, "expected a text or a list of parts");
  std::string text;
  for (const Json& part : content) {
    if (!part.is_object() || part.value("type", Json()) != "text" || !part.contains("text") ||
        !part["text"].is_string()) {
      bad_field(where, "expected parts of type text: this model reads nothing else");
    }
    text += part["text"].get<std::string>();
  }
  return text;
}

// Templates expect the arguments of calls as objects.
void open_arguments(Json& message, const std::string& where) {
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || calls->is_null()) return;
  if (!calls->is_array()) bad_field(where + ".tool_calls", "expected a list");
  for (Json& call : *calls) {
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object() ||
        !call["function"].value("name", Json()).is_string()) {
      bad_field(where + ".tool_calls", "expected objects with a function that has a name");
    }
    Json& arguments = call["function"]["arguments"];
    if (!arguments.is_string()) continue;
    Json parsed = parse_embedded(arguments.get_ref<const std::string&>());
    if (parsed.is_object()) arguments = std::move(parsed);
  }
}

Json messages_of(const Json& body) {
  const auto found = body.find("messages");
  if (found == body.end() || !found->is_array() || found->empty()) {
    bad_field("messages", "expected a list of at least one message");
  }
  Json messages = Json::array();
  for (size_t i = 0; i < found->size(); ++i) {
    const std::string where = concat("messages[", i, "]");
    Json message = (*found)[i];
    if (!message.is_object()) bad_field(where, "expected an object");
    if (!message.contains("role") || !message["role"].is_string()) {
      bad_field(where + ".role", "expected a text");
    }
    const bool calls = message.contains("tool_calls") && !message["tool_calls"].is_null();
    if (!message.contains("content") || message["content"].is_null()) {
      if (!calls) bad_field(where + ".content", "expected a text");
      message["content"] = "";
    }
    message["content"] = content_of(message["content"], where + ".content");
    open_arguments(message, where);
    messages.push_back(std::move(message));
  }
  return messages;
}

void add_tools(const Json& body, Json& variables) {
  const Fields fields(body);
  const Json* tools = fields.find("tools");
  if (!tools) return;
  if (!tools->is_array()) bad_field("tools", "expected a list");
  for (const Json& tool : *tools) {
    if (!tool.is_object() || tool.value("type", Json()) != "function" ||
        !tool.contains("function") || !tool["function"].is_object() ||
        !tool["function"].value("name", Json()).is_string()) {
      bad_field("tools", "expected objects of type function with a name");
    }
  }
  const Json* choice = fields.find("tool_choice");
  if (choice && *choice == "none") return;
  if (!tools->empty()) variables["tools"] = *tools;
}

}  // namespace

std::string chat_prompt(const Json& body, const ServedModel& model) {
  Json variables = model.template_variables;
  variables["messages"] = messages_of(body);
  add_tools(body, variables);
  if (!model.chat_template) {
    throw ApiError(400, "messages: this model has no chat template; use /v1/completions");
  }
  const Fields fields(body);
  variables["add_generation_prompt"] = fields.boolean("add_generation_prompt").value_or(true);
  if (const Json* more = fields.object("chat_template_kwargs")) {
    for (const auto& [name, value] : more->items()) variables[name] = value;
  }
  try {
    return model.chat_template->render(variables);
  } catch (const Error& error) {
    throw ApiError(400, concat("messages: the model's chat template refuses them: ", error.what()),
                   "messages");
  }
}

}  // namespace replayssm::server
