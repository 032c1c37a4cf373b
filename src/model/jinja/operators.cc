// Arithmetic and membership by Python's rules.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/jinja/unicode.h"

namespace replayssm::jinja {
namespace {

[[noreturn]] void fail_types(const std::string& operation, const Value& left, const Value& right) {
  fail("unsupported operand type(s) for ", operation, ": '", type_name(left), "' and '",
       type_name(right), "'");
}

double to_double(const Value& value) {
  return value.is<double>() ? *value.get<double>() : static_cast<double>(to_integer(value));
}

Value power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) fail("0.0 cannot be raised to a negative power");
    return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  }
  int64_t result = 1;
  while (true) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) break;
    exponent >>= 1;
    if (exponent == 0) return result;
    if (__builtin_mul_overflow(base, base, &base)) break;
  }
  fail("integer overflow");
}

Value integers(char operation, int64_t left, int64_t right) {
  int64_t result = 0;
  bool overflow = false;
  switch (operation) {
    case '+': overflow = __builtin_add_overflow(left, right, &result); break;
    case '-': overflow = __builtin_sub_overflow(left, right, &result); break;
    case '*': overflow = __builtin_mul_overflow(left, right, &result); break;
    default:  // / (floor) and %
      if (right == 0) fail("division by zero");
      if (right == -1) {
        overflow = operation == '/' && left == INT64_MIN;
        if (!overflow) result = operation == '/' ? -left : 0;
        break;
      }
      const int64_t quotient = left / right - (left % right != 0 && (left < 0) != (right < 0));
      result = operation == '/' ? quotient : left - quotient * right;
  }
  if (overflow) fail("integer overflow");
  return result;
}

Value doubles(const std::string& operation, double left, double right) {
  if (operation == "+") return left + right;
  if (operation == "-") return left - right;
  if (operation == "*") return left * right;
  if (operation == "**") {
    const double result = std::pow(left, right);
    const bool finite = std::isfinite(left) && std::isfinite(right);
    if (finite && !std::isfinite(result)) fail("the power has no finite real value");
    return result;
  }
  if (right == 0) fail("division by zero");
  if (operation == "/") return left / right;
  double rest = std::fmod(left, right);
  if (rest != 0 && (rest < 0) != (right < 0)) rest += right;
  if (operation == "%") return rest == 0 ? std::copysign(0.0, right) : rest;
  const double quotient = (left - rest) / right;
  const double floored = std::floor(quotient);
  return quotient - floored > 0.5 ? floored + 1 : floored;
}

Value numbers(const std::string& operation, const Value& left, const Value& right) {
  if (!left.is_integral() || !right.is_integral() || operation == "/") {
    return doubles(operation, to_double(left), to_double(right));
  }
  if (operation == "**") return power(to_integer(left), to_integer(right));
  return integers(operation[0], to_integer(left), to_integer(right));
}

Value repeat(Interpreter& interpreter, const Value& value, int64_t times) {
  const auto count = static_cast<size_t>(std::max<int64_t>(times, 0));
  const List* items = value.sequence();
  const size_t unit = items != nullptr ? items->size() * sizeof(Value) : value.string()->size();
  size_t bytes = 0;
  if (__builtin_mul_overflow(unit, count, &bytes)) bytes = SIZE_MAX;
  interpreter.charge(bytes);
  if (items == nullptr) {
    std::string out;
    out.reserve(bytes);
    for (size_t i = 0; unit > 0 && i < count; ++i) out += *value.string();
    return out;
  }
  List out;
  for (size_t i = 0; unit > 0 && i < count; ++i)
    out.insert(out.end(), items->begin(), items->end());
  return value.tuple() != nullptr ? Value::tuple(std::move(out)) : Value(std::move(out));
}

Value join_lists(Interpreter& interpreter, const Value& left, const Value& right) {
  List out = *left.sequence();
  out.insert(out.end(), right.sequence()->begin(), right.sequence()->end());
  interpreter.charge(out.size() * sizeof(Value));
  return left.tuple() != nullptr ? Value::tuple(std::move(out)) : Value(std::move(out));
}

}  // namespace

Value binary_operation(Interpreter& interpreter, const std::string& operation, const Value& left,
                       const Value& right) {
  const auto text = [&](std::string out) {
    interpreter.charge(out.size());
    return Value(std::move(out));
  };
  if (operation == "~") return text(to_string(left) + to_string(right));
  if (left.is_number() && right.is_number()) return numbers(operation, left, right);
  if (left.string() != nullptr && operation == "%") {
    return text(percent_format(*left.string(), right));
  }
  for (const Value* side : {&left, &right}) {
    if (side->is_undefined()) fail(*side->get<Undefined>()->message);
  }
  if (operation == "+") {
    if (left.string() != nullptr && right.string() != nullptr) {
      return text(*left.string() + *right.string());
    }
    const bool lists = left.list() != nullptr && right.list() != nullptr;
    if (lists || (left.tuple() != nullptr && right.tuple() != nullptr)) {
      return join_lists(interpreter, left, right);
    }
    if (left.string() != nullptr) {
      fail("can only concatenate str (not \"", type_name(right), "\") to str");
    }
  }
  const auto repeatable = [](const Value& value) {
    return value.string() != nullptr || value.sequence() != nullptr;
  };
  if (operation == "*" && repeatable(left) && right.is_integral()) {
    return repeat(interpreter, left, to_integer(right));
  }
  if (operation == "*" && left.is_integral() && repeatable(right)) {
    return repeat(interpreter, right, to_integer(left));
  }
  fail_types(operation, left, right);
}

bool contains(Interpreter& interpreter, const Value& container, const Value& value) {
  if (container.dict() != nullptr) {
    if (!hash_key(value)) fail("unhashable type: '", type_name(value), "'");
    return container.dict()->find(value) != nullptr;
  }
  if (container.string() != nullptr) {
    if (value.string() == nullptr) {
      fail("'in <string>' requires string as left operand, not ", type_name(value));
    }
    return container.string()->find(*value.string()) != std::string::npos;
  }
  for (const Value& item : interpreter.items_of(container)) {
    if (equal(item, value)) return true;
  }
  return false;
}

int64_t to_integer(const Value& value) {
  if (value.is<bool>()) return *value.get<bool>() ? 1 : 0;
  if (value.is<int64_t>()) return *value.get<int64_t>();
  if (value.is_undefined()) fail(*value.get<Undefined>()->message);
  fail("'", type_name(value), "' object cannot be interpreted as an integer");
}

int64_t length_of(const Value& value) {
  if (value.string() != nullptr) return static_cast<int64_t>(character_count(*value.string()));
  if (value.sequence() != nullptr) return static_cast<int64_t>(value.sequence()->size());
  if (value.dict() != nullptr) return static_cast<int64_t>(value.dict()->entries().size());
  if (value.is_undefined()) return 0;
  if (const auto* loop = value.get<std::shared_ptr<LoopState>>()) {
    return static_cast<int64_t>((*loop)->items.size());
  }
  fail("object of type '", type_name(value), "' has no len()");
}

}  // namespace replayssm::jinja
