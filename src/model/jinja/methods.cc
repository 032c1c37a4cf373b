// Methods that are bound to an object.
#include <algorithm>
#include <iterator>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/jinja/string_methods.h"

namespace replayssm::jinja {
namespace {

using Method = Value (*)(Interpreter&, const Value& object, Arguments arguments);

struct Entry {
  std::string_view name;
  Method method;
};

Value dict_get(Interpreter&, const Value& object, Arguments arguments) {
  const Bound bound("get", std::move(arguments), {"key", "default"}, 1);
  if (!hash_key(bound[0])) fail("unhashable type: '", type_name(bound[0]), "'");
  const Value* found = object.dict()->find(bound[0]);
  if (found != nullptr) return *found;
  return bound.has(1) ? bound[1] : Value::none();
}

template <class Pick>
Value dict_list(Interpreter& interpreter, const Value& object, Pick pick) {
  interpreter.charge(object.dict()->entries().size() * sizeof(Value));
  List out;
  for (const Dict::Entry& entry : object.dict()->entries()) out.push_back(pick(entry));
  return out;
}

constexpr Entry kDictMethods[] = {
    {"get", dict_get},
    {"items",
     [](Interpreter& i, const Value& object, Arguments) {
       return dict_list(i, object, [](const Dict::Entry& entry) {
         return Value::tuple({entry.first, entry.second});
       });
     }},
    {"keys",
     [](Interpreter& i, const Value& object, Arguments) {
       return dict_list(i, object, [](const Dict::Entry& entry) { return entry.first; });
     }},
    {"values",
     [](Interpreter& i, const Value& object, Arguments) {
       return dict_list(i, object, [](const Dict::Entry& entry) { return entry.second; });
     }},
    {"copy", [](Interpreter&, const Value& object, Arguments) { return object; }},
};

Value list_index(Interpreter&, const Value& object, Arguments arguments) {
  const Bound bound("index", std::move(arguments), {"value"}, 1);
  const List& items = *object.sequence();
  const auto found = std::find_if(items.begin(), items.end(),
                                  [&](const Value& item) { return equal(item, bound[0]); });
  if (found == items.end()) fail("the value is not in the list");
  return static_cast<int64_t>(found - items.begin());
}

Value list_count(Interpreter&, const Value& object, Arguments arguments) {
  const Bound bound("count", std::move(arguments), {"value"}, 1);
  const List& items = *object.sequence();
  return static_cast<int64_t>(std::count_if(
      items.begin(), items.end(), [&](const Value& item) { return equal(item, bound[0]); }));
}

constexpr Entry kListMethods[] = {
    {"index", list_index},
    {"count", list_count},
    {"copy", [](Interpreter&, const Value& object, Arguments) { return object; }},
};

// Values do not change; these are refused as the sandbox of the published renderer refuses them.
constexpr std::string_view kDictChanges[] = {"clear", "pop", "popitem", "setdefault", "update"};
constexpr std::string_view kListChanges[] = {"append", "clear",  "extend",  "insert",
                                             "pop",    "remove", "reverse", "sort"};

template <class Names>
bool is_one_of(const Names& names, std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

template <class Table>
Method find_in(const Table& table, std::string_view name) {
  const auto found = std::find_if(std::begin(table), std::end(table),
                                  [&](const Entry& entry) { return entry.name == name; });
  return found == std::end(table) ? nullptr : found->method;
}

}  // namespace

std::optional<Value> find_method(const Value& object, const std::string& name) {
  const auto bind = [&](std::function<Value(Interpreter&, Arguments)> call) {
    return Value(std::make_shared<const Callable>(Callable{"method " + name, std::move(call)}));
  };
  if (object.string() != nullptr) {
    const StringMethod method = find_string_method(name);
    if (method == nullptr) return std::nullopt;
    return bind([object, method](Interpreter& interpreter, Arguments arguments) {
      return method(interpreter, *object.string(), std::move(arguments));
    });
  }
  const bool is_dict = object.dict() != nullptr, is_list = object.sequence() != nullptr;
  if ((is_dict && is_one_of(kDictChanges, name)) ||
      (object.list() != nullptr && is_one_of(kListChanges, name))) {
    return Value::undefined(
        concat("access to attribute '", name, "' of '", type_name(object), "' object is unsafe."));
  }
  if (object.tuple() != nullptr && name == "copy") return std::nullopt;
  const Method method = is_dict   ? find_in(kDictMethods, name)
                        : is_list ? find_in(kListMethods, name)
                                  : nullptr;
  if (method == nullptr) return std::nullopt;
  return bind([object, method](Interpreter& interpreter, Arguments arguments) {
    return method(interpreter, object, std::move(arguments));
  });
}

}  // namespace replayssm::jinja
