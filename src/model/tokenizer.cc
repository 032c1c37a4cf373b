#include "model/tokenizer.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "core/check.h"
#include "model/text/added_tokens.h"
#include "model/text/bpe.h"
#include "model/text/byte_alphabet.h"
#include "model/text/json_field.h"
#include "model/text/normalizer.h"
#include "model/text/post_processor.h"
#include "model/text/pre_tokenizer.h"
#include "model/text/tiktoken.h"
#include "model/text/utf8.h"

namespace replayssm {
namespace {

using text::AddedToken;
using text::AddedTokenMatcher;
using text::JsonField;
using text::Piece;

// Whether the file normalizes to NFC. Throws Error for any other normalizer.
bool reads_nfc(const JsonField& root) {
  if (!root.has("normalizer")) return false;
  const auto check = [](const JsonField& field) {
    const std::string& type = field["type"].as_string();
    if (type != "NFC") field["type"].reject(concat("unsupported normalizer \"", type, "\""));
  };
  const JsonField field = root["normalizer"];
  if (field["type"].as_string() != "Sequence") {
    check(field);
    return true;
  }
  const JsonField parts = field["normalizers"];
  for (size_t i = 0; i < parts.size(); ++i) check(parts[i]);
  return parts.size() > 0;
}

void check_decoder(const JsonField& root) {
  if (!root.has("decoder")) {
    root.reject("decoder: expected a ByteLevel decoder, got none");
  }
  const JsonField field = root["decoder"];
  const auto check = [](const JsonField& decoder) {
    const std::string& type = decoder["type"].as_string();
    if (type != "ByteLevel") decoder["type"].reject(concat("unsupported decoder \"", type, "\""));
  };
  if (field["type"].as_string() != "Sequence") return check(field);
  const JsonField parts = field["decoders"];
  if (parts.size() != 1) parts.reject("expected one ByteLevel decoder");
  check(parts[0]);
}

void check_version(const JsonField& root) {
  if (root.has("version") && root["version"].as_string() != "1.0") {
    root["version"].reject(concat("expected \"1.0\", got \"", root["version"].as_string(), "\""));
  }
}

// Added tokens by content in the order of the file. As in the tokenizers library an id is the
// vocabulary's, or else the next free one; of two entries with one content the later counts.
std::vector<AddedToken> read_added_tokens(const JsonField& root, bool nfc,
                                          const text::StringMap<int32_t>& vocabulary) {
  std::vector<AddedToken> tokens;
  if (!root.has("added_tokens")) return tokens;
  const JsonField field = root["added_tokens"];
  std::unordered_map<std::string, size_t> known;
  auto next_id = static_cast<int32_t>(vocabulary.size());
  for (size_t i = 0; i < field.size(); ++i) {
    const JsonField entry = field[i];
    AddedToken token;
    token.content = entry["content"].as_string();
    entry["id"].as_id();
    if (token.content.empty()) continue;
    token.special = entry.flag("special", false);
    token.left_strip = entry.flag("lstrip", false);
    token.right_strip = entry.flag("rstrip", false);
    token.single_word = entry.flag("single_word", false);
    token.normalized = entry.flag("normalized", true);
    token.normalized_content =
        token.normalized && nfc ? text::normalize_nfc(token.content) : token.content;
    const auto [place, added] = known.emplace(token.content, tokens.size());
    if (!added) {
      token.id = tokens[place->second].id;
      tokens[place->second] = std::move(token);
      continue;
    }
    const auto in_model = vocabulary.find(token.content);
    token.id = in_model != vocabulary.end() ? in_model->second : next_id++;
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace

struct Tokenizer::Impl {
  struct Token {
    std::string bytes;
    bool special = false;
  };

  explicit Impl(const JsonField& root);                           // tokenizer.json
  Impl(text::StringMap<int32_t> ranks, const JsonField& config);  // tiktoken.model

  void list_tokens();
  void encode_text(std::string_view piece, text::PreTokenizer::Session& session,
                   std::vector<int32_t>& ids) const;

  bool nfc;
  text::Bpe bpe;
  text::PreTokenizer pre_tokenizer;
  text::PostProcessor post_processor;
  std::vector<AddedToken> added;
  AddedTokenMatcher raw_matcher;
  AddedTokenMatcher normalized_matcher;
  std::unordered_map<int32_t, Token> tokens;
  int64_t size = 0;
};

Tokenizer::Impl::Impl(const JsonField& root)
    : nfc(reads_nfc(root)),
      bpe(root["model"]),
      pre_tokenizer(root["pre_tokenizer"]),
      post_processor(root),
      added(read_added_tokens(root, nfc, bpe.vocabulary())),
      raw_matcher(added, false, root),
      normalized_matcher(added, true, root) {
  check_version(root);
  check_decoder(root);
  list_tokens();
}

Tokenizer::Impl::Impl(text::StringMap<int32_t> ranks, const JsonField& config)
    : nfc(false),
      bpe(std::move(ranks)),
      pre_tokenizer(text::kimi_pattern()),
      added(text::read_reserved_tokens(config, static_cast<int32_t>(bpe.vocabulary().size()))),
      raw_matcher(added, false, config),
      normalized_matcher(added, true, config) {
  list_tokens();
}

void Tokenizer::Impl::list_tokens() {
  std::unordered_set<std::string_view> special;
  for (const AddedToken& token : added) {
    if (token.special) special.insert(token.content);
  }
  const auto set = [&](int32_t id, const std::string& content) {
    std::optional<std::string> bytes = text::spelled_bytes(content);
    tokens[id] = {bytes ? *std::move(bytes) : content, special.contains(content)};
    size = std::max<int64_t>(size, int64_t{id} + 1);
  };
  tokens.reserve(bpe.vocabulary().size() + added.size());
  for (const auto& [content, id] : bpe.vocabulary()) set(id, content);
  for (const AddedToken& token : added) set(token.id, token.normalized_content);
}

void Tokenizer::Impl::encode_text(std::string_view piece, text::PreTokenizer::Session& session,
                                  std::vector<int32_t>& ids) const {
  const std::string normalized = nfc ? text::normalize_nfc(piece) : std::string(piece);
  std::vector<Piece> pieces;
  normalized_matcher.split(normalized, pieces);
  for (const Piece& part : pieces) {
    if (part.id >= 0) {
      ids.push_back(part.id);
      continue;
    }
    for (std::string_view word : session.split(part.text)) bpe.encode(word, ids);
  }
}

Tokenizer::Tokenizer(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tokenizer.json", ranks = folder / "tiktoken.model";
  std::error_code error;
  if (!std::filesystem::exists(path, error) && std::filesystem::exists(ranks, error)) {
    const std::filesystem::path config = folder / "tokenizer_config.json";
    const nlohmann::json root = text::parse_json_file(config);
    impl_ =
        std::make_unique<Impl>(text::read_tiktoken(ranks), JsonField(root, config.string() + ": "));
    return;
  }
  const nlohmann::json root = text::parse_json_file(path);
  impl_ = std::make_unique<Impl>(JsonField(root, path.string() + ": "));
}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  const std::string valid = text::to_valid_utf8(text);
  std::vector<Piece> pieces;
  impl_->raw_matcher.split(valid, pieces);
  text::PreTokenizer::Session session(impl_->pre_tokenizer);
  std::vector<int32_t> ids;
  for (const Piece& piece : pieces) {
    if (piece.id >= 0) {
      ids.push_back(piece.id);
    } else {
      impl_->encode_text(piece.text, session, ids);
    }
  }
  return add_special_tokens ? impl_->post_processor.apply(std::move(ids)) : ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string bytes;
  for (int32_t id : ids) {
    if (!(skip_special_tokens && is_special(id))) bytes += token_bytes(id);
  }
  return text::to_valid_utf8(bytes);
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  const auto found = impl_->tokens.find(id);
  return found == impl_->tokens.end() ? std::string_view() : found->second.bytes;
}

bool Tokenizer::is_special(int32_t id) const {
  const auto found = impl_->tokens.find(id);
  return found != impl_->tokens.end() && found->second.special;
}

std::optional<int32_t> Tokenizer::token_id(std::string_view token) const {
  for (const AddedToken& added : impl_->added) {
    if (added.content == token) return added.id;
  }
  const auto found = impl_->bpe.vocabulary().find(token);
  if (found == impl_->bpe.vocabulary().end()) return std::nullopt;
  return found->second;
}

int64_t Tokenizer::size() const { return impl_->size; }

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens)
    : tokenizer_(&tokenizer), skip_special_tokens_(skip_special_tokens) {}

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_tokens_ && tokenizer_->is_special(id)) return {};
  pending_ += tokenizer_->token_bytes(id);
  const size_t complete = text::complete_utf8_prefix(pending_);
  std::string out = text::to_valid_utf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return out;
}

std::string StreamDecoder::flush() {
  std::string out = text::to_valid_utf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace replayssm
