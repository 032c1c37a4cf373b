// The rules that all JSON is made of, added to a grammar.
#pragma once

#include <cstdint>
#include <string_view>

#include "engine/grammar.h"

namespace replayssm::server {

struct JsonRules {
  explicit JsonRules(Grammar& grammar);

  // Items between brackets, any number of them.
  int32_t list(std::string_view open, std::string_view close, int32_t item) const;

  Grammar& g;
  // `space`: nothing, a blank, or a new line with a few. `character`: one of a text.
  int32_t space = -1, character = -1, text = -1, integer = -1, number = -1;
  int32_t object = -1, array = -1, value = -1;

 private:
  void add_space();
  void add_text();
  void add_numbers();
};

// One alternative behind another.
Grammar::Alternative operator+(Grammar::Alternative a, const Grammar::Alternative& b);

}  // namespace replayssm::server
