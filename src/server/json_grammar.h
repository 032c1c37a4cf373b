// Grammars of JSON: any object, or what a JSON Schema describes.
#pragma once

#include <memory>

#include "engine/grammar.h"
#include "server/json_fields.h"

namespace replayssm::server {

std::shared_ptr<const Grammar> any_object_grammar();

// Texts that the grammar admits satisfy the schema; not every text that satisfies it is admitted:
// objects have the properties that the schema names, in its order, and none besides. Throws
// ApiError for keywords that would demand more than that.
std::shared_ptr<const Grammar> schema_grammar(const Json& schema);

}  // namespace replayssm::server
