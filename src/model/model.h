// A loaded model on one device: what the engine sees of it.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/bandwidth.h"
#include "core/memory.h"
#include "core/thread_pool.h"
#include "model/communicator.h"
#include "model/config.h"
#include "replayssm/ops.h"

namespace replayssm {

namespace cpu {
struct StateEmulation;  // ops/cpu/precision.h
}

// What a pass keeps of its tokens' hidden states, for the draft head that reads them.
enum class KeepHidden : uint8_t { kNone, kBeforeNorm, kAfterNorm };

// One forward pass: windows of new tokens of several sequences, packed. The first `decodes`
// sequences decode (window <= ring.max_window, through the ring); the others prefill (any length,
// empty ring).
struct Batch {
  // [tokens]; of a pass behind a started one, or of a recycled one of the draft head, -2 - r stands
  // for the token that row r of the pass before has given. Where that is none, what follows is
  // computed all the same, from any token.
  std::span<const int32_t> token_ids{};
  std::span<const int32_t> query_start{};  // [sequences + 1]
  std::span<const int32_t> slot{};         // [sequences]
  std::span<const int64_t> position{};     // [sequences] tokens committed before the window
  std::span<const int32_t> block_table{};  // [sequences, block_table_stride]
  int64_t block_table_stride = 0;
  int64_t decodes = 0;
  std::span<const int32_t> logit_tokens{};  // packed indices of the tokens whose logits are wanted
  // Tree windows, of decoding sequences and at most kMaxTreeWindow tokens: [tokens] the index
  // within its window of a token's parent, before it; -1 = the last committed token. Empty: chains.
  std::span<const int32_t> parent{};
  // [sequences] with StateView::snapshots: the snapshot that a window starts from, -1 = the
  // checkpoint.
  std::span<const int32_t> source{};
  bool deferred = false;  // the decoding sequences' windows await Model::commit
  KeepHidden keep_hidden = KeepHidden::kNone;

  int64_t sequences() const { return static_cast<int64_t>(slot.size()); }
};

inline constexpr int64_t kMaxTreeWindow = 64;

// What is kept of the decoding windows of a deferred pass.
struct WindowCommit {
  std::span<const int32_t> accepted{};  // [decodes] rows
  // [tokens] the rows that become the first ones, as in CompactParams; empty: they are those.
  std::span<const int32_t> path{};
};

// A pass of the draft head. The head predicts the token behind the next: its input at a position is
// the hidden state there and the token behind it. It keeps keys and values of its own, one more
// attention layer behind the model's (StateView::kv_keys), in the same blocks.
struct HeadBatch {
  // As for a forward pass. token_ids: the tokens behind the positions; slots, parents and sources
  // are not read.
  Batch batch{};
  // [tokens] where the hidden state of a position lies: a packed token of the forward pass before,
  // or, with `recycled`, a row of the logits of the head's own pass before.
  std::span<const int32_t> hidden_row{};
  bool recycled = false;
};

// How a token is drawn from a row's logits (engine/sampler.h: SamplingParams).
struct TokenDraw {
  double temperature = 0;
  double top_p = 1;
  double min_p = 0;
  int32_t top_k = 0;
  uint64_t seed = 0;
  int64_t position = 0;  // tokens before the drawn one
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  std::span<const int32_t> tokens{};  // prompt and output, which penalties look at
  int64_t prompt_length = 0;

  bool has_penalties() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
};

// What the host wants of a pass; null: not wanted.
struct PassOutput {
  float* logits = nullptr;  // [logit_tokens, vocab_size]
  // [logit_tokens] the tokens behind them; -1 where a row has no finite maximum or a NaN.
  int32_t* tokens = nullptr;
  // [logit_tokens] how those are drawn; empty: each is the likeliest, the lowest where several are.
  std::span<const TokenDraw> draws{};
};

// The largest passes that a model will be asked for.
struct PassLimits {
  int64_t tokens = 0;
  int64_t sequences = 0;
  int64_t logits = 0;
  int64_t context = 0;  // tokens of a sequence
  int64_t window = 1;   // tokens of a decoding sequence
};

// The stages of a forward pass that are timed.
enum class Stage : uint8_t { kEmbed, kNorm, kMatmul, kConv, kSsm, kAttention, kSample, kOther };

inline constexpr std::array kStages = {Stage::kEmbed,  Stage::kNorm, Stage::kMatmul,
                                       Stage::kConv,   Stage::kSsm,  Stage::kAttention,
                                       Stage::kSample, Stage::kOther};

// Time spent in the stages of forward passes, in seconds, summed since it was zeroed.
struct StageTimes {
  double embed = 0, norm = 0, matmul = 0, conv = 0, ssm = 0, attention = 0, sample = 0, other = 0;

  double& operator[](Stage stage) {
    switch (stage) {
      case Stage::kEmbed: return embed;
      case Stage::kNorm: return norm;
      case Stage::kMatmul: return matmul;
      case Stage::kConv: return conv;
      case Stage::kSsm: return ssm;
      case Stage::kAttention: return attention;
      case Stage::kSample: return sample;
      case Stage::kOther: break;
    }
    return other;
  }
};

// Where the sequences' states live, in the model's memory (engine/slot_pool.h owns it).
struct StateView {
  Route route = Route::kOutputOnly;
  RingConfig ring{};
  Cursor* cursors = nullptr;                    // [slots]
  std::span<const RecurrentState> recurrent{};  // one per recurrent layer
  std::span<void* const> conv_inputs{};  // one per recurrent layer: [slots, conv_rows, channels]
  std::span<void* const> kv_keys{};      // one per attention layer (KvShape):
  std::span<void* const> kv_values{};    // [blocks, heads, block_size, head_dim]
  int64_t kv_block_size = 0;
  // Speculation by snapshots: one per recurrent layer, [slots, ring.max_window, HV, V, K] in the
  // checkpoint's type; empty: by the ring.
  std::span<void* const> snapshots{};
  const cpu::StateEmulation* emulation = nullptr;  // of storage formats, to study them
};

class Model {
 public:
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual DType activation_dtype() const = 0;
  virtual int64_t weight_bytes() const = 0;  // as held in memory

  virtual Memory& memory() = 0;  // where the states of its sequences must lie
  // Takes the memory that passes up to these limits need. Larger ones may come all the same.
  virtual void reserve(const PassLimits& /*limits*/) {}

  // Gets ready for steps of up to so many sequences, with windows of up to `window` tokens each,
  // that keep hidden states so: the first ones take no longer then.
  virtual void prepare(const StateView& /*state*/, int64_t /*sequences*/, int64_t /*window*/,
                       KeepHidden /*keep_hidden*/) {}

  // Whether passes draw tokens; else they give the likeliest ones only.
  virtual bool draws_tokens() const { return false; }

  // Begins the step of every sequence's cursor, runs the layers and commits all windows whole, the
  // decoding ones only where the batch is not deferred. A pass that throws leaves the slots of its
  // sequences invalid.
  virtual void forward(const Batch& batch, const StateView& state, const PassOutput& output) = 0;

  // The same in two halves, for passes that give tokens alone: where the model runs behind the
  // host, start only enqueues the pass, and the tokens are there when finish returns, which waits
  // for the oldest pass.
  virtual bool runs_behind() const { return false; }
  virtual void start(const Batch& batch, const StateView& state, const PassOutput& output) {
    forward(batch, state, output);
  }
  virtual void finish() {}

  // Keeps what was accepted of the windows of the last pass, which was deferred; drops the rest.
  virtual void commit(const Batch& batch, const WindowCommit& commit, const StateView& state) = 0;

  // Most tokens of a decoding sequence's window.
  virtual int64_t longest_window() const { return kMaxTreeWindow; }

  // Whether there is a head that drafts. Passes whose hidden states it reads must keep them.
  virtual bool has_draft_head() const { return false; }
  // Logits are there when it returns; a pass that gives tokens alone is started, as by start.
  virtual void draft(const HeadBatch& /*batch*/, const StateView& /*state*/,
                     const PassOutput& /*output*/) {}

  virtual StageTimes& stage_times() = 0;
  // Devices that run ahead of the host time their stages only while asked to: it slows them down.
  virtual void time_stages(bool /*on*/) {}
};

// The recurrence of a model's state-space layers.
RecurrentShape recurrent_shape(const ModelConfig& config);
// Channels of the convolution in front of it.
int64_t conv_channels(const ModelConfig& config);

// What the attention layers keep of a token.
struct KvShape {
  int64_t layers = 0, heads = 0, head_dim = 0;
  bool values = true;  // besides the keys; else the keys serve as values
};
KvShape kv_shape(const ModelConfig& config);

// Where a model's weights come from.
struct ModelSource {
  std::filesystem::path folder;
  bool dummy_weights = false;  // random ones: the folder holds a configuration alone
  bool draft_head = false;     // the head that drafts is loaded too, where there is one
  std::function<void(int64_t, int64_t)> progress{};  // called with (done, total) layers
  // Between the ranks of a model that is cut into several; null: there is one. Outlives the model.
  Communicator* communicator = nullptr;
};

// Models on the host's cores.
std::unique_ptr<Model> load_cpu_model(const ModelSource& source, DType activation_dtype,
                                      ThreadPool& pool);

// Why no model, or not this one, can run on a CUDA device here; empty where it can.
std::string cuda_obstacle();
std::string cuda_obstacle(const ModelConfig& config);
// Of the current CUDA device, over `bytes` of its memory.
Bandwidth cuda_bandwidth(int64_t bytes);
// Models on the current CUDA device. Throws Error for an obstacle and where the weights do not fit.
std::unique_ptr<Model> load_cuda_model(const ModelSource& source, DType activation_dtype);

}  // namespace replayssm
