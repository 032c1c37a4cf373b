// JSON as Hugging Face tools write it: read strictly, with errors of one line.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace replayssm {

// `text` in double quotes, control characters escaped, shortened: safe inside an error message.
std::string in_quotes(std::string_view text);

// What `value` is, for "expected ..., got ...".
std::string describe(const nlohmann::json& value);

// Bare Infinity, -Infinity and NaN, which Python's json module writes, in the spelling of
// transformers v5: {"__float__": "Infinity"}. Text inside strings stays as it is.
std::string with_tagged_floats(std::string_view text);

// Takes over one member of the root object.
using TakeMember = std::function<void(const std::string& key, nlohmann::json&& value)>;

// Parses `text`, whose root must be an object. Throws Error naming `file` for malformed text, a key
// that occurs twice in one object, and nesting deeper than any configuration's. With `take`,
// members of the root go there one by one and the result is of no use.
nlohmann::json parse_json_object(std::string_view text, const std::string& file,
                                 const TakeMember& take = {});

}  // namespace replayssm
