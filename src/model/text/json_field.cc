#include "model/text/json_field.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/text_file.h"
#include "model/text/utf8.h"

namespace replayssm::text {

nlohmann::json parse_json_file(const std::filesystem::path& path) {
  const std::string content = read_text_file(path);
  try {
    return nlohmann::json::parse(content);
  } catch (const nlohmann::json::parse_error& error) {
    fail(path.string(), ": malformed JSON at byte ", error.byte, " of ", content.size());
  } catch (const nlohmann::json::out_of_range& error) {
    fail(path.string(), ": malformed JSON: a number is out of range");
  }
}

bool JsonField::has(std::string_view key) const {
  if (!value_->is_object()) reject_type("an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonField JsonField::operator[](std::string_view key) const {
  if (!value_->is_object()) reject_type("an object");
  const auto found = value_->find(key);
  if (found == value_->end()) reject(concat("expected a member \"", key, "\", got none"));
  return {*found, concat(path_, path_.ends_with(": ") ? "" : ".", key)};
}

JsonField JsonField::operator[](size_t index) const {
  return {(*value_)[index], concat(path_, "[", index, "]")};
}

size_t JsonField::size() const {
  if (!value_->is_array()) reject_type("an array");
  return value_->size();
}

const std::string& JsonField::as_string() const {
  if (!value_->is_string()) reject_type("a string");
  return value_->get_ref<const std::string&>();
}

bool JsonField::as_bool() const {
  if (!value_->is_boolean()) reject_type("true or false");
  return value_->get<bool>();
}

int32_t JsonField::as_id() const {
  constexpr uint64_t kLimit = std::numeric_limits<int32_t>::max();
  // Also of a negative number: it is a large one then.
  if (!value_->is_number_integer() || value_->get<uint64_t>() >= kLimit) {
    reject_type("a token id (an integer from 0 to 2147483646)");
  }
  return static_cast<int32_t>(value_->get<uint64_t>());
}

bool JsonField::flag(std::string_view key, bool fallback) const {
  return has(key) ? (*this)[key].as_bool() : fallback;
}

void JsonField::reject(const std::string& message) const {
  // Both may quote the file: on one line, and not all of a large string.
  constexpr size_t kLimit = 600;
  std::string line = concat(path_, path_.ends_with(": ") ? "" : ": ", message);
  if (line.size() > kLimit)
    line = line.substr(0, complete_utf8_prefix(line.substr(0, kLimit))) + "...";
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, ' ');
  fail(line);
}

void JsonField::reject_type(const char* expected) const {
  reject(concat("expected ", expected, ", got ",
                value_->is_number() ? value_->dump() : std::string(value_->type_name())));
}

}  // namespace replayssm::text
