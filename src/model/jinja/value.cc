#include "model/jinja/value.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

constexpr int kDepthLimit = 200;

bool equal(const Value& left, const Value& right, int depth);

bool equal_lists(const List& left, const List& right, int depth) {
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size(); ++i) {
    if (!equal(left[i], right[i], depth)) return false;
  }
  return true;
}

bool equal_dicts(const Dict& left, const Dict& right, int depth) {
  if (left.entries().size() != right.entries().size()) return false;
  for (const auto& [key, value] : left.entries()) {
    const Value* other = right.find(key);
    if (other == nullptr || !equal(value, *other, depth)) return false;
  }
  return true;
}

// Exact, also where a 64-bit integer has no double.
int compare_numbers(const Value& left, const Value& right) {
  const auto integer = [](const Value& value) {
    return value.is<bool>() ? int64_t{*value.get<bool>()} : *value.get<int64_t>();
  };
  if (left.is_integral() && right.is_integral()) {
    const int64_t a = integer(left), b = integer(right);
    return a < b ? -1 : a > b;
  }
  const auto real = [&](const Value& value) -> long double {
    return value.is<double>() ? *value.get<double>() : integer(value);
  };
  const long double a = real(left), b = real(right);
  return a < b ? -1 : a > b;
}

bool is_nan(const Value& value) { return value.is<double>() && std::isnan(*value.get<double>()); }

bool equal(const Value& left, const Value& right, int depth) {
  if (depth > kDepthLimit) fail("values are nested more than ", kDepthLimit, " deep");
  if (left.is_number() && right.is_number()) {
    return !is_nan(left) && !is_nan(right) && compare_numbers(left, right) == 0;
  }
  if (left.variant().index() != right.variant().index()) return false;
  if (left.string() != nullptr) return *left.string() == *right.string();
  if (left.sequence() != nullptr)
    return equal_lists(*left.sequence(), *right.sequence(), depth + 1);
  if (left.dict() != nullptr) return equal_dicts(*left.dict(), *right.dict(), depth + 1);
  if (left.is_undefined() || left.is_none()) return true;
  if (const auto* generator = left.get<std::shared_ptr<Generator>>()) {
    return *generator == *right.get<std::shared_ptr<Generator>>();
  }
  if (const auto* space = left.get<std::shared_ptr<Namespace>>()) {
    return *space == *right.get<std::shared_ptr<Namespace>>();
  }
  if (const auto* callable = left.get<std::shared_ptr<const Callable>>()) {
    return *callable == *right.get<std::shared_ptr<const Callable>>();
  }
  return *left.get<std::shared_ptr<LoopState>>() == *right.get<std::shared_ptr<LoopState>>();
}

}  // namespace

Value::Value(Dict dict) : variant_(std::make_shared<const Dict>(std::move(dict))) {}

Value Value::undefined(std::string message) {
  return Value(Undefined{std::make_shared<const std::string>(std::move(message))});
}

Value Value::tuple(List items) {
  return Value(Tuple{std::make_shared<const List>(std::move(items))});
}

Value Value::generator(List items) {
  return Value(std::make_shared<Generator>(Generator{std::move(items)}));
}

const std::string* Value::string() const {
  const auto* text = get<std::shared_ptr<const std::string>>();
  return text != nullptr ? text->get() : nullptr;
}

const List* Value::list() const {
  const auto* items = get<std::shared_ptr<const List>>();
  return items != nullptr ? items->get() : nullptr;
}

const List* Value::tuple() const {
  const auto* items = get<Tuple>();
  return items != nullptr ? items->items.get() : nullptr;
}

const List* Value::sequence() const { return list() != nullptr ? list() : tuple(); }

const Dict* Value::dict() const {
  const auto* dict = get<std::shared_ptr<const Dict>>();
  return dict != nullptr ? dict->get() : nullptr;
}

void Dict::set(Value key, Value value) {
  std::optional<std::string> hash = hash_key(key);
  if (!hash) fail("unhashable type: '", type_name(key), "'");
  const auto [place, added] = index_.try_emplace(*std::move(hash), entries_.size());
  if (added) {
    entries_.emplace_back(std::move(key), std::move(value));
  } else {
    entries_[place->second].second = std::move(value);
  }
}

const Value* Dict::find(const Value& key) const {
  const std::optional<std::string> hash = hash_key(key);
  const auto found = hash ? index_.find(*hash) : index_.end();
  return found == index_.end() ? nullptr : &entries_[found->second].second;
}

const Value* Dict::find_text(std::string_view key) const { return find(Value(std::string(key))); }

void Dict::clear() {
  index_.clear();
  std::vector<Entry>().swap(entries_);
}

std::optional<std::string> hash_key(const Value& value) {
  if (value.string() != nullptr) return "s" + *value.string();
  if (value.is_none()) return "0";
  if (value.is_undefined()) return "u";
  if (value.is<bool>()) return *value.get<bool>() ? "n1" : "n0";
  if (value.is<int64_t>()) return concat("n", *value.get<int64_t>());
  if (value.is<double>()) {
    const double number = *value.get<double>();
    const bool integral = std::trunc(number) == number && std::fabs(number) < 0x1p63;
    return integral ? concat("n", static_cast<int64_t>(number)) : "n" + repr_of_double(number);
  }
  if (value.tuple() == nullptr) return std::nullopt;
  std::string key = "t";
  for (const Value& item : *value.tuple()) {
    const std::optional<std::string> part = hash_key(item);
    if (!part) return std::nullopt;
    key += concat(part->size(), ":", *part);
  }
  return key;
}

const char* type_name(const Value& value) {
  constexpr const char* kNames[] = {"Undefined", "NoneType", "bool",       "int",  "float",
                                    "str",       "list",     "tuple",      "dict", "generator",
                                    "Namespace", "function", "LoopContext"};
  static_assert(std::size(kNames) == std::variant_size_v<Value::Variant>);
  return kNames[value.variant().index()];
}

bool is_true(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (value.is<bool>()) return *value.get<bool>();
  if (value.is<int64_t>()) return *value.get<int64_t>() != 0;
  if (value.is<double>()) return *value.get<double>() != 0;
  if (value.string() != nullptr) return !value.string()->empty();
  if (value.sequence() != nullptr) return !value.sequence()->empty();
  if (value.dict() != nullptr) return !value.dict()->entries().empty();
  return true;
}

bool equal(const Value& left, const Value& right) { return equal(left, right, 0); }

int compare(const Value& left, const Value& right, const char* operation) {
  for (const Value* side : {&left, &right}) {
    if (side->is_undefined()) fail(*side->get<Undefined>()->message);
  }
  if (left.is_number() && right.is_number()) return compare_numbers(left, right);
  if (left.string() != nullptr && right.string() != nullptr) {
    return left.string()->compare(*right.string());  // UTF-8 has the order of code points
  }
  const bool lists = left.list() != nullptr && right.list() != nullptr;
  const bool tuples = left.tuple() != nullptr && right.tuple() != nullptr;
  if (lists || tuples) {
    const List& a = *left.sequence();
    const List& b = *right.sequence();
    for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
      if (!equal(a[i], b[i])) return compare(a[i], b[i], operation);
    }
    return a.size() < b.size() ? -1 : a.size() > b.size();
  }
  fail("'", operation, "' not supported between instances of '", type_name(left), "' and '",
       type_name(right), "'");
}

Value from_json(const nlohmann::ordered_json& json) {
  struct Converter {
    int depth = 0;
    Value operator()(const nlohmann::ordered_json& json) {
      if (++depth > kDepthLimit) fail("variables are nested more than ", kDepthLimit, " deep");
      Value value = convert(json);
      --depth;
      return value;
    }
    Value convert(const nlohmann::ordered_json& json) {
      using Type = nlohmann::ordered_json::value_t;
      switch (json.type()) {
        case Type::boolean: return json.get<bool>();
        case Type::number_integer: return json.get<int64_t>();
        case Type::number_float: return json.get<double>();
        case Type::string: return text::to_valid_utf8(json.get_ref<const std::string&>());
        case Type::number_unsigned:
          // An integer of Python has no limit; here it is a double beyond 63 bits.
          if (json.get<uint64_t>() > INT64_MAX) return static_cast<double>(json.get<uint64_t>());
          return json.get<int64_t>();
        case Type::array: {
          List items;
          items.reserve(json.size());
          for (const auto& item : json) items.push_back((*this)(item));
          return items;
        }
        case Type::object: {
          Dict dict;
          for (const auto& [key, item] : json.items()) {
            dict.set(text::to_valid_utf8(key), (*this)(item));
          }
          return dict;
        }
        default: return Value::none();
      }
    }
  };
  return Converter{}(json);
}

}  // namespace replayssm::jinja
