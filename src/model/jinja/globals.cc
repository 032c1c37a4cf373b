// The functions that templates can call, and the variable loop.
#include <ctime>

#include "core/check.h"
#include "model/jinja/builtins.h"

namespace replayssm::jinja {
namespace {

constexpr int64_t kRangeLimit = 100'000;

Value function(std::string name, std::function<Value(Interpreter&, Arguments)> call) {
  return Value(std::make_shared<const Callable>(Callable{std::move(name), std::move(call)}));
}

Value range(Interpreter& interpreter, Arguments arguments) {
  const Bound bound("range", std::move(arguments), {"start", "stop", "step"}, 1);
  const int64_t start = bound.has(1) ? to_integer(bound[0]) : 0;
  const int64_t stop = to_integer(bound[bound.has(1) ? 1 : 0]);
  const int64_t step = bound.integer(2, 1);
  if (step == 0) fail("range() arg 3 must not be zero");
  List numbers;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    numbers.push_back(i);
    if (numbers.size() > kRangeLimit) fail("a range of more than ", kRangeLimit, " numbers");
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  interpreter.charge(numbers.size() * sizeof(Value));
  return numbers;
}

// The arguments of dict(...): another mapping or pairs, and named ones.
Dict to_dict(Interpreter& interpreter, Arguments arguments) {
  Dict dict;
  if (arguments.positional.size() > 1) fail("dict expected at most 1 argument");
  if (!arguments.positional.empty()) {
    const Value& source = arguments.positional.front();
    if (source.dict() != nullptr) {
      dict = *source.dict();
    } else {
      for (const Value& pair : *interpreter.items_of(source)) {
        const std::shared_ptr<const List> items = interpreter.items_of(pair);
        if (items->size() != 2) fail("dict: a pair with ", items->size(), " items");
        dict.set((*items)[0], (*items)[1]);
      }
    }
  }
  for (auto& [name, value] : arguments.named) dict.set(name, std::move(value));
  interpreter.charge(dict.entries().size() * sizeof(Dict::Entry));
  return dict;
}

Value strftime_now(Interpreter&, Arguments arguments) {
  const Bound bound("strftime_now", std::move(arguments), {"format"}, 1);
  const std::string format = to_string(bound[0]);
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char buffer[4096];
  // The space tells an empty result from one that does not fit.
  const size_t length = std::strftime(buffer, sizeof buffer, (format + " ").c_str(), &local);
  if (length == 0) fail("strftime_now: the result is too long");
  return std::string(buffer, length - 1);
}

Value raise_exception(Interpreter&, Arguments arguments) {
  const Bound bound("raise_exception", std::move(arguments), {"message"}, 1);
  throw RaisedException(to_string(bound[0]));
}

Value cycle(const std::shared_ptr<LoopState>& loop, const Arguments& arguments) {
  if (arguments.positional.empty()) fail("no items for cycling given");
  return arguments.positional[loop->index % arguments.positional.size()];
}

Value changed(const std::shared_ptr<LoopState>& loop, Arguments arguments) {
  const bool same = loop->was_changed &&
                    equal(Value::tuple(loop->last_changed), Value::tuple(arguments.positional));
  loop->was_changed = true;
  loop->last_changed = std::move(arguments.positional);
  return !same;
}

}  // namespace

const std::unordered_map<std::string, Value>& builtin_globals() {
  static const std::unordered_map<std::string, Value> kGlobals = {
      {"range", function("range", range)},
      {"dict", function("dict",
                        [](Interpreter& interpreter, Arguments arguments) -> Value {
                          return to_dict(interpreter, std::move(arguments));
                        })},
      {"namespace", function("namespace",
                             [](Interpreter& interpreter, Arguments arguments) {
                               return interpreter.new_namespace(
                                   to_dict(interpreter, std::move(arguments)));
                             })},
      {"strftime_now", function("strftime_now", strftime_now)},
      {"raise_exception", function("raise_exception", raise_exception)},
  };
  return kGlobals;
}

std::optional<Value> loop_attribute(const std::shared_ptr<LoopState>& loop,
                                    const std::string& name) {
  const auto index = static_cast<int64_t>(loop->index);
  const auto size = static_cast<int64_t>(loop->items->size());
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return size - index;
  if (name == "revindex0") return size - index - 1;
  if (name == "first") return index == 0;
  if (name == "last") return index + 1 == size;
  if (name == "length") return size;
  if (name == "depth") return int64_t{1};
  if (name == "depth0") return int64_t{0};
  if (name == "previtem") {
    return index > 0 ? (*loop->items)[loop->index - 1]
                     : Value::undefined("there is no previous item");
  }
  if (name == "nextitem") {
    return index + 1 < size ? (*loop->items)[loop->index + 1]
                            : Value::undefined("there is no next item");
  }
  if (name == "cycle") {
    return function("cycle",
                    [loop](Interpreter&, Arguments arguments) { return cycle(loop, arguments); });
  }
  if (name == "changed") {
    return function("changed", [loop](Interpreter&, Arguments arguments) {
      return changed(loop, std::move(arguments));
    });
  }
  return std::nullopt;
}

}  // namespace replayssm::jinja
