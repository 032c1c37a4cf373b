// Answers one JSON request per line of standard input with one line of JSON: how the differential
// test drives the tokenizer and the chat templates.
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/check.h"
#include "model/chat_template.h"
#include "model/tokenizer.h"

namespace replayssm {
namespace {

using Json = nlohmann::ordered_json;

std::string hex_to_bytes(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

class Helper {
 public:
  Json answer(const Json& request) {
    const std::string op = request.at("op");
    if (op == "load") {
      tokenizer_.emplace(std::filesystem::path(request.at("folder").get<std::string>()));
      return {{"size", tokenizer_->size()}};
    }
    if (op == "encode") {
      const std::string text = request.contains("hex")
                                   ? hex_to_bytes(request["hex"].get<std::string>())
                                   : request.at("text").get<std::string>();
      return {{"ids", tokenizer_->encode(text, request.at("add_special_tokens").get<bool>())}};
    }
    if (op == "decode") return decode(request);
    if (op == "render") {
      const ChatTemplate chat_template(request.at("template").get<std::string>());
      return {{"text", chat_template.render(request.at("variables"))}};
    }
    fail("unknown op ", op);
  }

 private:
  Json decode(const Json& request) {
    const auto ids = request.at("ids").get<std::vector<int32_t>>();
    const bool skip = request.at("skip_special_tokens");
    StreamDecoder stream(*tokenizer_, skip);
    std::string streamed;
    for (int32_t id : ids) streamed += stream.push(id);
    streamed += stream.flush();
    return {{"text", tokenizer_->decode(ids, skip)}, {"streamed", streamed}};
  }

  std::optional<Tokenizer> tokenizer_;
};

}  // namespace
}  // namespace replayssm

int main() {
  replayssm::Helper helper;
  for (std::string line; std::getline(std::cin, line);) {
    nlohmann::ordered_json answer;
    try {
      answer = helper.answer(nlohmann::ordered_json::parse(line));
    } catch (const std::exception& error) {
      answer = {{"error", error.what()}};
    }
    std::cout << answer.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace)
              << std::endl;
  }
}
