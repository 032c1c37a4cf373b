// Runs a template. One interpreter renders once.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/jinja/ast.h"
#include "model/jinja/value.h"

namespace replayssm::jinja {

class Interpreter {
 public:
  // `variables` are the template's globals.
  explicit Interpreter(const Dict& variables);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  std::string render(const Body& body);

  Value call(const Value& callee, Arguments arguments);
  Value apply_filter(const std::string& name, Value input, Arguments arguments);
  bool apply_test(const std::string& name, Value input, Arguments arguments);

  // object.name: methods first. object[index]: entries first.
  Value attribute(const Value& object, const std::string& name);
  Value item(const Value& object, const Value& index);

  // What a for loop sees. Throws Error for values that cannot be walked; empties a generator.
  std::shared_ptr<const List> items_of(const Value& value);

  Value new_namespace(Dict attributes);

  // Counts what a template produces: throws Error when it is more than any chat needs.
  void charge(size_t bytes);

 private:
  enum class Flow { kNext, kBreak, kContinue };

  // The variables of a block, inside of those of the blocks around it.
  struct Frame {
    std::shared_ptr<Frame> outer;
    std::unordered_map<std::string, Value> variables;
    bool captured = false;  // by a macro
  };
  class FrameGuard;
  class DepthGuard {  // counts steps and the depth of recursion, and throws Error beyond a limit
   public:
    DepthGuard(Interpreter& interpreter, int cost);
    ~DepthGuard() { interpreter_.depth_ -= cost_; }
    DepthGuard(const DepthGuard&) = delete;
    DepthGuard& operator=(const DepthGuard&) = delete;

   private:
    Interpreter& interpreter_;
    int cost_;
  };

  Flow run(const Body& body);
  Flow run(const Statement& statement);
  Flow run(const Text& node);
  Flow run(const Print& node);
  Flow run(const If& node);
  Flow run(const For& node);
  Flow run(const Set& node);
  Flow run(const SetBlock& node);
  Flow run(const Macro& node);
  Flow run(const CallBlock& node);
  Flow run(const FilterBlock& node);
  Flow run(const With& node);
  Flow run(const Scope& node);
  Flow run(const Break&) { return Flow::kBreak; }
  Flow run(const Continue&) { return Flow::kContinue; }

  Value evaluate(const Expression& expression);
  Value evaluate(const Constant& node) { return node.value; }
  Value evaluate(const Name& node);
  Value evaluate(const ListLiteral& node);
  Value evaluate(const TupleLiteral& node);
  Value evaluate(const DictLiteral& node);
  Value evaluate(const Unary& node);
  Value evaluate(const Binary& node);
  Value evaluate(const Logical& node);
  Value evaluate(const Comparison& node);
  Value evaluate(const Conditional& node);
  Value evaluate(const Attribute& node);
  Value evaluate(const Item& node);
  Value evaluate(const Slice& node);
  Value evaluate(const Call& node);
  Value evaluate(const Filter& node);
  Value evaluate(const Test& node);

  void write(std::string_view text);
  void assign(const Expression& target, const Value& value);
  std::string capture(const Body& body);
  Value apply_filters(const Expression& chain, Value input);
  std::shared_ptr<const List> loop_items(const For& node);
  Arguments evaluate_arguments(const CallArguments& arguments);
  List evaluate_all(const std::vector<ExpressionPtr>& expressions);
  Value slice(const Value& object, const Slice& node);
  Value make_macro(const Macro& node);
  Value call_macro(const Macro& node, const std::shared_ptr<Frame>& closure, Arguments arguments);
  void bind_parameters(const Macro& node, Arguments& arguments);

  std::unordered_map<std::string, Value> globals_;
  std::shared_ptr<Frame> frame_;
  std::string* out_ = nullptr;
  Position position_;  // of what is being evaluated, for errors
  int depth_ = 0;
  int64_t steps_ = 0;
  size_t produced_ = 0;
  // Frames that macros refer to, and namespaces: these can form cycles, which the end breaks.
  std::vector<std::shared_ptr<Frame>> captured_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
};

}  // namespace replayssm::jinja
