// The values that templates compute with: Python's, as far as Jinja shows them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace replayssm::jinja {

class Value;
class Interpreter;
struct Arguments;
class Dict;

using List = std::vector<Value>;

// A name or member that does not exist. It prints as nothing; using it is an error with this text.
struct Undefined {
  std::shared_ptr<const std::string> message;
};

struct None {};

struct Tuple {
  std::shared_ptr<const List> items;
};

// What Python's generators are: walking it takes the items away.
struct Generator {
  List items;
};

// Attributes that `set` may change.
struct Namespace {
  std::unique_ptr<Dict> attributes;
};

// A function, a bound method, or a macro.
struct Callable {
  std::string name;  // as it prints
  std::function<Value(Interpreter&, Arguments)> call;
};

// The variable `loop`.
struct LoopState;

class Value {
 public:
  using Variant =
      std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const std::string>,
                   std::shared_ptr<const List>, Tuple, std::shared_ptr<const Dict>,
                   std::shared_ptr<Generator>, std::shared_ptr<Namespace>,
                   std::shared_ptr<const Callable>, std::shared_ptr<LoopState>>;

  Value() = default;
  Value(bool value) : variant_(value) {}
  Value(int64_t value) : variant_(value) {}
  Value(double value) : variant_(value) {}
  Value(std::string text) : variant_(std::make_shared<const std::string>(std::move(text))) {}
  Value(const char* text) : Value(std::string(text)) {}
  Value(List items) : variant_(std::make_shared<const List>(std::move(items))) {}
  Value(Dict dict);
  explicit Value(Undefined value) : variant_(std::move(value)) {}
  explicit Value(None value) : variant_(value) {}
  explicit Value(Tuple value) : variant_(std::move(value)) {}
  explicit Value(std::shared_ptr<Generator> value) : variant_(std::move(value)) {}
  explicit Value(std::shared_ptr<Namespace> value) : variant_(std::move(value)) {}
  explicit Value(std::shared_ptr<const Callable> value) : variant_(std::move(value)) {}
  explicit Value(std::shared_ptr<LoopState> value) : variant_(std::move(value)) {}

  static Value none() { return Value(None{}); }
  static Value undefined(std::string message);
  static Value tuple(List items);
  static Value generator(List items);

  template <class T>
  const T* get() const {
    return std::get_if<T>(&variant_);
  }
  template <class T>
  bool is() const {
    return std::holds_alternative<T>(variant_);
  }

  // Null when the value is of another type.
  const std::string* string() const;
  const List* list() const;
  const List* tuple() const;
  const List* sequence() const;  // of a list or a tuple
  const Dict* dict() const;

  bool is_undefined() const { return is<Undefined>(); }
  bool is_none() const { return is<None>(); }
  bool is_number() const { return is<bool>() || is<int64_t>() || is<double>(); }
  bool is_integral() const { return is<bool>() || is<int64_t>(); }

  const Variant& variant() const { return variant_; }

 private:
  Variant variant_;
};

// The items that a value consists of, kept alive.
class Items {
 public:
  explicit Items(std::shared_ptr<const List> list) : list_(std::move(list)) {}

  auto begin() const { return list_->begin(); }
  auto end() const { return list_->end(); }
  size_t size() const { return list_->size(); }
  bool empty() const { return list_->empty(); }
  const Value& operator[](size_t index) const { return (*list_)[index]; }
  const List& list() const { return *list_; }

 private:
  std::shared_ptr<const List> list_;
};

// Entries in the order of insertion.
class Dict {
 public:
  using Entry = std::pair<Value, Value>;

  // Throws Error for a key that cannot be hashed.
  void set(Value key, Value value);
  const Value* find(const Value& key) const;  // null also for a key that cannot be hashed
  const Value* find_text(std::string_view key) const;
  const std::vector<Entry>& entries() const { return entries_; }
  void clear();

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> index_;  // by hash_key
};

// Equal for values that Python holds to be equal as keys. Nothing for what it cannot hash.
std::optional<std::string> hash_key(const Value& value);

struct Arguments {
  List positional;
  std::vector<std::pair<std::string, Value>> named;
};

struct LoopState {
  Items items;
  size_t index = 0;
  List last_changed = {};  // arguments of the last loop.changed(...)
  bool was_changed = false;
};

// The name of the type as Python has it.
const char* type_name(const Value& value);

bool is_true(const Value& value);
bool equal(const Value& left, const Value& right);
// Negative, 0 or positive. Throws Error for values that have no order.
int compare(const Value& left, const Value& right, const char* operation);

// str() and repr().
std::string to_string(const Value& value);
std::string to_repr(const Value& value);
std::string repr_of_string(std::string_view text);
std::string repr_of_double(double value);

// As a template's variable. Text that is not UTF-8 gets U+FFFD.
Value from_json(const nlohmann::ordered_json& json);

}  // namespace replayssm::jinja
