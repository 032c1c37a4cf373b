// The engine's members; behind engine.h.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/pass_builder.h"
#include "engine/scheduler.h"
#include "engine/speculation.h"
#include "engine/state_view.h"

namespace replayssm {

// Whether a draw is all that is asked for, from logits as they are or with penalties.
bool is_plain(const SamplingParams& sampling);
// Of the token `ahead` places behind the sequence's end.
TokenDraw draw_of(const Sequence& sequence, int64_t ahead);

// A step of plain decoding that was started and whose tokens have not been read.
struct StartedPass {
  Schedule schedule;            // a window of a sequence that has gone since names none
  std::vector<int32_t> tokens;  // [windows]
};

// Options with nothing left open, and the memory that passes need taken.
EngineOptions checked(EngineOptions options, const Model& model);
MemoryPlan reserve_and_plan(Model& model, const EngineOptions& options);

struct Engine::Impl {
  using Clock = std::chrono::steady_clock;

  Impl(Model& used_model, const Tokenizer* used_tokenizer, const EngineOptions& given)
      : model(used_model),
        tokenizer(used_tokenizer),
        options(checked(given, used_model)),
        paged(used_model.config().attention_layers() > 0),
        plan(reserve_and_plan(used_model, options)),
        slots(used_model.config(), options.ring, options.state_dtype, used_model.activation_dtype(),
              static_cast<int32_t>(options.max_num_seqs), options.read_dtype, used_model.memory(),
              snapshots_of(options)),
        kv(used_model.config(), used_model.activation_dtype(), plan.kv_blocks, used_model.memory()),
        prefixes(options.prefix_cache_bytes == 0
                     ? nullptr
                     : std::make_unique<PrefixCache>(slots, paged ? &kv : nullptr,
                                                     options.prefix_cache_bytes,
                                                     options.prefix_interval, model.memory())),
        scheduler({options.max_num_seqs, options.max_num_batched_tokens, options.swap_bytes}, slots,
                  paged ? &kv : nullptr, prefixes.get()),
        tokens(options.max_num_seqs * options.ring.max_window) {
    if (options.speculative) speculation.emplace(model, options, plan, [this] { return state(); });
    model.prepare(state(), options.max_num_seqs, options.ring.max_window,
                  speculation ? speculation->keep_hidden() : KeepHidden::kNone);
  }
  ~Impl() { abandon(); }

  void check(const Request& request) const;
  void fit_drafts(const Schedule& schedule);
  void assign(const Schedule& schedule);
  PassOutput output_for(const Schedule& schedule);
  std::span<const float> logits_row(int64_t row) const;
  SampledToken choose(const Sequence& sequence, int64_t row,
                      const std::vector<SampledToken>& chosen);
  std::span<const uint8_t> allowed_next(const Sequence& sequence);
  static void constrain(Sequence& sequence, RequestOutput& output);
  std::vector<Verdict> judge_all(const Schedule& schedule);
  std::vector<RequestOutput> settle(const Schedule& schedule, std::vector<Verdict>& verdicts);
  void commit(const Schedule& schedule, const std::vector<Verdict>& verdicts);
  void draft(const Schedule& schedule, const std::vector<Verdict>& verdicts);
  std::vector<RequestOutput> conclude(const Schedule& schedule);
  std::vector<RequestOutput> step();
  void remove(int64_t request);

  // Passes behind the host (engine_behind.cc).
  bool runs_behind(const Schedule& schedule) const;
  void follow();
  void start(const Schedule& schedule);
  std::vector<RequestOutput> step_behind();
  void abandon() noexcept;

  StateView state() const { return state_view(options.route, slots, kv); }

  Model& model;
  const Tokenizer* tokenizer;
  EngineOptions options;
  bool paged;  // the model has attention layers
  MemoryPlan plan;
  SlotPool slots;
  KvPool kv;
  std::unique_ptr<PrefixCache> prefixes;
  Scheduler scheduler;
  std::optional<Speculation> speculation;
  // The pass at hand.
  PassBuilder pass;
  Batch batch;
  Clock::time_point pass_start{};  // where it is not a started one
  Array<float> logits;             // [rows, vocab], grown to the most that were wanted
  std::vector<int32_t> tokens;     // [rows]
  std::vector<TokenDraw> draws;
  std::vector<uint8_t> allowed;     // [vocab]
  bool has_tokens = false;          // it gives tokens, no logits
  std::deque<StartedPass> started;  // the oldest first; at most two
  EngineStats stats;
  int64_t next_id = 0;
};

}  // namespace replayssm
