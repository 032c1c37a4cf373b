// Byte-level BPE as published in tokenizer.json, or in Kimi's tiktoken.model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace replayssm {

class Tokenizer {
 public:
  // Reads folder/tokenizer.json; where there is none, folder/tiktoken.model and the special tokens
  // of folder/tokenizer_config.json. Throws Error naming the file and what is malformed or
  // unsupported.
  explicit Tokenizer(const std::filesystem::path& folder);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Token ids of `text`; special tokens written out in it are recognised. With `add_special_tokens`
  // the file's post-processor adds its own (a begin-of-sequence token, say). Invalid UTF-8 is read
  // as U+FFFD.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens = true) const;

  // The text of `ids`; invalid UTF-8 becomes U+FFFD. Unknown ids are left out.
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = true) const;

  // Bytes that one token stands for (not necessarily whole characters); empty for unknown ids.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const;
  std::optional<int32_t> token_id(std::string_view token) const;  // by its literal text
  int64_t size() const;                                           // largest id + 1

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Turns a stream of tokens into text without ever emitting part of a character.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens = true);

  // Text that became complete with `id`; the concatenation of all pushes and the final flush()
  // equals Tokenizer::decode of all ids.
  std::string push(int32_t id);
  std::string flush();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  std::string pending_;
};

}  // namespace replayssm
