#include "cli/generate.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "cli/chat.h"
#include "cli/setup.h"
#include "core/check.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"

namespace replayssm::cli {
namespace {

// Prints the outputs in the order of the prompts: the first unfinished one as it grows, the others
// when their turn comes.
class Printer {
 public:
  // `end` follows every output.
  Printer(size_t outputs, std::string end)
      : pending_(outputs), finished_(outputs, false), end_(std::move(end)) {}

  void add(size_t output, const std::string& text, bool finished) {
    pending_[output] += text;
    finished_[output] = finished;
    while (current_ < pending_.size()) {
      print(std::exchange(pending_[current_], {}));
      if (!finished_[current_]) return;
      print(end_);
      ++current_;
    }
  }

 private:
  std::vector<std::string> pending_;
  std::vector<bool> finished_;
  std::string end_;
  size_t current_ = 0;
};

// Steps that read prompts and steps that only decode, timed apart.
struct Timing {
  double prefill_seconds = 0, decode_seconds = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;

  void add(double seconds, int64_t prefilled, int64_t decoded) {
    prefill_tokens += prefilled;
    if (prefilled > 0) {
      prefill_seconds += seconds;
    } else {
      decode_seconds += seconds;
      decode_tokens += decoded;
    }
  }
};

double rate(int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

std::string json_line(const RequestOutput& output, const Tokenizer& tokenizer) {
  const auto entry = [&](int32_t id, float logprob) {
    return nlohmann::ordered_json{
        {"id", id}, {"token", tokenizer.token_bytes(id)}, {"logprob", logprob}};
  };
  const SampledToken& token = output.token;
  nlohmann::ordered_json line{{"prompt", output.request}};
  line.update(entry(token.id, token.logprob));
  line["top"] = nlohmann::ordered_json::array();
  for (const auto& [id, logprob] : token.top_logprobs) line["top"].push_back(entry(id, logprob));
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::vector<std::vector<int32_t>> read_prompts(const GenerateOptions& options,
                                               const std::filesystem::path& folder,
                                               const Tokenizer& tokenizer) {
  std::vector<std::string> texts = options.prompts;
  if (texts.empty()) texts.push_back(read_text(options.prompt_file, "--prompt-file"));
  std::vector<std::vector<int32_t>> prompts;
  prompts.reserve(texts.size());
  for (const std::string& text : texts) {
    prompts.push_back(options.chat
                          ? tokenizer.encode(chat_prompt(folder, options.system, text), false)
                          : tokenizer.encode(text));
  }
  if (options.prompts.empty() && options.prompt_file == "-" && prompts.front().empty())
    fail("prompt: expected --prompt, --prompt-file or text on standard input, got none");
  return prompts;
}

Timing run(Engine& engine, const GenerateOptions& options, const Tokenizer& tokenizer,
           Printer& printer) {
  Timing timing;
  while (!engine.idle()) {
    const EngineStats before = engine.stats();
    const auto start = std::chrono::steady_clock::now();
    const std::vector<RequestOutput> outputs = engine.step();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    timing.add(took.count(), engine.stats().prefill_tokens - before.prefill_tokens,
               engine.stats().decode_tokens - before.decode_tokens);
    for (const RequestOutput& output : outputs) {
      const bool logprobs = options.sampling.logprobs >= 0;
      printer.add(static_cast<size_t>(output.request),
                  logprobs ? json_line(output, tokenizer) : output.text,
                  output.finish != FinishReason::kNone);
    }
  }
  return timing;
}

void report(const SpeculationStats& stats) {
  std::string positions;
  for (const double share : stats.accepted_shares()) positions += fmt::format(" {:.3f}", share);
  spdlog::info("drafts: {:.2f} tokens per window; accepted by position{}", stats.mean_length(),
               positions.empty() ? " -" : positions);
}

}  // namespace

void generate(const GenerateOptions& options) {
  validate(options.sampling);
  const std::filesystem::path folder = find_model(options.model);
  const Tokenizer tokenizer(folder);
  const auto prompts = read_prompts(options, folder, tokenizer);
  const LoadedModel loaded = load_model(folder, options);
  Engine engine(*loaded.model, &tokenizer, engine_options(options, loaded));
  if (engine.memory_plan().total > 0) spdlog::info(to_string(engine.memory_plan()));
  for (const std::vector<int32_t>& prompt : prompts) {
    engine.add({.prompt = prompt,
                .sampling = options.sampling,
                .max_tokens = options.max_tokens,
                .ignore_eos = options.ignore_eos,
                .stop_ids = options.stop_ids,
                .stop = options.stop});
  }
  Printer printer(prompts.size(), options.sampling.logprobs < 0 ? "\n" : "");
  const Timing timing = run(engine, options, tokenizer, printer);
  spdlog::info("prompt {} tokens, prefill {:.1f} tokens/s; decode {} tokens, {:.1f} tokens/s",
               timing.prefill_tokens, rate(timing.prefill_tokens, timing.prefill_seconds),
               timing.decode_tokens, rate(timing.decode_tokens, timing.decode_seconds));
  if (options.speculation.config) report(engine.stats().speculation);
}

}  // namespace replayssm::cli
