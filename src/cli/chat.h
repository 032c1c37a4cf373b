// One turn of a conversation as a model expects it.
#pragma once

#include <filesystem>
#include <string>

namespace replayssm::cli {

// `user` (and `system`, where not empty) through the model's chat template, up to where the answer
// begins. Throws Error for a model without a template.
std::string chat_prompt(const std::filesystem::path& folder, const std::string& system,
                        const std::string& user);

}  // namespace replayssm::cli
