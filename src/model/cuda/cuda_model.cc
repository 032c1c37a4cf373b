// A model on a CUDA device.

#include <algorithm>
#include <bit>

#include "core/check.h"
#include "model/cuda/cuda_backend.h"
#include "model/cuda/graphs.h"
#include "model/cuda/pass_results.h"
#include "model/cuda/step_arrays.h"
#include "model/layer_stack.h"
#include "ops/cuda/bandwidth.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/cursors.h"
#include "ops/cuda/sampling.h"
#include "ops/cuda/step_layout.h"

namespace replayssm {
namespace {

// Decoding batches are filled up to a few sizes, each with a graph of its own.
int64_t bucket_of(int64_t sequences) {
  const int64_t unit = sequences <= 4 ? 1 : sequences <= 64 ? 8 : sequences <= 256 ? 16 : 32;
  return (sequences + unit - 1) / unit * unit;
}

// Tables grow in few steps, since a graph holds their stride.
int64_t stride_of(int64_t blocks) {
  constexpr uint64_t kLeast = 64;
  return blocks == 0
             ? 0
             : static_cast<int64_t>(std::bit_ceil(std::max(static_cast<uint64_t>(blocks), kLeast)));
}

// Room for the tokens that penalties look at, in few steps as well.
int64_t history_of(std::span<const TokenDraw> draws) {
  constexpr uint64_t kLeast = 1024;
  uint64_t longest = 0;
  for (const TokenDraw& draw : draws)
    if (draw.has_penalties()) longest = std::max<uint64_t>(longest, draw.tokens.size());
  return longest == 0 ? 0 : static_cast<int64_t>(std::bit_ceil(std::max(longest, kLeast)));
}

// Room for a batch: of one that only decodes, a little more, so that similar ones are alike; any
// windows count as of the length expected.
PassPlaces places_of(const Batch& batch, int64_t expected_window) {
  const int64_t sequences = batch.sequences();
  PassPlaces places{.tokens = std::ssize(batch.token_ids),
                    .sequences = sequences,
                    .logits = std::ssize(batch.logit_tokens),
                    .block_table_stride = stride_of(batch.block_table_stride),
                    .deferred = batch.deferred,
                    .trees = !batch.parent.empty(),
                    .keep_hidden = batch.keep_hidden};
  for (int64_t s = 0; s < batch.decodes; ++s) {
    places.window =
        std::max<int64_t>(places.window, batch.query_start[s + 1] - batch.query_start[s]);
  }
  if (batch.decodes < sequences) return places;
  if (places.window > 1) places.window = std::max(places.window, expected_window);
  places.tokens = bucket_of(places.tokens);
  places.sequences = bucket_of(sequences);
  places.logits = bucket_of(places.logits);
  return places;
}

class CudaModel final : public Model {
 public:
  CudaModel(ModelConfig config, ModelWeights weights, DType dtype, const ModelSource& source)
      : config_(std::move(config)),
        backend_(config_, dtype),
        context_(config_, backend_, source.communicator),
        layers_(std::move(weights), context_, source.draft_head, source.progress),
        arrays_(backend_.device_memory()),
        logits_(backend_.memory()),
        tokens_(backend_.memory()),
        sampling_(backend_.memory()),
        commit_host_(pinned_),
        commit_(backend_.memory()) {
    config_.draft_attention_layers = layers_.has_draft_head() ? 1 : 0;
    backend_.stream().synchronize();
  }

  const ModelConfig& config() const override { return config_; }
  DType activation_dtype() const override { return backend_.dtype(); }
  StageTimes& stage_times() override { return times_; }
  bool draws_tokens() const override { return true; }
  bool runs_behind() const override { return !backend_.clock().on(); }
  void time_stages(bool on) override { backend_.clock().turn(on); }
  int64_t weight_bytes() const override { return layers_.weight_bytes(); }
  Memory& memory() override { return backend_.memory(); }

  void reserve(const PassLimits& limits) override;
  void prepare(const StateView& state, int64_t sequences, int64_t window,
               KeepHidden keep_hidden) override;
  void forward(const Batch& batch, const StateView& state, const PassOutput& output) override;
  void start(const Batch& batch, const StateView& state, const PassOutput& output) override;
  void finish() override { results_.finish(); }
  void commit(const Batch& batch, const WindowCommit& commit, const StateView& state) override;
  int64_t longest_window() const override {
    return config_.recurrent_layers() > 0 ? cuda::kMaxWindow : kMaxTreeWindow;
  }
  bool has_draft_head() const override { return layers_.has_draft_head(); }
  void draft(const HeadBatch& head, const StateView& state, const PassOutput& output) override;

 private:
  // Enqueues a pass: captured or replayed where it is a step.
  void run(const Batch& batch, std::span<const TokenDraw> draws, const StateView& state,
           const PassPlaces& places, std::span<const int32_t> hidden_row = {});
  void enqueue(const PassPlaces& places);
  void enqueue_draft(const PassPlaces& places);
  void choose();
  void conclude(int64_t rows, const PassOutput& output);
  void reserve_outputs(int64_t rows);

  cudaStream_t stream() const { return backend_.stream().get(); }

  ModelConfig config_;
  cuda::PinnedMemory pinned_;
  CudaBackend backend_;
  Context context_;
  LayerStack layers_;
  StepArrays arrays_;
  Graphs graphs_;
  Scratch<float> logits_;    // [logits, vocab]
  Scratch<int32_t> tokens_;  // [logits]
  Scratch<std::byte> sampling_;
  PassResults results_;
  int64_t drawn_ = 0;   // tokens of the last pass
  int64_t window_ = 1;  // of decoding sequences, as reserved
  Scratch<int32_t> commit_host_, commit_;
  StageTimes times_;
};

void CudaModel::reserve_outputs(int64_t rows) {
  logits_.get(rows * config_.vocab_size);
  tokens_.get(rows);
  sampling_.get(cuda::sample_workspace_bytes(rows, config_.vocab_size, true));
}

// A pass over padding alone takes all scratch memory that depends on the number of tokens.
void CudaModel::reserve(const PassLimits& limits) {
  window_ = limits.window;
  const int64_t sequences = bucket_of(limits.sequences);
  const int64_t windows = bucket_of(limits.sequences * limits.window);
  const int64_t tokens = std::max(limits.tokens, windows);
  const int64_t logits = bucket_of(std::max(limits.logits, windows));
  constexpr int64_t kBlock = 32;  // the least that a block holds
  const int64_t stride = stride_of((limits.context + kBlock - 1) / kBlock);
  arrays_.reserve(
      {.tokens = tokens, .sequences = sequences, .logits = logits, .block_table_stride = stride});
  reserve_outputs(logits);
  backend_.reserve_attention({.tokens = tokens,
                              .sequences = sequences,
                              .context = stride * kBlock,
                              .window = limits.window});
  commit_host_.get(2 * sequences + windows);
  commit_.get(2 * sequences + windows);
  const int32_t start = 0;
  arrays_.assign({.query_start = {&start, 1}}, {}, {.tokens = tokens, .logits = logits}, stream());
  const std::vector<RecurrentState> recurrent(static_cast<size_t>(config_.recurrent_layers()));
  const std::vector<void*> absent(
      static_cast<size_t>(std::max(config_.recurrent_layers(), kv_shape(config_).layers)));
  const StateView state{.recurrent = recurrent,
                        .conv_inputs = absent,
                        .kv_keys = absent,
                        .kv_values = absent,
                        .kv_block_size = kBlock};
  context_.arrays = arrays_.arrays();
  context_.arrays.block_size = kBlock;
  context_.state = &state;
  const bool drafts = layers_.has_draft_head();
  layers_.run(context_, drafts ? KeepHidden::kAfterNorm : KeepHidden::kNone, logits_.get(0));
  if (drafts) layers_.run_draft(context_, false, logits_.get(0));
  backend_.stream().synchronize();
}

// The tokens of a pass's logits.
void CudaModel::choose() {
  const PassArrays& a = context_.arrays;
  if (a.logits == 0) return;
  const StageTimer timer(context_, Stage::kSample);
  cuda::sample({.logits = {logits_.get(0), config_.vocab_size, DType::kFloat32},
                .rows = a.logits,
                .vocab = config_.vocab_size,
                .sampling = arrays_.sampling(),
                .position = arrays_.drawn_position(),
                .history = arrays_.history(),
                .token = tokens_.get(0),
                .workspace = sampling_.get(0)},
               stream());
}

void CudaModel::enqueue(const PassPlaces& places) {
  PassArrays& a = context_.arrays;
  a.plan = a.decodes == a.sequences ? arrays_.plan() : nullptr;
  const StateView& state = *context_.state;
  SequenceBatch batch{.sequences = a.sequences,
                      .query_start = a.query_start,
                      .slot = a.slot,
                      .cursors = state.cursors,
                      .ring = state.ring,
                      .plan = a.plan};
  cuda::begin_steps(batch, state.cursors, stream());
  layers_.run(context_, places.keep_hidden, logits_.get(0));
  choose();
  batch.sequences = a.decodes;
  if (a.decodes > 0 && !places.deferred)
    cuda::commit_steps(batch, arrays_.windows(), state.route, state.cursors, stream());
  if (a.decodes == a.sequences) return;
  batch.sequences = a.sequences - a.decodes;
  batch.query_start += a.decodes;
  batch.slot += a.decodes;
  cuda::commit_prefills(batch, state.cursors, stream());
}

void CudaModel::enqueue_draft(const PassPlaces& places) {
  layers_.run_draft(context_, places.kind == PassKind::kDraftOfDraft, logits_.get(0));
  choose();
}

// Passes of padding alone choose the products' algorithms and are captured.
void CudaModel::prepare(const StateView& state, int64_t sequences, int64_t window,
                        KeepHidden keep_hidden) {
  const int32_t start = 0;
  Batch empty;
  empty.query_start = {&start, 1};
  const auto run_twice = [&](const PassPlaces& places) {
    for (int pass = 0; pass < 2; ++pass) {
      run(empty, {}, state, places);
      backend_.stream().synchronize();
    }
  };
  const int64_t most = bucket_of(sequences);
  for (int64_t tokens = 1; tokens <= bucket_of(sequences * window);
       tokens = bucket_of(tokens + 1)) {
    const bool windows = tokens > most;
    PassPlaces places{.tokens = tokens,
                      .sequences = std::min(tokens, most),
                      .logits = tokens,
                      .block_table_stride = stride_of(state.kv_keys.empty() ? 0 : 1),
                      .window = windows ? window : 1,
                      .deferred = windows,
                      .sources = !state.snapshots.empty(),
                      .keep_hidden = keep_hidden};
    run_twice(places);
    if (window == 1 || !layers_.has_draft_head()) continue;
    places.logits = places.sequences;
    places.deferred = false;
    places.sources = false;
    places.keep_hidden = KeepHidden::kNone;
    places.kind = PassKind::kDraft;
    run_twice(places);
    if (windows) continue;
    places.kind = PassKind::kDraftOfDraft;
    run_twice(places);
  }
}

void CudaModel::run(const Batch& batch, std::span<const TokenDraw> draws, const StateView& state,
                    const PassPlaces& places, std::span<const int32_t> hidden_row) {
  // The pass behind it finds its tokens where they are: it has no more places.
  reserve_outputs(bucket_of(places.logits));
  arrays_.assign(batch, draws, places, stream(), hidden_row);
  context_.arrays = arrays_.arrays();
  context_.arrays.block_size = state.kv_block_size;
  context_.arrays.drawn = tokens_.get(0);
  context_.state = &state;
  const auto pass = [&](size_t number) {
    backend_.clock().begin_pass(number);
    places.kind == PassKind::kForward ? enqueue(places) : enqueue_draft(places);
  };
  // A pass without prompts comes again.
  if (context_.arrays.decodes < places.sequences) return pass(0);
  const PassKey key = pass_key(places, state, backend_.clock().on());
  backend_.clock().replay_pass(1 + graphs_.run(key, backend_.device_memory().releases(), stream(),
                                               [&](size_t number) { pass(1 + number); }));
}

void CudaModel::start(const Batch& batch, const StateView& state, const PassOutput& output) {
  check_pass(batch, state, config_, drawn_);
  if (state.emulation) fail("emulated storage formats: expected device cpu, got cuda");
  const int64_t rows = std::ssize(batch.logit_tokens);
  if (!batch.token_ids.empty()) {
    PassPlaces places = places_of(batch, window_);
    places.draws = !output.draws.empty();
    places.history = history_of(output.draws);
    places.sources = !state.snapshots.empty();
    run(batch, output.draws, state, places);
    drawn_ = rows;
  }
  results_.enqueue(tokens_.get(0), output.tokens ? rows : 0, output.tokens, stream());
}

void CudaModel::forward(const Batch& batch, const StateView& state, const PassOutput& output) {
  start(batch, state, output);
  while (!results_.empty()) results_.finish();
  if (!batch.token_ids.empty()) conclude(std::ssize(batch.logit_tokens), output);
}

// Waits for the last pass, where its logits or the times of its stages are wanted.
void CudaModel::conclude(int64_t rows, const PassOutput& output) {
  if (rows > 0 && output.logits) {
    backend_.memory().read(output.logits, logits_.get(0),
                           rows * config_.vocab_size * static_cast<int64_t>(sizeof(float)));
  }
  if (!backend_.clock().on()) return;
  backend_.stream().synchronize();
  backend_.clock().add_to(times_);
}

void CudaModel::commit(const Batch& batch, const WindowCommit& commit, const StateView& state) {
  const int64_t sequences = batch.decodes, tokens = std::ssize(commit.path);
  REPLAYSSM_CHECK(std::ssize(commit.accepted) == sequences, "accepted=", commit.accepted.size());
  // [sequences] accepted, [sequences] slots, [tokens] path
  const int64_t count = 2 * sequences + tokens;
  int32_t *host = commit_host_.get(count), *accepted = commit_.get(count);
  int32_t* slots = std::ranges::copy(commit.accepted, host).out;
  std::ranges::copy(commit.path, std::ranges::copy(batch.slot.first(sequences), slots).out);
  cuda::check_cuda(cudaMemcpyAsync(accepted, host, static_cast<size_t>(count) * sizeof(int32_t),
                                   cudaMemcpyHostToDevice, stream()),
                   "accepted tokens");
  if (tokens > 0) {
    arrays_.assign(batch, {}, places_of(batch, window_), stream());
    context_.arrays = arrays_.arrays();
    context_.arrays.decodes = sequences;
    context_.state = &state;
    compact_windows(context_, accepted + 2 * sequences, accepted);
  }
  cuda::commit_steps({.sequences = sequences,
                      .slot = accepted + sequences,
                      .cursors = state.cursors,
                      .ring = state.ring},
                     accepted, state.route, state.cursors, stream());
}

void CudaModel::draft(const HeadBatch& head, const StateView& state, const PassOutput& output) {
  if (head.batch.token_ids.empty()) return;
  PassPlaces places = places_of(head.batch, window_);
  places.kind = head.recycled ? PassKind::kDraftOfDraft : PassKind::kDraft;
  run(head.batch, output.draws, state, places, head.hidden_row);
  const int64_t rows = std::ssize(head.batch.logit_tokens);
  if (!output.logits)
    results_.enqueue(tokens_.get(0), output.tokens ? rows : 0, output.tokens, stream());
  drawn_ = 0;
  conclude(rows, output);
}

// What of the model the kernels do not compute.
std::string shape_obstacle(const ModelConfig& config) {
  const KvShape kv = kv_shape(config);
  constexpr std::array kHeadDims = {64, 80, 96, 128, 192, 256, 576};
  if (kv.layers > 0 && std::ranges::count(kHeadDims, kv.head_dim) == 0) {
    return concat("the model's attention heads have ", kv.head_dim,
                  " columns, the kernels compute 64, 80, 96, 128, 192, 256 and 576");
  }
  return {};
}

}  // namespace

Bandwidth cuda_bandwidth(int64_t bytes) { return cuda::measure_bandwidth(bytes); }

std::string cuda_obstacle() { return cuda::device_obstacle(); }

std::string cuda_obstacle(const ModelConfig& config) {
  const std::string obstacle = cuda_obstacle();
  return obstacle.empty() ? shape_obstacle(config) : obstacle;
}

std::unique_ptr<Model> load_cuda_model(const ModelSource& source, DType activation_dtype) {
  ModelConfig config = load_config(source.folder);
  if (const std::string obstacle = cuda_obstacle(config); !obstacle.empty())
    fail("device cuda: ", obstacle);
  ModelWeights weights = read_weights(source, config);
  return std::make_unique<CudaModel>(std::move(config), std::move(weights), activation_dtype,
                                     source);
}

}  // namespace replayssm
