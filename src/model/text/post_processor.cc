#include "model/text/post_processor.h"

#include "core/check.h"

namespace replayssm::text {

PostProcessor::PostProcessor(const JsonField& root) {
  if (!root.has("post_processor")) return;
  const JsonField field = root["post_processor"];
  if (field["type"].as_string() != "Sequence") {
    read(field);
    return;
  }
  const JsonField parts = field["processors"];
  for (size_t i = 0; i < parts.size(); ++i) read(parts[i]);
}

void PostProcessor::read(const JsonField& field) {
  const std::string& type = field["type"].as_string();
  if (type == "TemplateProcessing") {
    read_template(field);
  } else if (type != "ByteLevel") {  // ByteLevel only moves offsets, which nobody asks for here
    field["type"].reject(concat("unsupported post-processor \"", type, "\""));
  }
}

void PostProcessor::read_template(const JsonField& field) {
  const JsonField pieces = field["single"];
  Template entries;
  size_t texts = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const JsonField piece = pieces[i];
    if (piece.has("Sequence")) {
      const std::string& which = piece["Sequence"]["id"].as_string();
      if (which != "A") piece["Sequence"]["id"].reject(concat("expected \"A\", got ", which));
      entries.push_back(kText);
      ++texts;
      continue;
    }
    const std::string& name = piece["SpecialToken"]["id"].as_string();
    const JsonField ids = field["special_tokens"][name]["ids"];
    for (size_t k = 0; k < ids.size(); ++k) entries.push_back(ids[k].as_id());
  }
  if (texts != 1) pieces.reject(concat("expected the text once, got it ", texts, " times"));
  templates_.push_back(std::move(entries));
}

std::vector<int32_t> PostProcessor::apply(std::vector<int32_t> ids) const {
  for (const Template& entries : templates_) {
    std::vector<int32_t> out;
    for (int32_t entry : entries) {
      if (entry == kText) {
        out.insert(out.end(), ids.begin(), ids.end());
      } else {
        out.push_back(entry);
      }
    }
    ids = std::move(out);
  }
  return ids;
}

}  // namespace replayssm::text
