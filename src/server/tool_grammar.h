// Grammars of tool calls, for requests that demand one.
#pragma once

#include <memory>

#include "engine/grammar.h"
#include "server/json_fields.h"
#include "server/tool_calls.h"

namespace replayssm::server {

// One call of one of `tools`, a list of OpenAI's; with `several`, one or more. Arguments satisfy
// the tool's parameters, as far as json_grammar.h has it; of tools that are not strict, keywords
// that it cannot enforce are passed over.
std::shared_ptr<const Grammar> tool_grammar(const Json& tools, ToolNotation notation, bool several);

}  // namespace replayssm::server
