// The interpreter's expressions.
#include <algorithm>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/jinja/interpreter.h"
#include "model/jinja/unicode.h"

namespace replayssm::jinja {
namespace {

// How Jinja names the type of an object in its messages.
std::string object_name(const Value& value) {
  return value.is_none() ? "None" : concat(type_name(value), " object");
}

Value missing_attribute(const Value& object, const std::string& name) {
  return Value::undefined(concat("'", object_name(object), "' has no attribute '", name, "'"));
}

Value missing_element(const Value& object, const Value& index) {
  if (index.string() != nullptr) return missing_attribute(object, *index.string());
  return Value::undefined(concat(object_name(object), " has no element ", to_repr(index)));
}

struct SliceRange {
  int64_t begin, end, step;
};

// Python's rules for the bounds of a slice of `size` items.
SliceRange slice_range(int64_t size, const Value& begin, const Value& end, const Value& step) {
  SliceRange range{0, 0, step.is_none() ? 1 : to_integer(step)};
  if (range.step == 0) fail("slice step cannot be zero");
  const int64_t low = range.step < 0 ? -1 : 0;
  const int64_t high = range.step < 0 ? size - 1 : size;
  const auto bound = [&](const Value& value, int64_t fallback) {
    if (value.is_none()) return fallback;
    int64_t index = to_integer(value);
    if (index < 0) index = index < -size ? -1 : index + size;
    return std::clamp(index, low, high);
  };
  range.begin = bound(begin, range.step < 0 ? high : low);
  range.end = bound(end, range.step < 0 ? low : high);
  return range;
}

template <class Visit>  // called with every index
void for_each_index(const SliceRange& range, Visit visit) {
  for (int64_t i = range.begin; range.step < 0 ? i > range.end : i < range.end;) {
    visit(static_cast<size_t>(i));
    if (__builtin_add_overflow(i, range.step, &i)) break;
  }
}

bool compare_with(Interpreter& interpreter, const std::string& operation, const Value& left,
                  const Value& right) {
  if (operation == "==") return equal(left, right);
  if (operation == "!=") return !equal(left, right);
  if (operation == "in") return contains(interpreter, right, left);
  if (operation == "not in") return !contains(interpreter, right, left);
  const int order = compare(left, right, operation.c_str());
  if (operation == "<") return order < 0;
  if (operation == "<=") return order <= 0;
  if (operation == ">") return order > 0;
  return order >= 0;
}

}  // namespace

Value Interpreter::evaluate(const Name& node) {
  for (const Frame* frame = frame_.get(); frame != nullptr; frame = frame->outer.get()) {
    const auto found = frame->variables.find(node.name);
    if (found != frame->variables.end()) return found->second;
  }
  const auto found = globals_.find(node.name);
  if (found != globals_.end()) return found->second;
  return Value::undefined(concat("'", node.name, "' is undefined"));
}

List Interpreter::evaluate_all(const std::vector<ExpressionPtr>& expressions) {
  charge(expressions.size() * sizeof(Value));
  List values;
  values.reserve(expressions.size());
  for (const ExpressionPtr& expression : expressions) values.push_back(evaluate(*expression));
  return values;
}

Value Interpreter::evaluate(const ListLiteral& node) { return evaluate_all(node.items); }

Value Interpreter::evaluate(const TupleLiteral& node) {
  return Value::tuple(evaluate_all(node.items));
}

Value Interpreter::evaluate(const DictLiteral& node) {
  charge(node.items.size() * sizeof(Dict::Entry));
  Dict dict;
  for (const auto& [key, value] : node.items) {
    Value key_value = evaluate(*key);
    dict.set(std::move(key_value), evaluate(*value));
  }
  return dict;
}

Value Interpreter::evaluate(const Unary& node) {
  const Value operand = evaluate(*node.operand);
  if (node.operation == "not") return !is_true(operand);
  if (operand.is_undefined()) fail(*operand.get<Undefined>()->message);
  if (operand.is<double>()) {
    return node.operation == "-" ? -*operand.get<double>() : *operand.get<double>();
  }
  if (!operand.is_integral()) {
    fail("bad operand type for unary ", node.operation, ": '", type_name(operand), "'");
  }
  const int64_t number = to_integer(operand);
  if (node.operation == "-" && number == INT64_MIN) fail("integer overflow");
  return node.operation == "-" ? -number : number;
}

Value Interpreter::evaluate(const Binary& node) {
  const Value left = evaluate(*node.left);
  const Value right = evaluate(*node.right);
  return binary_operation(*this, node.operation, left, right);
}

Value Interpreter::evaluate(const Logical& node) {
  Value left = evaluate(*node.left);
  return is_true(left) == node.is_and ? evaluate(*node.right) : left;
}

Value Interpreter::evaluate(const Comparison& node) {
  Value left = evaluate(*node.first);
  for (const auto& [operation, expression] : node.rest) {
    Value right = evaluate(*expression);
    if (!compare_with(*this, operation, left, right)) return false;
    left = std::move(right);
  }
  return true;
}

Value Interpreter::evaluate(const Conditional& node) {
  if (is_true(evaluate(*node.test))) return evaluate(*node.then);
  if (node.otherwise != nullptr) return evaluate(*node.otherwise);
  return Value::undefined("the inline if-expression evaluated to false and has no else");
}

Value Interpreter::evaluate(const jinja::Attribute& node) {
  return attribute(evaluate(*node.object), node.name);
}

Value Interpreter::evaluate(const jinja::Item& node) {
  const Value object = evaluate(*node.object);
  if (const auto* bounds = std::get_if<Slice>(&node.index->node)) return slice(object, *bounds);
  return item(object, evaluate(*node.index));
}

// A slice that is part of a longer index, which nothing here can be asked for.
Value Interpreter::evaluate(const Slice&) { fail("a slice among several indices"); }

Value Interpreter::evaluate(const jinja::Call& node) {
  const Value callee = evaluate(*node.callee);
  return call(callee, evaluate_arguments(node.arguments));
}

Value Interpreter::evaluate(const jinja::Filter& node) {
  Value input = evaluate(*node.input);
  return apply_filter(node.name, std::move(input), evaluate_arguments(node.arguments));
}

Value Interpreter::evaluate(const jinja::Test& node) {
  Value input = evaluate(*node.input);
  return apply_test(node.name, std::move(input), evaluate_arguments(node.arguments));
}

Value Interpreter::apply_filter(const std::string& name, Value input, Arguments arguments) {
  const DepthGuard depth(*this, 1);
  const FilterFunction filter = find_filter(name);
  if (filter == nullptr) fail("no filter named '", name, "'");
  return filter(*this, input, std::move(arguments));
}

bool Interpreter::apply_test(const std::string& name, Value input, Arguments arguments) {
  const DepthGuard depth(*this, 1);
  const TestFunction test = find_test(name);
  if (test == nullptr) fail("no test named '", name, "'");
  return test(*this, input, std::move(arguments));
}

Arguments Interpreter::evaluate_arguments(const CallArguments& arguments) {
  Arguments out;
  out.positional = evaluate_all(arguments.positional);
  for (const auto& [name, value] : arguments.named) out.named.emplace_back(name, evaluate(*value));
  if (arguments.star != nullptr) {
    const std::shared_ptr<const List> more = items_of(evaluate(*arguments.star));
    charge(more->size() * sizeof(Value));
    out.positional.insert(out.positional.end(), more->begin(), more->end());
  }
  if (arguments.double_star != nullptr) {
    const Value more = evaluate(*arguments.double_star);
    if (more.dict() == nullptr) fail("argument after ** must be a mapping, not ", type_name(more));
    charge(more.dict()->entries().size() * sizeof(Dict::Entry));
    for (const auto& [key, value] : more.dict()->entries()) {
      if (key.string() == nullptr) fail("keywords must be strings");
      out.named.emplace_back(*key.string(), value);
    }
  }
  return out;
}

Value Interpreter::attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail(*object.get<Undefined>()->message);
  if (const auto* space = object.get<std::shared_ptr<Namespace>>()) {
    const Value* found = (*space)->attributes->find_text(name);
    return found != nullptr ? *found : missing_attribute(object, name);
  }
  if (const auto* loop = object.get<std::shared_ptr<LoopState>>()) {
    return loop_attribute(*loop, name).value_or(missing_attribute(object, name));
  }
  if (std::optional<Value> method = find_method(object, name)) return *std::move(method);
  if (object.dict() != nullptr) {
    if (const Value* found = object.dict()->find_text(name)) return *found;
  }
  return missing_attribute(object, name);
}

Value Interpreter::item(const Value& object, const Value& index) {
  if (object.is_undefined()) fail(*object.get<Undefined>()->message);
  if (object.dict() != nullptr) {
    if (const Value* found = object.dict()->find(index)) return *found;
  }
  const List* items = object.sequence();
  if ((items != nullptr || object.string() != nullptr) && index.is_integral()) {
    const int64_t size = length_of(object);
    int64_t at = to_integer(index);
    if (at < 0) at += size;
    if (at < 0 || at >= size) return missing_element(object, index);
    if (items != nullptr) return (*items)[static_cast<size_t>(at)];
    const std::string_view text = *object.string();
    const size_t begin = character_offset(text, static_cast<size_t>(at));
    return std::string(text.substr(begin, character_offset(text.substr(begin), 1)));
  }
  if (index.string() != nullptr && object.dict() == nullptr) {
    return attribute(object, *index.string());
  }
  if (index.string() != nullptr) {
    return find_method(object, *index.string()).value_or(missing_element(object, index));
  }
  return missing_element(object, index);
}

Value Interpreter::slice(const Value& object, const Slice& node) {
  const auto bound = [&](const ExpressionPtr& expression) {
    return expression != nullptr ? evaluate(*expression) : Value::none();
  };
  const Value begin = bound(node.begin), end = bound(node.end), step = bound(node.step);
  if (object.is_undefined()) fail(*object.get<Undefined>()->message);
  const List* items = object.sequence();
  if (items == nullptr && object.string() == nullptr) {
    return Value::undefined(concat(object_name(object), " has no slices"));
  }
  const SliceRange range = slice_range(length_of(object), begin, end, step);
  if (items != nullptr) {
    List out;
    for_each_index(range, [&](size_t i) { out.push_back((*items)[i]); });
    charge(out.size() * sizeof(Value));
    return object.tuple() != nullptr ? Value::tuple(std::move(out)) : Value(std::move(out));
  }
  const std::string& text = *object.string();
  std::string out;
  if (range.step == 1 && range.begin < range.end) {
    const size_t first = character_offset(text, static_cast<size_t>(range.begin));
    out = text.substr(first, character_offset(std::string_view(text).substr(first),
                                              static_cast<size_t>(range.end - range.begin)));
  } else if (range.step != 1) {
    charge(text.size() * sizeof(std::string));
    const std::vector<std::string> all = characters(text);
    for_each_index(range, [&](size_t i) { out += all[i]; });
  }
  charge(out.size());
  return out;
}

std::shared_ptr<const List> Interpreter::items_of(const Value& value) {
  if (const auto* items = value.get<std::shared_ptr<const List>>()) return *items;
  if (const auto* tuple = value.get<Tuple>()) return tuple->items;
  List items;
  if (value.string() != nullptr) {
    charge(value.string()->size() * sizeof(Value));
    for (std::string& character : characters(*value.string()))
      items.push_back(std::move(character));
  } else if (value.dict() != nullptr) {
    charge(value.dict()->entries().size() * sizeof(Value));
    for (const auto& [key, entry] : value.dict()->entries()) items.push_back(key);
  } else if (const auto* generator = value.get<std::shared_ptr<Generator>>()) {
    items = std::exchange((*generator)->items, {});
  } else if (!value.is_undefined()) {
    fail("'", type_name(value), "' object is not iterable");
  }
  return std::make_shared<const List>(std::move(items));
}

}  // namespace replayssm::jinja
