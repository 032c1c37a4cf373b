// The tests of "is".
#include <algorithm>
#include <iterator>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/jinja/unicode.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

int64_t modulo(const Value& value, int64_t divisor) {
  if (divisor == 0) fail("division by zero");
  if (divisor == -1) return 0;
  return to_integer(value) % divisor;
}

// str.islower and str.isupper.
bool has_case(const Value& value, bool upper) {
  bool found = false;
  const std::string text = to_string(value);
  for (size_t at = 0; at < text.size();) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    at += character.length;
    if (upper ? is_lower(character.code) : is_upper(character.code)) return false;
    found = found || (upper ? is_upper(character.code) : is_lower(character.code));
  }
  return found;
}

const Value& only(std::string_view test, const Arguments& arguments) {
  if (arguments.positional.size() != 1 || !arguments.named.empty()) {
    fail("the test '", test, "' takes one argument");
  }
  return arguments.positional.front();
}

bool is_iterable(const Value& value) {
  return value.string() != nullptr || value.sequence() != nullptr || value.dict() != nullptr ||
         value.is<std::shared_ptr<Generator>>() || value.is<std::shared_ptr<LoopState>>() ||
         value.is_undefined();
}

// Python's "is", as far as it can be told without objects' addresses.
bool same(const Value& left, const Value& right) {
  return left.variant().index() == right.variant().index() && equal(left, right);
}

struct Entry {
  std::string_view name;
  TestFunction test;
};

using A = Arguments;
using I = Interpreter;

constexpr Entry kTests[] = {
    {"defined", [](I&, const Value& v, A) { return !v.is_undefined(); }},
    {"undefined", [](I&, const Value& v, A) { return v.is_undefined(); }},
    {"none", [](I&, const Value& v, A) { return v.is_none(); }},
    {"boolean", [](I&, const Value& v, A) { return v.is<bool>(); }},
    {"true", [](I&, const Value& v, A) { return v.is<bool>() && *v.get<bool>(); }},
    {"false", [](I&, const Value& v, A) { return v.is<bool>() && !*v.get<bool>(); }},
    {"integer", [](I&, const Value& v, A) { return v.is<int64_t>(); }},
    {"float", [](I&, const Value& v, A) { return v.is<double>(); }},
    {"number", [](I&, const Value& v, A) { return v.is_number(); }},
    {"string", [](I&, const Value& v, A) { return v.string() != nullptr; }},
    {"mapping", [](I&, const Value& v, A) { return v.dict() != nullptr; }},
    {"sequence",
     [](I&, const Value& v, A) {
       return v.string() != nullptr || v.sequence() != nullptr || v.dict() != nullptr ||
              v.is_undefined();
     }},
    {"iterable", [](I&, const Value& v, A) { return is_iterable(v); }},
    {"callable", [](I&, const Value& v, A) { return v.is<std::shared_ptr<const Callable>>(); }},
    {"odd", [](I&, const Value& v, A) { return modulo(v, 2) != 0; }},
    {"even", [](I&, const Value& v, A) { return modulo(v, 2) == 0; }},
    {"divisibleby",
     [](I&, const Value& v, A a) { return modulo(v, to_integer(only("divisibleby", a))) == 0; }},
    {"lower", [](I&, const Value& v, A) { return has_case(v, false); }},
    {"upper", [](I&, const Value& v, A) { return has_case(v, true); }},
    {"filter", [](I&, const Value& v, A) { return find_filter(to_string(v)) != nullptr; }},
    {"test", [](I&, const Value& v, A) { return find_test(to_string(v)) != nullptr; }},
    {"sameas", [](I&, const Value& v, A a) { return same(v, only("sameas", a)); }},
    {"escaped", [](I&, const Value&, A) { return false; }},
    {"in", [](I& i, const Value& v, A a) { return contains(i, only("in", a), v); }},
};

template <bool (*kDecide)(int)>
bool order_test(Interpreter&, const Value& value, Arguments arguments) {
  return kDecide(compare(value, only("comparison", arguments), "<"));
}

constexpr bool less(int order) { return order < 0; }
constexpr bool less_equal(int order) { return order <= 0; }
constexpr bool greater(int order) { return order > 0; }
constexpr bool greater_equal(int order) { return order >= 0; }

bool equal_test(Interpreter&, const Value& value, Arguments arguments) {
  return equal(value, only("equalto", arguments));
}
bool unequal_test(Interpreter&, const Value& value, Arguments arguments) {
  return !equal(value, only("ne", arguments));
}

constexpr Entry kComparisons[] = {
    {"==", equal_test},
    {"eq", equal_test},
    {"equalto", equal_test},
    {"!=", unequal_test},
    {"ne", unequal_test},
    {"<", order_test<less>},
    {"lt", order_test<less>},
    {"lessthan", order_test<less>},
    {"<=", order_test<less_equal>},
    {"le", order_test<less_equal>},
    {">", order_test<greater>},
    {"gt", order_test<greater>},
    {"greaterthan", order_test<greater>},
    {">=", order_test<greater_equal>},
    {"ge", order_test<greater_equal>},
};

}  // namespace

TestFunction find_test(std::string_view name) {
  const auto matches = [&](const Entry& entry) { return entry.name == name; };
  if (const auto found = std::find_if(std::begin(kTests), std::end(kTests), matches);
      found != std::end(kTests)) {
    return found->test;
  }
  const auto found = std::find_if(std::begin(kComparisons), std::end(kComparisons), matches);
  return found == std::end(kComparisons) ? nullptr : found->test;
}

}  // namespace replayssm::jinja
