#include <algorithm>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

constexpr int kDepthLimit = 200;
constexpr char kHex[] = "0123456789abcdef";

class JsonWriter {
 public:
  explicit JsonWriter(const JsonStyle& style) : style_(style) {}

  std::string out;

  void write(const Value& value) {
    if (++depth_ > kDepthLimit) fail("values are nested more than ", kDepthLimit, " deep");
    if (value.string() != nullptr) {
      write_string(*value.string());
    } else if (value.sequence() != nullptr) {
      write_list(*value.sequence());
    } else if (value.dict() != nullptr) {
      write_dict(*value.dict());
    } else {
      out += atom(value);
    }
    --depth_;
  }

 private:
  static std::string atom(const Value& value) {
    if (value.is_none()) return "null";
    if (value.is<bool>()) return *value.get<bool>() ? "true" : "false";
    if (value.is<int64_t>()) return concat(*value.get<int64_t>());
    if (value.is<double>()) {
      const std::string digits = repr_of_double(*value.get<double>());
      if (digits == "nan") return "NaN";
      if (digits == "inf") return "Infinity";
      return digits == "-inf" ? "-Infinity" : digits;
    }
    fail("Object of type ", type_name(value), " is not JSON serializable");
  }

  void write_unit(uint32_t unit) {
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out.push_back(kHex[unit >> shift & 0xF]);
  }

  void write_string(std::string_view text) {
    constexpr std::string_view kSpecial = "\"\\\n\r\t\f\b";
    constexpr std::string_view kLetters = "\"\\nrtfb";
    out.push_back('"');
    for (size_t at = 0; at < text.size();) {
      const text::Utf8Character character = text::decode_utf8(text, at);
      const uint32_t code = character.code;
      const size_t special =
          code < 0x80 ? kSpecial.find(static_cast<char>(code)) : std::string::npos;
      if (special != std::string::npos) {
        out += {'\\', kLetters[special]};
      } else if (code < 0x20 || (style_.ensure_ascii && code >= 0x7F && code < 0x10000)) {
        write_unit(code);
      } else if (style_.ensure_ascii && code >= 0x10000) {
        write_unit(0xD800 + ((code - 0x10000) >> 10));
        write_unit(0xDC00 + ((code - 0x10000) & 0x3FF));
      } else {
        out += text.substr(at, character.length);
      }
      at += character.length;
    }
    out.push_back('"');
  }

  void new_line(int level) {
    if (!style_.indent) return;
    out.push_back('\n');
    for (int i = 0; i < level; ++i) out += *style_.indent;
  }

  void write_list(const List& items) {
    if (items.empty()) {
      out += "[]";
      return;
    }
    out.push_back('[');
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += style_.item_separator;
      new_line(depth_);
      write(items[i]);
    }
    new_line(depth_ - 1);
    out.push_back(']');
  }

  static std::string key_text(const Value& key) {
    if (key.string() != nullptr) return *key.string();
    if (key.is_none() || key.is_number()) return atom(key);
    fail("keys must be str, int, float, bool or None, not ", type_name(key));
  }

  void write_dict(const Dict& dict) {
    if (dict.entries().empty()) {
      out += "{}";
      return;
    }
    std::vector<const Dict::Entry*> entries;
    for (const Dict::Entry& entry : dict.entries()) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
        return compare(a->first, b->first, "<") < 0;
      });
    }
    out.push_back('{');
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out += style_.item_separator;
      new_line(depth_);
      write_string(key_text(entries[i]->first));
      out += style_.key_separator;
      write(entries[i]->second);
    }
    new_line(depth_ - 1);
    out.push_back('}');
  }

  const JsonStyle& style_;
  int depth_ = 0;
};

}  // namespace

std::string to_json(const Value& value, const JsonStyle& style) {
  JsonWriter writer(style);
  writer.write(value);
  return std::move(writer.out);
}

}  // namespace replayssm::jinja
