// Times the decode step of the recurrence on a CUDA device, replay and conventional interleaved:
// cold L2, whole flush cycles with staggered sequences, CUDA graph, medians.
//
//   op_cuda [--batch N,N,...] [--window N,N,...] [--only TEXT] [--tree] [--tune]
//
// Columns: microseconds per layer and step, TB/s by the op's own bytes, those as a share of a pure
// read measured in the same run, and the ratio to conventional. Of windows of several tokens so
// many are accepted as an even draw from 1 .. window says. --tree makes every window a tree. --tune
// tries launch configurations.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device_benchmark.cuh"
#include "ops/cuda/recurrent.h"
#include "replay/bytes.h"
#include "replay/cursor.h"

namespace replayssm {
namespace {

struct Op {
  const char* name;
  RecurrentShape shape;
  DType checkpoint;
  bool fp8_copy = false;
};

constexpr RecurrentShape kMamba64{Family::kMamba2, 128, 8, 64, 128};
constexpr RecurrentShape kMamba80{Family::kMamba2, 96, 8, 80, 128};
constexpr RecurrentShape kGdn{Family::kGatedDelta, 32, 16, 128, 128};
constexpr RecurrentShape kKda{Family::kKimiDelta, 32, 32, 128, 128};

const Op kOps[] = {
    {"mamba2 128x64x128 fp32", kMamba64, DType::kFloat32},
    {"mamba2 128x64x128 bf16", kMamba64, DType::kBFloat16},
    {"mamba2 128x64x128 fp32+fp8", kMamba64, DType::kFloat32, true},
    {"mamba2 96x80x128 fp32", kMamba80, DType::kFloat32},
    {"mamba2 96x80x128 bf16", kMamba80, DType::kBFloat16},
    {"gdn 32x128x128 fp32", kGdn, DType::kFloat32},
    {"gdn 32x128x128 bf16", kGdn, DType::kBFloat16},
    {"gdn 32x128x128 fp32+fp8", kGdn, DType::kFloat32, true},
    {"kda 32x128x128 fp32", kKda, DType::kFloat32},
    {"kda 32x128x128 bf16", kKda, DType::kBFloat16},
};

constexpr DType kAct = DType::kBFloat16;

struct Windows {
  int32_t tokens = 1;
  bool tree = false;
};

// Layers of one op over one batch; every step of a flush cycle has its own cursors.
class Problem {
 public:
  Problem(const Op& op, int64_t batch, const Windows& windows)
      : op_(op), batch_(batch), windows_(windows), ring_{.max_window = windows.tokens} {
    const auto& s = op.shape;
    const int64_t elements = s.heads * s.head_dim * s.state_dim;
    const int64_t least = int64_t{256} << 20;  // several times the L2
    const int64_t read = batch * elements * (op.fp8_copy ? 1 : dtype_bytes(op.checkpoint));
    layers_ = std::clamp<int64_t>(least / read, 2, 64);
    const int64_t rows = batch * ring_rows(ring_.buffer_len, ring_.max_window);
    const int64_t tokens = batch * windows.tokens;
    const bool kda = s.family == Family::kKimiDelta;
    for (int64_t layer = 0; layer < layers_; ++layer) {
      RecurrentStepParams p;
      p.shape = s;
      p.state.checkpoint = memory_.random(batch * elements, op.checkpoint);
      p.state.checkpoint_dtype = op.checkpoint;
      p.state.activation_dtype = kAct;
      p.state.ring_v = memory_.random(rows * s.heads * s.head_dim, kAct);
      p.state.ring_k = memory_.random(rows * s.key_heads * s.state_dim, kAct);
      p.state.ring_b = memory_.random<float>(rows * s.heads, DType::kFloat32, 0.4f, 0.5f);
      p.state.ring_g = memory_.random<float>(rows * s.heads, DType::kFloat32, 0.1f, -0.11f);
      if (kda) p.state.ring_gate = memory_.random(rows * s.heads * s.state_dim, kAct);
      if (op.fp8_copy) {
        p.state.read_copy.data = memory_.random(batch * elements, DType::kFloat8E4M3);
        p.state.read_copy.scale =
            memory_.random<float>(batch * s.heads * s.head_dim, DType::kFloat32, 0.001f, 0.002f);
        p.state.read_copy.dtype = DType::kFloat8E4M3;
      }
      p.v_stride = s.heads * s.head_dim;
      p.k_stride = p.q_stride = s.key_heads * s.state_dim;
      p.v = memory_.random(tokens * p.v_stride, kAct);
      p.k = memory_.random(tokens * p.k_stride, kAct);
      p.q = memory_.random(tokens * p.q_stride, kAct);
      p.b = memory_.random<float>(tokens * s.heads, DType::kFloat32, 0.4f, 0.5f);
      p.g = memory_.random<float>(tokens * s.heads, DType::kFloat32, 0.1f, -0.11f);
      if (kda) {
        p.gate_stride = s.heads * s.state_dim;
        p.gate = memory_.random(tokens * p.gate_stride, kAct);
        p.channel_gate.scale = memory_.random<float>(s.heads, DType::kFloat32, 0.1f, -0.2f);
        p.channel_gate.bias = memory_.random<float>(s.heads * s.state_dim, DType::kFloat32);
      }
      p.o = memory_.take<void>(tokens * s.heads * s.head_dim * dtype_bytes(kAct));
      p.o_dtype = kAct;
      params_.push_back(p);
    }
    std::vector<int32_t> start, slot, parent;
    for (int64_t i = 0; i <= batch; ++i) start.push_back(static_cast<int32_t>(i * windows.tokens));
    for (int64_t i = 0; i < batch; ++i) slot.push_back(static_cast<int32_t>((i * 7 + 3) % batch));
    if (batch % 7 == 0)
      for (int64_t i = 0; i < batch; ++i) slot[i] = static_cast<int32_t>(i);
    // Two branches from the root on.
    for (int64_t i = 0; i < tokens; ++i)
      parent.push_back(std::max<int32_t>(-1, static_cast<int32_t>(i % windows.tokens) - 2));
    query_start_ = memory_.upload(start);
    slot_ = memory_.upload(slot);
    if (windows.tree) parent_ = memory_.upload(parent);
    simulate();
    check(cudaDeviceSynchronize());
  }

  int64_t steps_per_graph() const { return kSteps * layers_; }
  // Of one step of one layer, the mean over the graph.
  double own_bytes(Route route) const {
    return route == Route::kConventional ? conventional_bytes_ : replay_bytes_;
  }

  cudaGraphExec_t graph(Route route, const cuda::LaunchConfig* config, cudaStream_t stream) {
    const auto device = cuda::current_device();
    cudaGraph_t captured;
    cudaGraphExec_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int step = 0; step < kSteps; ++step) {
      for (auto& p : params_) {
        p.route = route;
        p.batch = batch(route, step);
        RecurrentStepParams call = p;
        if (route == Route::kConventional) call.state.read_copy = {};
        if (config) {
          cuda::recurrent_step(call, *config, stream);
        } else {
          cuda::recurrent_step(call, device, stream);
        }
      }
    }
    check(cudaStreamEndCapture(stream, &captured));
    check(cudaGraphInstantiate(&graph, captured, 0));
    check(cudaGraphDestroy(captured));
    return graph;
  }
  std::string chosen(Route route) {
    auto p = params_[0];
    p.route = route;
    p.batch = batch(route, 0);
    return cuda::to_string(cuda::choose_launch(cuda::describe(p), cuda::current_device()));
  }

 private:
  static constexpr int kSteps = 16;

  SequenceBatch batch(Route route, int step) const {
    const bool conventional = route == Route::kConventional;
    return {batch_, query_start_,
            slot_,  conventional ? no_history_ : cursors_[step],
            ring_,  conventional ? nullptr : parent_};
  }

  // Cursors as they are in the middle of long sequences that began at different times.
  void simulate() {
    std::mt19937 random(1);
    std::vector<Cursor> cursors(batch_), conventional(batch_);
    for (int64_t i = 0; i < batch_; ++i) {
      cursors[i] =
          conventional[i] = {.ring_start = 3 + 16 * (i % 5), .ring_limit = ring_.buffer_len};
      cursors[i].ring_count = static_cast<int32_t>(1 + i % ring_.buffer_len);
    }
    no_history_ = memory_.upload(conventional);
    const int warm_up = windows_.tokens == 1 ? 0 : 64;
    for (int step = -warm_up; step < kSteps; ++step) {
      for (Cursor& c : cursors) {
        begin_step(c, windows_.tokens, ring_);
        if (step >= 0) replay_bytes_ += step_bytes(c) / kSteps;
      }
      if (step >= 0) cursors_.push_back(memory_.upload(cursors));
      for (Cursor& c : cursors) commit_step(c, 1 + random() % windows_.tokens, Route::kOutputOnly);
    }
    conventional_bytes_ =
        static_cast<double>(batch_) * (2 * checkpoint_bytes(op_.shape, op_.checkpoint) + in_out());
  }
  double in_out() const {
    return windows_.tokens *
           double(token_input_bytes(op_.shape, kAct) + token_output_bytes(op_.shape, kAct));
  }
  double step_bytes(const Cursor& c) const {
    const double copy = op_.fp8_copy ? read_copy_bytes(op_.shape, DType::kFloat8E4M3) : 0;
    const double checkpoint = checkpoint_bytes(op_.shape, op_.checkpoint);
    const double state = c.fold_count > 0 ? 2 * checkpoint + copy
                         : op_.fp8_copy   ? copy
                                          : checkpoint;
    const double rows = c.fold_count + c.ring_count + windows_.tokens;
    return state + rows * ring_row_bytes(op_.shape, kAct) + in_out();
  }

  Op op_;
  int64_t batch_, layers_ = 0;
  Windows windows_;
  RingConfig ring_;
  double replay_bytes_ = 0, conventional_bytes_ = 0;
  Memory memory_;
  std::vector<RecurrentStepParams> params_;
  int32_t *query_start_ = nullptr, *slot_ = nullptr, *parent_ = nullptr;
  std::vector<Cursor*> cursors_;
  Cursor* no_history_ = nullptr;
};

int repeats(int64_t batch) { return batch >= 128 ? 7 : 15; }

void compare(const Op& op, int64_t batch, const Windows& windows, double ceiling,
             cudaStream_t stream) {
  Problem problem(op, batch, windows);
  std::vector<cudaGraphExec_t> graphs{problem.graph(Route::kConventional, nullptr, stream),
                                      problem.graph(Route::kOutputOnly, nullptr, stream)};
  const auto ms = interleaved(graphs, stream, repeats(batch));
  double us[2];
  for (int i = 0; i < 2; ++i) {
    us[i] = ms[i] * 1e3 / problem.steps_per_graph();
    check(cudaGraphExecDestroy(graphs[i]));
  }
  const auto rate = [&](Route route, double time) {
    return problem.own_bytes(route) / time * 1e-6;
  };
  const double conventional = rate(Route::kConventional, us[0]),
               replay = rate(Route::kOutputOnly, us[1]);
  std::printf("%-28s %2d %5ld %9.2f %6.2f   %9.2f %6.2f %5.1f%% %6.3f   %s\n", op.name,
              windows.tokens, batch, us[0], conventional, us[1], replay,
              100 * replay / ceiling * 1e12, us[1] / us[0],
              problem.chosen(Route::kOutputOnly).c_str());
  std::fflush(stdout);
}

void tune(const Op& op, int64_t batch, const Windows& windows, Route route, double ceiling,
          cudaStream_t stream) {
  Problem problem(op, batch, windows);
  struct Try {
    cuda::LaunchConfig config;
    double us;
  };
  std::vector<Try> tries;
  const int64_t group = op.shape.heads / op.shape.key_heads;
  for (const int heads : {1, 2, 4, 8}) {
    if (group % heads != 0) continue;
    for (const int slices : {1, 2, 4, 8, 16}) {
      if (slices > 1 && (heads > 1 || batch > 32)) continue;
      for (const int warps : {1, 2, 4}) {
        {
          const cuda::LaunchConfig config{heads, slices, warps};
          if (op.shape.head_dim % (slices * 8) != 0) continue;
          try {
            const auto graph = problem.graph(route, &config, stream);
            const double ms = interleaved({graph}, stream, 3)[0];
            tries.push_back({config, ms * 1e3 / problem.steps_per_graph()});
            check(cudaGraphExecDestroy(graph));
          } catch (const Error& error) {
            std::printf("%s: %s\n", cuda::to_string(config).c_str(), error.what());
            cudaGetLastError();
          }
        }
      }
    }
  }
  std::sort(tries.begin(), tries.end(), [](auto& a, auto& b) { return a.us < b.us; });
  std::printf("%s T %d batch %ld %s:\n", op.name, windows.tokens, batch, route_name(route));
  for (size_t i = 0; i < std::min<size_t>(tries.size(), 8); ++i)
    std::printf("   %9.2f us %5.1f%%  %s\n", tries[i].us,
                problem.own_bytes(route) / tries[i].us * 1e8 / ceiling,
                cuda::to_string(tries[i].config).c_str());
  std::fflush(stdout);
}

struct Options {
  std::vector<int64_t> batches{1, 8, 32, 128, 256}, windows{1};
  std::string only;
  bool tree = false, tune = false;
};

std::vector<int64_t> numbers(const char* text) {
  std::vector<int64_t> result;
  for (char* next = const_cast<char*>(text); *next; next += *next == ',')
    result.push_back(std::strtol(next, &next, 10));
  return result;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--tune") {
      options.tune = true;
    } else if (argument == "--tree") {
      options.tree = true;
    } else if (argument == "--only" && i + 1 < argc) {
      options.only = argv[++i];
    } else if (argument == "--batch" && i + 1 < argc) {
      options.batches = numbers(argv[++i]);
    } else if (argument == "--window" && i + 1 < argc) {
      options.windows = numbers(argv[++i]);
    } else {
      fail("op_cuda: unknown argument ", argument);
    }
  }
  return options;
}

void run(const Options& options) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  const double ceiling = read_bandwidth(stream);
  std::printf("pure read %.3f TB/s\n", ceiling * 1e-12);
  if (!options.tune)
    std::printf("%-28s %2s %5s %9s %6s   %9s %6s %6s %6s\n", "op", "T", "batch", "conv. us", "TB/s",
                "replay us", "TB/s", "share", "ratio");
  for (const Op& op : kOps) {
    if (std::string(op.name).find(options.only) == std::string::npos) continue;
    for (const int64_t tokens : options.windows) {
      const Windows windows{static_cast<int32_t>(tokens), options.tree};
      for (const int64_t batch : options.batches) {
        if (options.tune) {
          tune(op, batch, windows, Route::kOutputOnly, ceiling, stream);
          if (!op.fp8_copy && tokens == 1)
            tune(op, batch, windows, Route::kConventional, ceiling, stream);
        } else {
          compare(op, batch, windows, ceiling, stream);
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm

int main(int argc, char** argv) {
  try {
    replayssm::run(replayssm::parse(argc, argv));
  } catch (const replayssm::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
