// Adds a model's own tokens around an encoded text.
#pragma once

#include <cstdint>
#include <vector>

#include "model/text/json_field.h"

namespace replayssm::text {

class PostProcessor {
 public:
  PostProcessor() = default;  // adds none
  // `root` is tokenizer.json; its member post_processor may be null or missing.
  explicit PostProcessor(const JsonField& root);

  std::vector<int32_t> apply(std::vector<int32_t> ids) const;

 private:
  // Token ids, or the text itself where kText stands.
  using Template = std::vector<int32_t>;
  static constexpr int32_t kText = -1;

  void read(const JsonField& field);
  void read_template(const JsonField& field);

  std::vector<Template> templates_;
};

}  // namespace replayssm::text
