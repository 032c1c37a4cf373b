#include "model/json_text.h"

#include <unordered_set>
#include <vector>

#include "core/check.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr size_t kMaxQuoted = 120;
constexpr int kMaxDepth = 64;

// Printable, on one line, at most `limit` bytes and not cut inside a UTF-8 sequence.
std::string one_line(std::string_view text, size_t limit) {
  const bool cut = text.size() > limit;
  if (cut) {
    text = text.substr(0, limit);
    while (!text.empty() && (static_cast<unsigned char>(text.back()) & 0xc0) == 0x80) {
      text.remove_suffix(1);
    }
    if (!text.empty() && static_cast<unsigned char>(text.back()) >= 0xc0) text.remove_suffix(1);
  }
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    line += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return cut ? line + "..." : line;
}

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Length of the bare word Infinity, -Infinity or NaN at the start of `text`, else 0.
size_t bare_float(std::string_view text) {
  for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
    if (text.starts_with(word) && (text.size() == word.size() || !is_word(text[word.size()]))) {
      return word.size();
    }
  }
  return 0;
}

// Watches the parser: refuses repeated keys and deep nesting, hands members of the root over.
class Watcher {
 public:
  Watcher(const std::string& file, const TakeMember& take) : file_(file), take_(take) {}

  bool operator()(int depth, json::parse_event_t event, json& value) {
    using Event = json::parse_event_t;
    switch (event) {
      case Event::object_start: keys_.emplace_back(); [[fallthrough]];
      case Event::array_start:
        if (depth == 0) root_is_object_ = event == Event::object_start;
        if (depth > kMaxDepth) fail(file_, ": JSON nested deeper than ", kMaxDepth, " levels");
        return true;
      case Event::key: see_key(depth, value.get_ref<const std::string&>()); return true;
      case Event::object_end: keys_.pop_back(); [[fallthrough]];
      case Event::array_end:
      case Event::value:
        if (!take_ || depth != 1 || !root_is_object_) return true;
        take_(member_, std::move(value));
        value = nullptr;
        return false;
    }
    return true;
  }

 private:
  void see_key(int depth, const std::string& key) {
    if (depth == 1) member_ = key;
    if (!keys_.back().insert(key).second) fail(file_, ": key ", in_quotes(key), " occurs twice");
  }

  const std::string& file_;
  const TakeMember& take_;
  std::vector<std::unordered_set<std::string>> keys_;
  std::string member_;
  bool root_is_object_ = false;
};

}  // namespace

std::string in_quotes(std::string_view text) { return '"' + one_line(text, kMaxQuoted) + '"'; }

std::string describe(const json& value) {
  switch (value.type()) {
    case json::value_t::string: return in_quotes(value.get_ref<const std::string&>());
    case json::value_t::array: return concat("a list of ", value.size());
    case json::value_t::object:
      if (value.size() == 1 && value.contains("__float__") && value["__float__"].is_string()) {
        return one_line(value["__float__"].get_ref<const std::string&>(), kMaxQuoted);
      }
      return "an object";
    default: return value.dump();
  }
}

std::string with_tagged_floats(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\' && i + 1 < text.size()) {
      out += c;
      out += text[++i];
      continue;
    }
    if (c == '"') in_string = !in_string;
    const bool word_starts = !in_string && (i == 0 || !is_word(text[i - 1]));
    const size_t length = word_starts ? bare_float(text.substr(i)) : 0;
    if (length == 0) {
      out += c;
      continue;
    }
    out.append(R"({"__float__":")").append(text.substr(i, length)).append("\"}");
    i += length - 1;
  }
  return out;
}

json parse_json_object(std::string_view text, const std::string& file, const TakeMember& take) {
  json root;
  try {
    Watcher watcher(file, take);
    root = json::parse(text.begin(), text.end(), std::ref(watcher));
  } catch (const json::exception& error) {
    std::string_view what = error.what();
    what.remove_prefix(what.find("] ") == what.npos ? 0 : what.find("] ") + 2);
    fail(file, ": malformed JSON: ", one_line(what, 2 * kMaxQuoted));
  }
  if (!root.is_object()) fail(file, ": expected a JSON object, got ", describe(root));
  return root;
}

}  // namespace replayssm
