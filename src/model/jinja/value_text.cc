// str() and repr() of values.
#include <utf8proc.h>

#include <charconv>
#include <cmath>

#include "core/check.h"
#include "model/jinja/value.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

constexpr int kDepthLimit = 200;
constexpr char kHex[] = "0123456789abcdef";

bool is_printable(char32_t code) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return false;
    case UTF8PROC_CATEGORY_ZS: return code == ' ';
    default: return true;
  }
}

void append_escape(std::string& out, char32_t code) {
  const auto put = [&](char letter, int digits) {
    out += {'\\', letter};
    for (int i = digits - 1; i >= 0; --i) out.push_back(kHex[code >> (4 * i) & 0xF]);
  };
  if (code <= 0xFF) {
    put('x', 2);
  } else if (code <= 0xFFFF) {
    put('u', 4);
  } else {
    put('U', 8);
  }
}

class Writer {
 public:
  std::string out;

  void write(const Value& value) {
    if (++depth_ > kDepthLimit) fail("values are nested more than ", kDepthLimit, " deep");
    if (value.string() != nullptr) {
      out += repr_of_string(*value.string());
    } else if (value.list() != nullptr) {
      out.push_back('[');
      write_items(*value.list());
      out.push_back(']');
    } else if (value.tuple() != nullptr) {
      out.push_back('(');
      write_items(*value.tuple());
      out += value.tuple()->size() == 1 ? ",)" : ")";
    } else if (value.dict() != nullptr) {
      write_dict(*value.dict());
    } else if (const auto* space = value.get<std::shared_ptr<Namespace>>()) {
      out += "<Namespace ";
      write_dict(*(*space)->attributes);
      out.push_back('>');
    } else {
      write_atom(value);
    }
    --depth_;
  }

 private:
  void write_items(const List& items) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += ", ";
      write(items[i]);
    }
  }

  void write_dict(const Dict& dict) {
    out.push_back('{');
    bool first = true;
    for (const auto& [key, value] : dict.entries()) {
      if (!first) out += ", ";
      first = false;
      write(key);
      out += ": ";
      write(value);
    }
    out.push_back('}');
  }

  void write_atom(const Value& value) {
    if (value.is_undefined()) {
      out += "Undefined";
    } else if (value.is_none()) {
      out += "None";
    } else if (value.is<bool>()) {
      out += *value.get<bool>() ? "True" : "False";
    } else if (value.is<int64_t>()) {
      out += concat(*value.get<int64_t>());
    } else if (value.is<double>()) {
      out += repr_of_double(*value.get<double>());
    } else if (const auto* callable = value.get<std::shared_ptr<const Callable>>()) {
      out += concat("<function ", (*callable)->name, ">");
    } else {
      out += concat("<", type_name(value), " object>");
    }
  }

  int depth_ = 0;
};

}  // namespace

std::string to_string(const Value& value) {
  if (value.string() != nullptr) return *value.string();
  if (value.is_undefined()) return {};
  return to_repr(value);
}

std::string to_repr(const Value& value) {
  Writer writer;
  writer.write(value);
  return std::move(writer.out);
}

std::string repr_of_string(std::string_view text) {
  const bool single = text.find('\'') == std::string_view::npos;
  const bool has_double = text.find('"') != std::string_view::npos;
  const char quote = single || has_double ? '\'' : '"';
  std::string out(1, quote);
  for (size_t at = 0; at < text.size();) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    const char32_t code = character.code;
    at += character.length;
    if (code == static_cast<char32_t>(quote) || code == '\\') {
      out += {'\\', static_cast<char>(code)};
    } else if (code == '\n') {
      out += "\\n";
    } else if (code == '\r') {
      out += "\\r";
    } else if (code == '\t') {
      out += "\\t";
    } else if (is_printable(code)) {
      text::append_utf8(out, code);
    } else {
      append_escape(out, code);
    }
  }
  out.push_back(quote);
  return out;
}

// The shortest digits that read back as the same number, in Python's form.
std::string repr_of_double(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const double size = std::fabs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto format = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value, format);
  REPLAYSSM_CHECK(error == std::errc(), "a number of more than ", sizeof buffer, " characters");
  std::string out(buffer, end);
  if (plain && out.find('.') == std::string::npos) out += ".0";
  return out;
}

}  // namespace replayssm::jinja
