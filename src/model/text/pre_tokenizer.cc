#include "model/text/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace replayssm::text {
namespace {

constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Span {
  size_t begin, end;
  bool is_match;
};

// The matches of a non-empty `text` and what lies between them. An empty match is kept unless it
// touches the end of the match before it.
std::vector<Span> find_spans(std::string_view text, Regex::Matcher& matcher) {
  std::vector<Span> spans;
  size_t done = 0;
  std::optional<size_t> last_match_end;
  for (size_t at = 0; at <= text.size();) {
    const std::optional<Regex::Match> match = matcher.search(text, at);
    if (!match) break;
    if (match->begin == match->end && last_match_end == match->end) {
      do ++at;
      while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
      continue;
    }
    if (done != match->begin) spans.push_back({done, match->begin, false});
    spans.push_back({match->begin, match->end, true});
    done = at = match->end;
    last_match_end = at;
  }
  if (done != text.size()) spans.push_back({done, text.size(), false});
  return spans;
}

// Joins each span that `joins(is_match, previous_is_match)` picks to the span before it.
template <class Joins>
std::vector<Span> join(const std::vector<Span>& spans, Joins joins) {
  std::vector<Span> out;
  bool previous = false;
  for (const Span& span : spans) {
    if (joins(span.is_match, previous) && !out.empty()) {
      out.back().begin = std::min(out.back().begin, span.begin);
      out.back().end = std::max(out.back().end, span.end);
    } else {
      out.push_back(span);
    }
    previous = span.is_match;
  }
  return out;
}

std::vector<Span> apply(SplitBehavior behavior, std::vector<Span> spans) {
  const auto lone_match = [](bool match, bool previous) { return match && !previous; };
  switch (behavior) {
    case SplitBehavior::kIsolated: return spans;
    case SplitBehavior::kRemoved:
      std::erase_if(spans, [](const Span& span) { return span.is_match; });
      return spans;
    case SplitBehavior::kContiguous:
      return join(spans, [](bool match, bool previous) { return match == previous; });
    case SplitBehavior::kMergedWithPrevious: return join(spans, lone_match);
    case SplitBehavior::kMergedWithNext:
      std::reverse(spans.begin(), spans.end());
      spans = join(spans, lone_match);
      std::reverse(spans.begin(), spans.end());
      return spans;
  }
  fail("split behavior ", static_cast<int>(behavior), " is not known");
}

SplitBehavior read_behavior(const JsonField& field) {
  constexpr std::pair<const char*, SplitBehavior> kBehaviors[] = {
      {"Isolated", SplitBehavior::kIsolated},
      {"Removed", SplitBehavior::kRemoved},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous},
  };
  for (const auto& [name, behavior] : kBehaviors) {
    if (field.as_string() == name) return behavior;
  }
  field.reject(concat("unknown behavior \"", field.as_string(), "\""));
}

// Compiles with the place in the file in front of any error.
template <class Compile>
Regex compile_at(const JsonField& field, Compile compile) {
  try {
    return compile(field.as_string());
  } catch (const Error& error) {
    field.reject(error.what());
  }
}

}  // namespace

PreTokenizer::PreTokenizer(const JsonField& field) {
  if (!field.value().is_object()) {
    field.reject("expected a ByteLevel pre-tokenizer, or a Sequence that ends in one");
  }
  read(field);
  if (!is_byte_level_) field.reject("expected a ByteLevel step: only byte-level BPE is supported");
}

PreTokenizer::PreTokenizer(Regex pattern) : is_byte_level_(true) {
  steps_.push_back({std::move(pattern), SplitBehavior::kIsolated});
}

void PreTokenizer::read(const JsonField& field) {
  const std::string& type = field["type"].as_string();
  if (is_byte_level_) field.reject(concat("unsupported \"", type, "\" after ByteLevel"));
  if (type == "Sequence") {
    const JsonField parts = field["pretokenizers"];
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i]["type"].as_string() == "Sequence") {
        parts[i].reject("unsupported Sequence in a Sequence");
      }
      read(parts[i]);
    }
  } else if (type == "Split") {
    read_split(field);
  } else if (type == "ByteLevel") {
    read_byte_level(field);
  } else if (type == "Digits") {
    const bool individual = field.flag("individual_digits", false);
    steps_.push_back({Regex::from_oniguruma(R"(\p{N})"),
                      individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous});
  } else {
    field["type"].reject(concat("unsupported pre-tokenizer \"", type, "\""));
  }
}

void PreTokenizer::read_split(const JsonField& field) {
  const JsonField pattern = field["pattern"];
  Step step;
  if (pattern.has("Regex")) {
    step.pattern = compile_at(pattern["Regex"], Regex::from_oniguruma);
  } else if (pattern.has("String")) {
    step.pattern = compile_at(pattern["String"], Regex::from_literal);
  } else {
    pattern.reject("expected a member \"Regex\" or \"String\"");
  }
  step.behavior = read_behavior(field["behavior"]);
  step.invert = field.flag("invert", false);
  steps_.push_back(std::move(step));
}

void PreTokenizer::read_byte_level(const JsonField& field) {
  Step step;
  step.add_prefix_space = field.flag("add_prefix_space", true);
  if (field.flag("use_regex", true)) step.pattern = Regex::from_oniguruma(kGpt2Pattern);
  steps_.push_back(std::move(step));
  is_byte_level_ = true;
}

PreTokenizer::Session::Session(const PreTokenizer& pre_tokenizer) : pre_tokenizer_(&pre_tokenizer) {
  for (const Step& step : pre_tokenizer.steps_) {
    matchers_.push_back(step.pattern ? std::optional<Regex::Matcher>(*step.pattern) : std::nullopt);
  }
}

std::vector<std::string_view> PreTokenizer::Session::split(std::string_view text) {
  std::vector<std::string_view> pieces = {text};
  std::vector<std::string_view> next;
  for (size_t i = 0; i < matchers_.size(); ++i) {
    const Step& step = pre_tokenizer_->steps_[i];
    next.clear();
    for (std::string_view piece : pieces) {
      if (piece.empty()) continue;
      if (step.add_prefix_space && !piece.starts_with(' ')) {
        piece = prefixed_.emplace_back(concat(" ", piece));
      }
      if (!matchers_[i]) {
        next.push_back(piece);
        continue;
      }
      std::vector<Span> spans = find_spans(piece, *matchers_[i]);
      if (step.invert) {
        for (Span& span : spans) span.is_match = !span.is_match;
      }
      for (const Span& span : apply(step.behavior, std::move(spans))) {
        if (span.begin != span.end) next.push_back(piece.substr(span.begin, span.end - span.begin));
      }
    }
    pieces.swap(next);
  }
  return pieces;
}

}  // namespace replayssm::text
