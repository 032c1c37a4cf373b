#include "model/text/tiktoken.h"

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

#include "core/check.h"
#include "core/text_file.h"

namespace replayssm::text {
namespace {

constexpr int32_t kReserved = 256;  // special tokens behind the ordinary ones

int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// Nothing for text that is not base64 with its padding.
std::optional<std::string> decode_base64(std::string_view text) {
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size() - padding; ++i) {
    const int digit = base64_digit(text[i]);
    if (digit < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    // Digits 1, 2 and 3 of four complete a byte.
    if (i % 4 != 0) bytes.push_back(static_cast<char>(bits >> (6 - 2 * (i % 4))));
  }
  return bytes;
}

std::optional<int32_t> parse_rank(std::string_view text) {
  int32_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && rank >= 0 ? std::optional(rank) : std::nullopt;
}

}  // namespace

StringMap<int32_t> read_tiktoken(const std::filesystem::path& path) {
  const std::string file = read_text_file(path);
  StringMap<int32_t> ranks;
  std::unordered_set<int32_t> seen;
  int64_t number = 0;
  for (size_t at = 0; at < file.size();) {
    const size_t end = std::min(file.find('\n', at), file.size());
    std::string_view line = std::string_view(file).substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = std::min(line.find(' '), line.size());
    std::optional<std::string> bytes = decode_base64(line.substr(0, space));
    const auto rank = parse_rank(line.substr(std::min(space + 1, line.size())));
    if (!bytes || !rank) {
      fail(path.string(), ": line ", number, ": expected a token in base64, a space and its rank");
    }
    if (!seen.insert(*rank).second) {
      fail(path.string(), ": line ", number, ": the rank ", *rank, " is there twice");
    }
    if (!ranks.emplace(*std::move(bytes), *rank).second) {
      fail(path.string(), ": line ", number, ": the token is there twice");
    }
  }
  for (const auto& [bytes, rank] : ranks) {
    if (rank < static_cast<int32_t>(ranks.size())) continue;
    fail(path.string(), ": expected ranks from 0 to ", ranks.size() - 1, ", got ", rank);
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (!ranks.contains(std::string(1, static_cast<char>(byte)))) {
      fail(path.string(), ": expected a token for every single byte, got none for byte ", byte);
    }
  }
  return ranks;
}

std::vector<AddedToken> read_reserved_tokens(const JsonField& config, int32_t first) {
  if (config.has("tokenizer_class") &&
      config["tokenizer_class"].as_string() != "TikTokenTokenizer") {
    config["tokenizer_class"].reject(
        concat("expected \"TikTokenTokenizer\" beside tiktoken.model, got \"",
               config["tokenizer_class"].as_string(), "\""));
  }
  std::vector<AddedToken> tokens(kReserved);
  for (int32_t i = 0; i < kReserved; ++i) {
    AddedToken& token = tokens[static_cast<size_t>(i)];
    token.id = first + i;
    token.content = token.normalized_content = concat("<|reserved_token_", token.id, "|>");
    token.special = true;
  }
  if (!config.has("added_tokens_decoder")) return tokens;
  const JsonField named = config["added_tokens_decoder"];
  if (!named.value().is_object()) named.reject("expected an object of ids and tokens");
  for (const auto& [key, value] : named.value().items()) {
    const JsonField entry = named[key];
    const std::optional<int32_t> id = parse_rank(key);
    if (!id || *id < first || *id >= first + kReserved) {
      entry.reject(concat("expected ids from ", first, " to ", first + kReserved - 1));
    }
    AddedToken& token = tokens[static_cast<size_t>(*id - first)];
    token.content = token.normalized_content = entry["content"].as_string();
    token.special = entry.flag("special", true);
  }
  return tokens;
}

Regex kimi_pattern() {
  // A class without Han characters is a look ahead and the class.
  const std::string upper = R"((?:(?!\p{sc:Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]))";
  const std::string lower = R"((?:(?!\p{sc:Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}]))";
  const std::string before = R"([^\r\n\p{L}\p{N}]?)";
  const std::string contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
  return Regex::from_oniguruma(
      concat(R"(\p{sc:Han}+)", "|", before, upper, "*", lower, "+", contraction, "|", before, upper,
             "+", lower, "*", contraction,
             R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"));
}

}  // namespace replayssm::text
