#include "model/jinja/interpreter.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.h"
#include "model/jinja/builtins.h"

namespace replayssm::jinja {
namespace {

constexpr int kDepthLimit = 1500;
constexpr int kMacroDepthCost = 15;  // a call of a macro takes as much stack as so many levels
constexpr int64_t kStepLimit = 10'000'000;
constexpr size_t kMacroBytes = 1024;  // what a macro and its frame may keep
constexpr size_t kProducedLimit = size_t{512} << 20;

// What loop.changed remembers may be the loop itself.
struct LoopGuard {
  LoopState& loop;
  ~LoopGuard() { loop.last_changed.clear(); }
};

}  // namespace

// Enters a new frame, inside of `outer`.
class Interpreter::FrameGuard {
 public:
  FrameGuard(Interpreter& interpreter, std::shared_ptr<Frame> outer)
      : interpreter_(interpreter), saved_(interpreter.frame_) {
    interpreter.frame_ = std::make_shared<Frame>(Frame{std::move(outer), {}, false});
  }
  ~FrameGuard() { interpreter_.frame_ = std::move(saved_); }
  FrameGuard(const FrameGuard&) = delete;
  FrameGuard& operator=(const FrameGuard&) = delete;

 private:
  Interpreter& interpreter_;
  std::shared_ptr<Frame> saved_;
};

Interpreter::DepthGuard::DepthGuard(Interpreter& interpreter, int cost)
    : interpreter_(interpreter), cost_(cost) {
  if (interpreter.depth_ + cost > kDepthLimit) fail("the template is nested too deeply");
  if (++interpreter.steps_ > kStepLimit)
    fail("the template takes more than ", kStepLimit, " steps");
  interpreter.depth_ += cost;
}

Interpreter::Interpreter(const Dict& variables) : globals_(builtin_globals()) {
  for (const auto& [key, value] : variables.entries()) globals_[to_string(key)] = value;
  frame_ = std::make_shared<Frame>();
}

Interpreter::~Interpreter() {
  for (const auto& frame : captured_) frame->variables.clear();
  for (const auto& space : namespaces_) space->attributes->clear();
}

std::string Interpreter::render(const Body& body) {
  try {
    return capture(body);
  } catch (const RaisedException& error) {
    fail("chat template: ", error.what());
  } catch (const Error& error) {
    fail_at(position_, error.what());
  }
}

void Interpreter::charge(size_t bytes) {
  if (bytes > kProducedLimit - produced_) {
    fail("the template produces more than ", kProducedLimit >> 20, " MiB");
  }
  produced_ += bytes;
}

Value Interpreter::new_namespace(Dict attributes) {
  auto space = std::make_shared<Namespace>();
  space->attributes = std::make_unique<Dict>(std::move(attributes));
  namespaces_.push_back(space);
  charge(sizeof(Namespace));
  return Value(std::move(space));
}

void Interpreter::write(std::string_view text) {
  charge(text.size());
  out_->append(text);
}

std::string Interpreter::capture(const Body& body) {
  std::string text;
  std::string* const outer = std::exchange(out_, &text);
  try {
    run(body);
  } catch (...) {
    out_ = outer;
    throw;
  }
  out_ = outer;
  return text;
}

Interpreter::Flow Interpreter::run(const Body& body) {
  for (const Statement& statement : body) {
    const Flow flow = run(statement);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const Statement& statement) {
  const DepthGuard depth(*this, 1);
  position_ = statement.position;
  return std::visit([&](const auto& node) { return run(node); }, statement.node);
}

Interpreter::Flow Interpreter::run(const Text& node) {
  write(node.text);
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const Print& node) {
  write(to_string(evaluate(*node.value)));
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const If& node) {
  for (const auto& [test, body] : node.branches) {
    if (is_true(evaluate(*test))) return run(body);
  }
  return run(node.otherwise);
}

std::shared_ptr<const List> Interpreter::loop_items(const For& node) {
  std::shared_ptr<const List> all = items_of(evaluate(*node.iterable));
  if (node.condition == nullptr) return all;
  List kept;
  for (const Value& value : *all) {
    const FrameGuard frame(*this, frame_);
    assign(*node.target, value);
    if (is_true(evaluate(*node.condition))) kept.push_back(value);
  }
  return std::make_shared<const List>(std::move(kept));
}

Interpreter::Flow Interpreter::run(const For& node) {
  const auto loop = std::make_shared<LoopState>();
  loop->items = loop_items(node);
  const LoopGuard guard{*loop};
  for (; loop->index < loop->items->size(); ++loop->index) {
    const FrameGuard frame(*this, frame_);
    const DepthGuard step(*this, 1);
    frame_->variables["loop"] = Value(loop);
    assign(*node.target, (*loop->items)[loop->index]);
    if (run(node.body) == Flow::kBreak) break;
  }
  if (!loop->items->empty()) return Flow::kNext;
  const FrameGuard frame(*this, frame_);
  return run(node.otherwise);
}

Interpreter::Flow Interpreter::run(const Set& node) {
  assign(*node.target, evaluate(*node.value));
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const SetBlock& node) {
  std::string text;
  {
    const FrameGuard frame(*this, frame_);
    text = capture(node.body);
  }
  Value value = std::move(text);
  if (node.filter != nullptr) value = apply_filters(*node.filter, std::move(value));
  assign(*node.target, value);
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const Macro& node) {
  frame_->variables[node.name] = make_macro(node);
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const CallBlock& node) {
  const Call& call_node = std::get<Call>(node.call->node);
  const Value callee = evaluate(*call_node.callee);
  Arguments arguments = evaluate_arguments(call_node.arguments);
  arguments.named.emplace_back("caller", make_macro(node.caller));
  write(to_string(call(callee, std::move(arguments))));
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const FilterBlock& node) {
  std::string text;
  {
    const FrameGuard frame(*this, frame_);
    text = capture(node.body);
  }
  write(to_string(apply_filters(*node.filter, std::move(text))));
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const With& node) {
  List values;
  for (const auto& [target, value] : node.bindings) values.push_back(evaluate(*value));
  const FrameGuard frame(*this, frame_);
  for (size_t i = 0; i < values.size(); ++i) assign(*node.bindings[i].first, values[i]);
  return run(node.body);
}

Interpreter::Flow Interpreter::run(const Scope& node) {
  const FrameGuard frame(*this, frame_);
  return run(node.body);
}

void Interpreter::assign(const Expression& target, const Value& value) {
  if (const auto* name = std::get_if<Name>(&target.node)) {
    frame_->variables[name->name] = value;
    return;
  }
  if (const auto* place = std::get_if<jinja::Attribute>(&target.node)) {
    const Value object = evaluate(*place->object);
    const auto* space = object.get<std::shared_ptr<Namespace>>();
    if (space == nullptr) fail("cannot assign to an attribute of what is not a namespace");
    (*space)->attributes->set(place->name, value);
    charge(sizeof(Dict::Entry));
    return;
  }
  const TupleLiteral& names = std::get<TupleLiteral>(target.node);
  const std::shared_ptr<const List> values = items_of(value);
  if (values->size() != names.items.size()) {
    fail("expected ", names.items.size(), " values to unpack, got ", values->size());
  }
  for (size_t i = 0; i < values->size(); ++i) assign(*names.items[i], (*values)[i]);
}

Value Interpreter::apply_filters(const Expression& chain, Value input) {
  const auto& filter = std::get<jinja::Filter>(chain.node);
  if (filter.input != nullptr) input = apply_filters(*filter.input, std::move(input));
  return apply_filter(filter.name, std::move(input), evaluate_arguments(filter.arguments));
}

Value Interpreter::make_macro(const Macro& node) {
  charge(kMacroBytes);
  for (auto frame = frame_; frame != nullptr && !frame->captured; frame = frame->outer) {
    frame->captured = true;
    captured_.push_back(frame);
  }
  const auto closure = std::weak_ptr<Frame>(frame_);  // captured_ keeps it alive
  return Value(std::make_shared<const Callable>(
      Callable{node.name, [&node, closure](Interpreter& interpreter, Arguments arguments) {
                 return interpreter.call_macro(node, closure.lock(), std::move(arguments));
               }}));
}

Value Interpreter::call_macro(const Macro& node, const std::shared_ptr<Frame>& closure,
                              Arguments arguments) {
  const DepthGuard depth(*this, kMacroDepthCost);
  const Position position = position_;
  const FrameGuard frame(*this, closure);
  bind_parameters(node, arguments);
  Value result = capture(node.body);
  position_ = position;
  return result;
}

void Interpreter::bind_parameters(const Macro& node, Arguments& arguments) {
  auto& variables = frame_->variables;
  const auto take_named = [&](const std::string& name) -> std::optional<Value> {
    const auto found = std::find_if(arguments.named.begin(), arguments.named.end(),
                                    [&](const auto& named) { return named.first == name; });
    if (found == arguments.named.end()) return std::nullopt;
    Value value = std::move(found->second);
    arguments.named.erase(found);
    return value;
  };
  const size_t positional = std::min(arguments.positional.size(), node.parameters.size());
  for (size_t i = 0; i < node.parameters.size(); ++i) {
    const Parameter& parameter = node.parameters[i];
    if (i < positional) {
      variables[parameter.name] = arguments.positional[i];
    } else if (std::optional<Value> named = take_named(parameter.name)) {
      variables[parameter.name] = *std::move(named);
    } else if (parameter.fallback != nullptr) {
      variables[parameter.name] = evaluate(*parameter.fallback);
    } else {
      variables[parameter.name] =
          Value::undefined(concat("parameter '", parameter.name, "' was not provided"));
    }
  }
  if (node.extras.caller) {
    variables.try_emplace("caller",
                          take_named("caller").value_or(Value::undefined("No caller defined")));
  }
  if (node.extras.kwargs) {
    Dict kwargs;
    for (auto& [name, value] : arguments.named) kwargs.set(name, std::move(value));
    variables["kwargs"] = std::move(kwargs);
  } else if (!arguments.named.empty()) {
    fail("macro '", node.name, "' takes no keyword argument '", arguments.named.front().first, "'");
  }
  if (node.extras.varargs) {
    variables["varargs"] =
        Value::tuple(List(arguments.positional.begin() + positional, arguments.positional.end()));
  } else if (arguments.positional.size() > positional) {
    fail("macro '", node.name, "' takes not more than ", node.parameters.size(), " argument(s)");
  }
}

Value Interpreter::call(const Value& callee, Arguments arguments) {
  if (callee.is_undefined()) fail(*callee.get<Undefined>()->message);
  const auto* callable = callee.get<std::shared_ptr<const Callable>>();
  if (callable == nullptr) fail("'", type_name(callee), "' object is not callable");
  const std::shared_ptr<const Callable> keep = *callable;
  return keep->call(*this, std::move(arguments));
}

Value Interpreter::evaluate(const Expression& expression) {
  const DepthGuard depth(*this, 1);
  position_ = expression.position;
  return std::visit([&](const auto& node) { return evaluate(node); }, expression.node);
}

}  // namespace replayssm::jinja
