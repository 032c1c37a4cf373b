// What templates find without defining it: functions, filters, tests and methods.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/check.h"
#include "model/jinja/interpreter.h"
#include "model/jinja/value.h"

namespace replayssm::jinja {

// The template's raise_exception.
struct RaisedException : Error {
  using Error::Error;
};

using FilterFunction = Value (*)(Interpreter&, const Value& input, Arguments arguments);
using TestFunction = bool (*)(Interpreter&, const Value& input, Arguments arguments);

// Null for unknown names.
FilterFunction find_filter(std::string_view name);
TestFunction find_test(std::string_view name);

// The two halves of find_filter.
FilterFunction find_text_filter(std::string_view name);
FilterFunction find_sequence_filter(std::string_view name);

const std::unordered_map<std::string, Value>& builtin_globals();

// The bound method `name` of `object`; nothing when the type has none of that name.
std::optional<Value> find_method(const Value& object, const std::string& name);

// The attribute `name` of the variable loop.
std::optional<Value> loop_attribute(const std::shared_ptr<LoopState>& loop,
                                    const std::string& name);

// left <operation> right, for + - * / // % ** ~.
Value binary_operation(Interpreter& interpreter, const std::string& operation, const Value& left,
                       const Value& right);
bool contains(Interpreter& interpreter, const Value& container, const Value& value);

// format % arguments, and format.format(arguments).
std::string percent_format(std::string_view format, const Value& arguments);
std::string brace_format(Interpreter& interpreter, std::string_view format,
                         const Arguments& arguments);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  std::optional<std::string> indent;  // of one level
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};

// As Python's json.dumps.
std::string to_json(const Value& value, const JsonStyle& style);

// len(). Throws Error for values that have none.
int64_t length_of(const Value& value);
// An index or count that a template gave. Throws Error for other types.
int64_t to_integer(const Value& value);

std::vector<std::string> split_lines(std::string_view text, bool keep_ends);

// Arguments of a function by parameter. Throws Error for too many, missing or unknown ones.
class Bound {
 public:
  Bound(std::string_view function, Arguments arguments,
        std::initializer_list<std::string_view> parameters, size_t required);

  bool has(size_t index) const { return values_[index].has_value(); }
  const Value& operator[](size_t index) const { return *values_[index]; }
  bool flag(size_t index, bool fallback) const {
    return has(index) ? is_true(*values_[index]) : fallback;
  }
  int64_t integer(size_t index, int64_t fallback) const {
    return has(index) ? to_integer(*values_[index]) : fallback;
  }
  std::string text(size_t index, std::string_view fallback) const {
    return has(index) ? to_string(*values_[index]) : std::string(fallback);
  }
  // Missing and None are the same.
  bool given(size_t index) const { return has(index) && !(*this)[index].is_none(); }

 private:
  std::vector<std::optional<Value>> values_;
};

}  // namespace replayssm::jinja
