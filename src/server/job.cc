#include "server/job.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <random>

#include "replayssm/error.h"
#include "server/api_error.h"
#include "server/chat_prompt.h"
#include "server/json_grammar.h"
#include "server/tool_grammar.h"

namespace replayssm::server {
namespace {

constexpr int64_t kMostChoices = 128;  // of all prompts of a request
constexpr int64_t kMostLogprobs = 20;
constexpr int64_t kMostStops = 16;
constexpr size_t kLongestStop = 1024;  // every choice keeps its own copy
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

std::vector<int32_t> ids_of(const Json& list, const std::string& name, int64_t vocab) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<double>() < 0 ||
        id.get<double>() >= static_cast<double>(vocab)) {
      bad_field(name, "expected token ids from 0 to ", vocab - 1);
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

bool is_ids(const Json& value) {
  return value.is_array() && !value.empty() && value.front().is_number();
}

using Ids = std::vector<int32_t>;

Ids prompt_of(const Json& value, const ServedModel& model, bool special) {
  if (value.is_string())
    return model.tokenizer->encode(value.get_ref<const std::string&>(), special);
  if (!is_ids(value)) bad_field("prompt", "expected a text, token ids, or a list of either");
  return ids_of(value, "prompt", model.vocab_size);
}

std::string echo_of(const Json& value, const Ids& ids, const ServedModel& model) {
  return value.is_string() ? value.get<std::string>() : model.tokenizer->decode(ids);
}

std::vector<const Json*> prompts_of(const Json& body) {
  const Fields fields(body);
  const Json* value = fields.find("prompt");
  if (!value) bad_field("prompt", "expected a text, token ids, or a list of either");
  if (!value->is_array() || is_ids(*value)) return {value};
  if (value->empty() || std::ssize(*value) > kMostChoices) {
    bad_field("prompt", "expected 1 to ", kMostChoices, " prompts, got ", value->size());
  }
  std::vector<const Json*> prompts;
  for (const Json& prompt : *value) prompts.push_back(&prompt);
  return prompts;
}

std::vector<std::string> stops_of(const Fields& fields) {
  const Json* stop = fields.find("stop");
  if (!stop) return {};
  const auto fits = [](const Json& text) {
    return text.is_string() && text.get_ref<const std::string&>().size() <= kLongestStop;
  };
  if (fits(*stop)) return {stop->get<std::string>()};
  if (!stop->is_array() || std::ssize(*stop) > kMostStops || !std::ranges::all_of(*stop, fits)) {
    bad_field("stop", "expected a text or a list of at most ", kMostStops,
              " texts, each of at most ", kLongestStop, " bytes");
  }
  return stop->get<std::vector<std::string>>();
}

std::vector<std::pair<int32_t, float>> bias_of(const Fields& fields, int64_t vocab) {
  std::vector<std::pair<int32_t, float>> biases;
  const Json* object = fields.object("logit_bias");
  if (!object) return biases;
  for (const auto& [key, value] : object->items()) {
    int32_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= vocab) {
      bad_field("logit_bias", "expected token ids from 0 to ", vocab - 1, " as names");
    }
    if (!value.is_number() || !(std::abs(value.get<double>()) <= 100)) {
      bad_field("logit_bias", "expected numbers from -100 to 100");
    }
    biases.emplace_back(id, value.get<float>());
  }
  return biases;
}

SamplingParams sampling_of(const Fields& fields, int64_t vocab) {
  SamplingParams params;
  params.temperature = fields.number("temperature", 0, 2).value_or(1);
  params.top_p = fields.number("top_p", 0, 1).value_or(1);
  if (params.top_p == 0) params.top_k = 1;
  if (params.top_p == 0) params.top_p = 1;
  params.min_p = fields.number("min_p", 0, 1).value_or(0);
  const auto top_k = fields.integer("top_k", -1, kMostTokens).value_or(params.top_k);
  params.top_k = static_cast<int32_t>(std::max<int64_t>(top_k, 0));
  params.presence_penalty = fields.number("presence_penalty", -2, 2).value_or(0);
  params.frequency_penalty = fields.number("frequency_penalty", -2, 2).value_or(0);
  params.repetition_penalty = fields.number("repetition_penalty", 0.01, 100).value_or(1);
  params.logit_bias = bias_of(fields, vocab);
  constexpr int64_t kMostSeed = std::numeric_limits<int64_t>::max();
  if (const auto seed = fields.integer("seed", -kMostSeed, kMostSeed)) {
    params.seed = static_cast<uint64_t>(*seed);
  } else {
    std::random_device random;
    params.seed = (uint64_t{random()} << 32) | random();
  }
  return params;
}

// What both kinds of requests have in common.
Request request_of(const Fields& fields, const ServedModel& model, int64_t default_tokens) {
  Request request;
  request.sampling = sampling_of(fields, model.vocab_size);
  request.stop = stops_of(fields);
  request.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  if (const Json* ids = fields.find("stop_token_ids")) {
    if (!ids->is_array()) bad_field("stop_token_ids", "expected a list of token ids");
    request.stop_ids = ids_of(*ids, "stop_token_ids", model.vocab_size);
  }
  request.max_tokens = fields.integer("max_tokens", 1, kMostTokens).value_or(default_tokens);
  request.max_tokens =
      fields.integer("max_completion_tokens", 1, kMostTokens).value_or(request.max_tokens);
  request.priority = fields.integer("priority", -1000, 1000).value_or(0);
  return request;
}

// Of {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": ...}}.
std::shared_ptr<const Grammar> grammar_of(const Json& format) {
  const Fields fields(format, "response_format.");
  const auto type = fields.text("type").value_or("text");
  if (type == "text") return nullptr;
  if (type == "json_object") return any_object_grammar();
  if (type != "json_schema") {
    bad_field("response_format.type", "expected text, json_object or json_schema, got ",
              type.substr(0, 100));
  }
  const Json* named = fields.object("json_schema");
  const Json* schema =
      named ? Fields(*named, "response_format.json_schema.").object("schema") : nullptr;
  if (!schema) bad_field("response_format.json_schema", "expected an object with a schema");
  return schema_grammar(*schema);
}

void read_common(const Fields& fields, Job& job) {
  job.stream = fields.boolean("stream").value_or(false);
  if (const Json* options = fields.object("stream_options")) {
    if (!job.stream) bad_field("stream_options", "expected only with stream");
    job.include_usage =
        Fields(*options, "stream_options.").boolean("include_usage").value_or(false);
  }
  job.n = fields.integer("n", 1, kMostChoices).value_or(1);
  job.best_of = fields.integer("best_of", 1, kMostChoices).value_or(job.n);
  if (job.best_of < job.n) bad_field("best_of", "expected at least n = ", job.n);
  if (job.stream && job.best_of > job.n) bad_field("best_of", "expected n where stream is set");
  if (const Json* format = fields.object("response_format")) job.grammar = grammar_of(*format);
}

// The tools of which one has to be called, as tool_choice says; none where none has to be.
std::optional<Json> forced_tools(const Fields& fields) {
  const Json* choice = fields.find("tool_choice");
  if (!choice || *choice == "none" || *choice == "auto") return {};
  const bool any = *choice == "required";
  std::optional<std::string> name;
  if (choice->is_object()) {
    const Json* function = Fields(*choice, "tool_choice.").object("function");
    if (function) name = Fields(*function, "tool_choice.function.").text("name");
  }
  if (!any && !name) {
    bad_field("tool_choice", "expected none, auto, required, or ",
              R"({"type": "function", "function": {"name": ...}})");
  }
  Json forced = Json::array();
  if (const Json* tools = fields.find("tools")) {
    for (const Json& tool : *tools) {
      if (any || tool["function"]["name"] == *name) forced.push_back(tool);
    }
  }
  if (forced.empty()) {
    bad_field("tool_choice", "expected ",
              any ? "tools to choose from" : "the name of one of tools");
  }
  return forced;
}

// Adds the requests of a prompt: best_of draws with seeds of their own.
void add_requests(Request request, Ids prompt, const ServedModel& model, Job& job) {
  request.prompt = std::move(prompt);
  job.prompt_tokens += std::ssize(request.prompt);
  if (job.best_of > job.n && request.sampling.logprobs < 0) request.sampling.logprobs = 0;
  try {
    model.engine->check(request);
  } catch (const Error& error) {
    const std::string what = error.what();
    const std::string param = what.substr(0, what.find(':'));
    const bool length = param == "prompt" && what.find(" tokens") != std::string::npos;
    throw ApiError(400, what, param, length ? "context_length_exceeded" : "");
  }
  const auto vocabulary = std::shared_future(model.vocabulary);
  for (int64_t i = 0; i < job.best_of; ++i) {
    job.requests.push_back(request);
    job.requests.back().sampling.seed += static_cast<uint64_t>(i);
    if (job.grammar) {
      job.requests.back().constraint =
          std::make_shared<GrammarConstraint>(job.grammar, vocabulary.get(), *model.tokenizer);
    }
  }
}

}  // namespace

void check_model(const Json& body, const ServedModel& model) {
  const auto name = Fields(body).text("model");
  if (name && *name != model.name) {
    throw ApiError(404,
                   concat("model: expected ", model.name, ", the one that is served, got ",
                          name->substr(0, 100)),
                   "model", "model_not_found");
  }
}

Job completion_job(const Json& body, const ServedModel& model) {
  check_model(body, model);
  const Fields fields(body);
  Job job;
  read_common(fields, job);
  constexpr int64_t kDefaultTokens = 16;
  Request request = request_of(fields, model, kDefaultTokens);
  const bool echo = fields.boolean("echo").value_or(false);
  if (const auto count = fields.integer("logprobs", 0, kMostLogprobs)) {
    job.logprobs = true;
    request.sampling.logprobs = static_cast<int32_t>(*count);
    if (echo) bad_field("echo", "expected false where logprobs are wanted");
  }
  if (!fields.text("suffix").value_or("").empty()) {
    bad_field("suffix", "expected none: models here only write on");
  }
  const bool special = fields.boolean("add_special_tokens").value_or(true);
  for (const Json* prompt : prompts_of(body)) {
    Ids ids = prompt_of(*prompt, model, special);
    if (echo) job.prompts.push_back(echo_of(*prompt, ids, model));
    add_requests(request, std::move(ids), model, job);
    if (std::ssize(job.requests) > kMostChoices) {
      bad_field("n", "expected at most ", kMostChoices, " choices of all prompts together");
    }
  }
  return job;
}

Job chat_job(const Json& body, const ServedModel& model) {
  check_model(body, model);
  const Fields fields(body);
  Job job;
  job.chat = true;
  read_common(fields, job);
  Request request = request_of(fields, model, kMostTokens);
  job.logprobs = fields.boolean("logprobs").value_or(false);
  const auto top = fields.integer("top_logprobs", 0, kMostLogprobs);
  if (top && !job.logprobs) bad_field("top_logprobs", "expected only with logprobs");
  if (job.logprobs) request.sampling.logprobs = static_cast<int32_t>(top.value_or(0));
  const Json* tools = fields.find("tools");
  const Json* choice = fields.find("tool_choice");
  Ids ids = model.tokenizer->encode(chat_prompt(body, model), false);
  job.tools = tools && !tools->empty() && (!choice || *choice != "none");
  const bool several = fields.boolean("parallel_tool_calls").value_or(true);
  if (const auto forced = forced_tools(fields)) {  // then there is no text to have a format
    job.grammar = tool_grammar(*forced, model.tool_notation, several && choice->is_string());
  } else if (job.grammar && job.tools) {
    const auto calls = tool_grammar(*tools, model.tool_notation, several);
    job.grammar = std::make_shared<Grammar>(either(*job.grammar, *calls));
  }
  add_requests(std::move(request), std::move(ids), model, job);
  return job;
}

std::vector<int32_t> tokenize(const Json& body, const ServedModel& model) {
  check_model(body, model);
  if (body.contains("messages")) return model.tokenizer->encode(chat_prompt(body, model), false);
  const Fields fields(body);
  const auto text = fields.text("prompt");
  if (!text) bad_field("prompt", "expected a text");
  return model.tokenizer->encode(*text, fields.boolean("add_special_tokens").value_or(true));
}

std::string detokenize(const Json& body, const ServedModel& model) {
  check_model(body, model);
  const Json* tokens = Fields(body).find("tokens");
  if (!tokens || !tokens->is_array()) bad_field("tokens", "expected a list of token ids");
  return model.tokenizer->decode(ids_of(*tokens, "tokens", model.vocab_size), false);
}

}  // namespace replayssm::server
