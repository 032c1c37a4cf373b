// The tokenizer files of Kimi: byte-pair ranks in tiktoken.model, special tokens in
// tokenizer_config.json. How text is cut into pieces is in neither.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "model/text/added_tokens.h"
#include "model/text/bpe.h"
#include "model/text/json_field.h"
#include "model/text/regex.h"

namespace replayssm::text {

// Ids by bytes: a line per token, its bytes in base64 and its rank, which is its id. Throws Error
// naming file and line for anything malformed or repeated, and for single bytes that are missing.
StringMap<int32_t> read_tiktoken(const std::filesystem::path& path);

// The special tokens behind `first` ordinary ones: those that added_tokens_decoder names, the
// others reserved.
std::vector<AddedToken> read_reserved_tokens(const JsonField& config, int32_t first);

// Runs of Han characters; words with their case, up to an English contraction; up to three digits;
// punctuation; white space.
Regex kimi_pattern();

}  // namespace replayssm::text
