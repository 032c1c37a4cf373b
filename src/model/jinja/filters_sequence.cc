// Filters over the items of a sequence.
#include <algorithm>
#include <charconv>
#include <iterator>
#include <unordered_set>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/jinja/unicode.h"

namespace replayssm::jinja {
namespace {

using A = Arguments;
using I = Interpreter;
using V = const Value&;

// The value at a path such as "a.b.0" of an item; the item itself for None.
Value at_path(I& interpreter, Value item, V path) {
  if (path.is_none()) return item;
  if (path.string() == nullptr) return interpreter.item(item, path);
  std::string_view rest = *path.string();
  while (true) {
    const size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    int64_t index = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index =
        error == std::errc() && end == part.data() + part.size() && !part.starts_with('-');
    item = interpreter.item(item, is_index ? Value(index) : Value(std::string(part)));
    if (dot == std::string_view::npos) return item;
    rest.remove_prefix(dot + 1);
  }
}

Value without_case(Value value, bool case_sensitive) {
  if (case_sensitive || value.string() == nullptr) return value;
  return to_lower(*value.string());
}

// Items with the keys that they are ordered by.
std::vector<std::pair<Value, Value>> keyed(I& interpreter, V input, V path, bool case_sensitive) {
  std::vector<std::pair<Value, Value>> out;
  for (const Value& item : interpreter.items_of(input)) {
    out.emplace_back(without_case(at_path(interpreter, item, path), case_sensitive), item);
  }
  return out;
}

void sort_by_key(std::vector<std::pair<Value, Value>>& items, bool reverse) {
  // Reversed before and after, equal items keep their order, as Python has it.
  if (reverse) std::reverse(items.begin(), items.end());
  std::stable_sort(items.begin(), items.end(),
                   [](const auto& a, const auto& b) { return compare(a.first, b.first, "<") < 0; });
  if (reverse) std::reverse(items.begin(), items.end());
}

List second_of(const std::vector<std::pair<Value, Value>>& items) {
  List out;
  for (const auto& [key, item] : items) out.push_back(item);
  return out;
}

Value sort(I& interpreter, V input, A arguments) {
  const Bound bound("sort", std::move(arguments), {"reverse", "case_sensitive", "attribute"}, 0);
  std::vector<std::pair<Value, Value>> items;
  const bool case_sensitive = bound.flag(1, false);
  const Value path = bound.has(2) ? bound[2] : Value::none();
  if (path.string() == nullptr || path.string()->find(',') == std::string::npos) {
    items = keyed(interpreter, input, path, case_sensitive);
    // In a list keys that do not exist are equal, where alone they have no order.
    for (auto& [key, item] : items) key = List{std::move(key)};
  } else {
    for (const Value& item : interpreter.items_of(input)) {
      List key;
      std::string_view rest = *path.string();
      for (size_t comma = 0; comma != std::string_view::npos;) {
        comma = rest.find(',');
        const Value part = std::string(rest.substr(0, comma));
        key.push_back(without_case(at_path(interpreter, item, part), case_sensitive));
        if (comma != std::string_view::npos) rest.remove_prefix(comma + 1);
      }
      items.emplace_back(std::move(key), item);
    }
  }
  sort_by_key(items, bound.flag(0, false));
  return second_of(items);
}

Value dictsort(I&, V input, A arguments) {
  const Bound bound("dictsort", std::move(arguments), {"case_sensitive", "by", "reverse"}, 0);
  if (input.dict() == nullptr) fail("dictsort: expected a dict, got ", type_name(input));
  const std::string by = bound.text(1, "key");
  if (by != "key" && by != "value") fail("dictsort: expected by \"key\" or \"value\", got ", by);
  std::vector<std::pair<Value, Value>> items;
  for (const auto& [key, value] : input.dict()->entries()) {
    items.emplace_back(without_case(by == "key" ? key : value, bound.flag(0, false)),
                       Value::tuple({key, value}));
  }
  sort_by_key(items, bound.flag(2, false));
  return second_of(items);
}

Value groupby(I& interpreter, V input, A arguments) {
  const Bound bound("groupby", std::move(arguments), {"attribute", "default", "case_sensitive"}, 1);
  std::vector<std::pair<Value, Value>> items = keyed(interpreter, input, bound[0], true);
  for (auto& [key, item] : items) {
    if (key.is_undefined() && bound.given(1)) key = bound[1];
    key = without_case(std::move(key), bound.flag(2, false));
  }
  sort_by_key(items, false);
  List groups;
  for (size_t begin = 0; begin < items.size();) {
    size_t end = begin;
    List members;
    while (end < items.size() && equal(items[end].first, items[begin].first)) {
      members.push_back(items[end++].second);
    }
    Value key = at_path(interpreter, members.front(), bound[0]);
    if (key.is_undefined() && bound.given(1)) key = bound[1];
    groups.push_back(Value::tuple({std::move(key), std::move(members)}));
    begin = end;
  }
  return groups;
}

Value unique(I& interpreter, V input, A arguments) {
  const Bound bound("unique", std::move(arguments), {"case_sensitive", "attribute"}, 0);
  const Value path = bound.has(1) ? bound[1] : Value::none();
  Dict seen;
  List out;
  for (auto& [key, item] : keyed(interpreter, input, path, bound.flag(0, false))) {
    if (seen.find(key) != nullptr) continue;
    seen.set(std::move(key), true);
    out.push_back(std::move(item));
  }
  return Value::generator(std::move(out));
}

template <bool kLargest>
Value extreme(I& interpreter, V input, A arguments) {
  const Bound bound("min", std::move(arguments), {"case_sensitive", "attribute"}, 0);
  const Value path = bound.has(1) ? bound[1] : Value::none();
  const auto items = keyed(interpreter, input, path, bound.flag(0, false));
  if (items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i) {
    const int order = compare(items[i].first, items[best].first, kLargest ? ">" : "<");
    if (kLargest ? order > 0 : order < 0) best = i;
  }
  return items[best].second;
}

Value sum(I& interpreter, V input, A arguments) {
  const Bound bound("sum", std::move(arguments), {"attribute", "start"}, 0);
  Value total = bound.has(1) ? bound[1] : Value(int64_t{0});
  const Value path = bound.has(0) ? bound[0] : Value::none();
  if (total.string() != nullptr) fail("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : interpreter.items_of(input)) {
    total = binary_operation(interpreter, "+", total, at_path(interpreter, item, path));
  }
  return total;
}

Value join(I& interpreter, V input, A arguments) {
  const Bound bound("join", std::move(arguments), {"d", "attribute"}, 0);
  const std::string separator = bound.text(0, "");
  const Value path = bound.has(1) ? bound[1] : Value::none();
  std::string out;
  bool first = true;
  for (const Value& item : interpreter.items_of(input)) {
    const std::string text = to_string(at_path(interpreter, item, path));
    interpreter.charge(separator.size() + text.size());
    if (!first) out += separator;
    first = false;
    out += text;
  }
  return out;
}

Value map(I& interpreter, V input, A arguments) {
  if (!is_true(input)) return Value::generator({});
  const Items items = interpreter.items_of(input);
  List out;
  if (arguments.positional.empty() && !arguments.named.empty()) {
    const Bound bound("map", std::move(arguments), {"attribute", "default"}, 1);
    for (const Value& item : items) {
      Value value = at_path(interpreter, item, bound[0]);
      if (value.is_undefined() && bound.given(1)) value = bound[1];
      out.push_back(std::move(value));
    }
    return Value::generator(std::move(out));
  }
  if (arguments.positional.empty()) fail("map requires a filter argument");
  const std::string name = to_string(arguments.positional.front());
  arguments.positional.erase(arguments.positional.begin());
  interpreter.charge(items.size() * sizeof(Value));
  for (const Value& item : items) out.push_back(interpreter.apply_filter(name, item, arguments));
  return Value::generator(std::move(out));
}

template <bool kKeep, bool kAttribute>
Value select(I& interpreter, V input, A arguments) {
  if (!is_true(input)) return Value::generator({});
  const Items items = interpreter.items_of(input);
  Value path = Value::none();
  List& given = arguments.positional;
  if (kAttribute) {
    if (given.empty()) fail("Missing parameter for attribute name");
    path = given.front();
    given.erase(given.begin());
  }
  std::optional<std::string> test;
  if (!given.empty()) {
    test = to_string(given.front());
    given.erase(given.begin());
  }
  List out;
  for (const Value& item : items) {
    const Value value = at_path(interpreter, item, path);
    const bool passes = test ? interpreter.apply_test(*test, value, arguments) : is_true(value);
    if (passes == kKeep) out.push_back(item);
  }
  interpreter.charge(out.size() * sizeof(Value));
  return Value::generator(std::move(out));
}

Value batch(I& interpreter, V input, A arguments) {
  const Bound bound("batch", std::move(arguments), {"linecount", "fill_with"}, 1);
  const int64_t size = to_integer(bound[0]);
  if (size < 1 || size > 100'000) fail("batch: expected a size from 1 to 100000, got ", size);
  List out, line;
  for (const Value& item : interpreter.items_of(input)) {
    if (static_cast<int64_t>(line.size()) == size) out.push_back(std::exchange(line, {}));
    line.push_back(item);
  }
  if (!line.empty()) {
    if (bound.given(1)) {
      interpreter.charge(static_cast<size_t>(size) * sizeof(Value));
      line.resize(static_cast<size_t>(size), bound[1]);
    }
    out.push_back(std::move(line));
  }
  return Value::generator(std::move(out));
}

Value slice(I& interpreter, V input, A arguments) {
  const Bound bound("slice", std::move(arguments), {"slices", "fill_with"}, 1);
  const int64_t slices = to_integer(bound[0]);
  if (slices < 1 || slices > 100'000) fail("slice: expected 1 to 100000 slices, got ", slices);
  const Items items = interpreter.items_of(input);
  const auto count = static_cast<size_t>(slices);
  const size_t each = items.size() / count, longer = items.size() % count;
  interpreter.charge((items.size() + 4 * count) * sizeof(Value));
  List out;
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t size = each + (i < longer ? 1 : 0);
    List part(items.begin() + static_cast<std::ptrdiff_t>(at),
              items.begin() + static_cast<std::ptrdiff_t>(at + size));
    if (bound.given(1) && i >= longer) part.push_back(bound[1]);
    out.push_back(std::move(part));
    at += size;
  }
  return Value::generator(std::move(out));
}

Value first(I& interpreter, V input, A) {
  const auto* generator = input.get<std::shared_ptr<Generator>>();
  if (generator != nullptr && !(*generator)->items.empty()) {
    Value item = std::move((*generator)->items.front());
    (*generator)->items.erase((*generator)->items.begin());
    return item;
  }
  const Items items = interpreter.items_of(input);
  return items.empty() ? Value::undefined("No first item, sequence was empty.") : items[0];
}

Value last(I& interpreter, V input, A) {
  if (input.is<std::shared_ptr<Generator>>()) fail("'generator' object is not reversible");
  const Items items = interpreter.items_of(input);
  return items.empty() ? Value::undefined("No last item, sequence was empty.")
                       : items[items.size() - 1];
}

Value reverse(I& interpreter, V input, A) {
  List items = interpreter.items_of(input).list();
  interpreter.charge(items.size() * sizeof(Value));
  std::reverse(items.begin(), items.end());
  if (input.string() == nullptr) return Value::generator(std::move(items));
  std::string out;
  for (const Value& character : items) out += *character.string();
  return out;
}

Value items(I&, V input, A) {
  if (input.is_undefined()) return Value::generator({});
  if (input.dict() == nullptr) fail("Can only get item pairs from a mapping.");
  List out;
  for (const auto& [key, value] : input.dict()->entries())
    out.push_back(Value::tuple({key, value}));
  return Value::generator(std::move(out));
}

Value attr(I& interpreter, V input, A arguments) {
  const Bound bound("attr", std::move(arguments), {"name"}, 1);
  const std::string name = to_string(bound[0]);
  if (input.dict() == nullptr) return interpreter.attribute(input, name);
  return find_method(input, name)
      .value_or(Value::undefined(concat("'dict object' has no attribute '", name, "'")));
}

Value length(I&, V input, A) { return length_of(input); }

Value list(I& interpreter, V input, A) { return interpreter.items_of(input).list(); }

struct Entry {
  std::string_view name;
  FilterFunction filter;
};

constexpr Entry kFilters[] = {
    {"attr", attr},
    {"batch", batch},
    {"count", length},
    {"dictsort", dictsort},
    {"first", first},
    {"groupby", groupby},
    {"items", items},
    {"join", join},
    {"last", last},
    {"length", length},
    {"list", list},
    {"map", map},
    {"max", extreme<true>},
    {"min", extreme<false>},
    {"reject", select<false, false>},
    {"rejectattr", select<false, true>},
    {"reverse", reverse},
    {"select", select<true, false>},
    {"selectattr", select<true, true>},
    {"slice", slice},
    {"sort", sort},
    {"sum", sum},
    {"unique", unique},
};

}  // namespace

FilterFunction find_sequence_filter(std::string_view name) {
  const auto found = std::find_if(std::begin(kFilters), std::end(kFilters),
                                  [&](const Entry& entry) { return entry.name == name; });
  return found == std::end(kFilters) ? nullptr : found->filter;
}

}  // namespace replayssm::jinja
