#include "engine/speculative_config.h"

#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"
#include "model/json_text.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr const char* kFlag = "--speculative-config";
constexpr std::array<std::pair<const char*, DraftMethod>, 4> kMethods = {
    {{"ngram", DraftMethod::kNgram},
     {"suffix", DraftMethod::kSuffix},
     {"mtp", DraftMethod::kMtp},
     {"draft_model", DraftMethod::kDraftModel}}};

// Takes members out of the object by name.
class Members {
 public:
  explicit Members(const json& object) : object_(object) {}

  const json* take(const char* key) {
    taken_.insert(key);
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  void number(const char* key, int64_t least, int64_t most, int64_t& value) {
    const json* member = take(key);
    if (!member) return;
    const bool small = member->is_number_integer() &&
                       (!member->is_number_unsigned() || member->get<uint64_t>() <= INT32_MAX);
    if (!small || member->get<int64_t>() < least || member->get<int64_t>() > most)
      refuse(key, concat(least, " to ", most), *member);
    value = member->get<int64_t>();
  }
  void flag(const char* key, bool& value) {
    const json* member = take(key);
    if (!member) return;
    if (!member->is_boolean()) refuse(key, "true or false", *member);
    value = member->get<bool>();
  }
  // Sets `value` to whether the member is the second of two words.
  void choice(const char* key, const char* no, const char* yes, bool& value) {
    const json* member = take(key);
    if (!member) return;
    if (*member != no && *member != yes) refuse(key, concat(no, " or ", yes), *member);
    value = *member == yes;
  }
  void finish() const {
    for (const auto& [key, value] : object_.items()) {
      if (!taken_.contains(key)) fail(kFlag, ": unknown key ", in_quotes(key));
    }
  }
  [[noreturn]] static void refuse(const char* key, const std::string& expected, const json& got) {
    fail(kFlag, ": ", key, ": expected ", expected, ", got ", describe(got));
  }

 private:
  const json& object_;
  std::set<std::string> taken_;
};

DraftMethod read_method(Members& members) {
  const json* member = members.take("method");
  for (const auto& [name, method] : kMethods) {
    if (member && *member == name) return method;
  }
  constexpr const char* kExpected = "ngram, suffix, mtp or draft_model";
  if (!member) fail(kFlag, ": method: expected ", kExpected, ", got nothing");
  Members::refuse("method", kExpected, *member);
}

void check_combinations(const SpeculativeConfig& config) {
  const bool has_model = config.method == DraftMethod::kDraftModel;
  if (has_model == config.model.empty()) {
    fail(kFlag, ": model: expected ",
         has_model ? "the draft model" : "no such key but for draft_model", ", got ",
         has_model ? "nothing" : in_quotes(config.model));
  }
  if (config.tokens * config.tree_width > kMostDraftTokens) {
    fail(kFlag, ": num_speculative_tokens x tree_width: expected at most ", kMostDraftTokens,
         ", got ", config.tokens, " x ", config.tree_width);
  }
  if (config.lookup_min > config.lookup_max) {
    fail(kFlag, ": prompt_lookup_min: expected at most prompt_lookup_max = ", config.lookup_max,
         ", got ", config.lookup_min);
  }
  const bool lookup = config.method == DraftMethod::kNgram || config.method == DraftMethod::kSuffix;
  if (config.sampled && (lookup || config.tree_width > 1)) {
    fail(kFlag, ": draft_sample_method: expected greedy for ",
         lookup ? method_name(config.method) : "trees", ", got probabilistic");
  }
  if (has_model && config.tree_width > 1)
    fail(kFlag, ": tree_width: expected 1 for draft_model, got ", config.tree_width);
}

}  // namespace

SpeculativeConfig parse_speculative_config(std::string_view text) {
  const json object = parse_json_object(text, kFlag);
  Members members(object);
  SpeculativeConfig config;
  config.method = read_method(members);
  if (const json* model = members.take("model")) {
    if (!model->is_string()) Members::refuse("model", "a text", *model);
    config.model = model->get<std::string>();
  }
  constexpr int64_t kMostLookup = 64;
  members.number("num_speculative_tokens", 1, kMostDraftTokens, config.tokens);
  members.number("tree_width", 1, kMostDraftTokens, config.tree_width);
  members.number("prompt_lookup_max", 1, kMostLookup, config.lookup_max);
  config.lookup_min = std::min(config.lookup_min, config.lookup_max);
  members.number("prompt_lookup_min", 1, kMostLookup, config.lookup_min);
  members.flag("adaptive", config.adaptive);
  members.choice("draft_sample_method", "greedy", "probabilistic", config.sampled);
  members.choice("mtp_hidden", "after_norm", "before_norm", config.before_norm);
  members.finish();
  check_combinations(config);
  return config;
}

const char* method_name(DraftMethod method) { return kMethods[static_cast<size_t>(method)].first; }

}  // namespace replayssm
