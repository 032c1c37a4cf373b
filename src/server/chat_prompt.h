// From a conversation to a prompt.
#pragma once

#include <string>

#include "server/job.h"

namespace replayssm::server {

// Renders messages and tools of a body through the model's template. Throws ApiError.
std::string chat_prompt(const Json& body, const ServedModel& model);

}  // namespace replayssm::server
