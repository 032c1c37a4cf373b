// Grammars of JSON: any object, or what a JSON Schema describes.
#pragma once

#include <memory>
#include <string>

#include "engine/grammar.h"
#include "server/json_fields.h"
#include "server/json_rules.h"

namespace replayssm::server {

std::shared_ptr<const Grammar> any_object_grammar();

// Texts that the grammar admits satisfy the schema; not every text that satisfies it is admitted:
// objects have the properties that the schema names, in its order, and none besides. Throws
// ApiError for keywords that would demand more than that.
std::shared_ptr<const Grammar> schema_grammar(const Json& schema);

// Where a schema comes from.
struct SchemaUse {
  std::string param;   // of the request, for errors
  bool strict = true;  // else keywords that cannot be enforced are passed over
};
// The rule of what a schema describes, added to the grammar of `json`; its references lead into
// `root`.
int32_t add_schema(const JsonRules& json, const Json& schema, const Json& root,
                   const SchemaUse& use);
// Throws ApiError where so many elements more would make a grammar too large.
void check_room(const Grammar& grammar, size_t elements, const std::string& param);
// Throws ApiError where schemas were added that lead to themselves.
void check_schemas(const Grammar& grammar, const std::string& param);

}  // namespace replayssm::server
