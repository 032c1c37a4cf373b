// Times the decode step of the recurrence on a CUDA device, replay and conventional interleaved:
// cold L2, whole flush cycles with staggered sequences, CUDA graph, medians.
//
//   op_cuda [--batch N,N,...] [--only TEXT] [--tune]
//
// Columns: microseconds per layer and step, TB/s by the op's own bytes, those as a share of a pure
// read measured in the same run, and the ratio to conventional. --tune tries launch configurations.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "device_benchmark.cuh"
#include "ops/cuda/recurrent.h"
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

// Bytes of one step of one layer, the mean over a flush cycle of windows of one token.
double own_bytes(const Op& op, Route route, int64_t batch, int buffer_len) {
  const auto& s = op.shape;
  const double act = dtype_bytes(kAct), elements = double(s.heads * s.head_dim * s.state_dim);
  const double checkpoint = elements * dtype_bytes(op.checkpoint);
  const double gates =
      s.family == Family::kKimiDelta ? s.heads * (4.0 + s.state_dim * act) : s.heads * 8.0;
  const double values = s.heads * s.head_dim * act, keys = s.key_heads * s.state_dim * act;
  const double row = values + keys + gates, in_out = row + keys + values;
  if (route == Route::kConventional) return batch * (2 * checkpoint + in_out);
  const double cycle = buffer_len, rows_read = (cycle - 1) / 2 + 1;
  const double copy = op.fp8_copy ? elements + s.heads * s.head_dim * 4.0 : 0;
  const double read = op.fp8_copy ? copy : checkpoint;
  return batch * (read * (cycle - 1) / cycle + (2 * checkpoint + copy) / cycle +
                  (rows_read + 1) * row + in_out);
}

// Layers of one op over one batch; every step of a flush cycle has its own cursors.
class Problem {
 public:
  Problem(const Op& op, int64_t batch, int buffer_len)
      : op_(op), batch_(batch), ring_{.buffer_len = buffer_len, .max_window = 1} {
    const auto& s = op.shape;
    const int64_t elements = s.heads * s.head_dim * s.state_dim;
    const int64_t least = int64_t{256} << 20;  // several times the L2
    const int64_t read = batch * elements * (op.fp8_copy ? 1 : dtype_bytes(op.checkpoint));
    layers_ = std::clamp<int64_t>(least / read, 2, 64);
    const int64_t rows = batch * ring_rows(buffer_len, 1);
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
      p.v = memory_.random(batch * p.v_stride, kAct);
      p.k = memory_.random(batch * p.k_stride, kAct);
      p.q = memory_.random(batch * p.q_stride, kAct);
      p.b = memory_.random<float>(batch * s.heads, DType::kFloat32, 0.4f, 0.5f);
      p.g = memory_.random<float>(batch * s.heads, DType::kFloat32, 0.1f, -0.11f);
      if (kda) {
        p.gate_stride = s.heads * s.state_dim;
        p.gate = memory_.random(batch * p.gate_stride, kAct);
        p.channel_gate.scale = memory_.random<float>(s.heads, DType::kFloat32, 0.1f, -0.2f);
        p.channel_gate.bias = memory_.random<float>(s.heads * s.state_dim, DType::kFloat32);
      }
      p.o = memory_.take<void>(batch * s.heads * s.head_dim * dtype_bytes(kAct));
      p.o_dtype = kAct;
      params_.push_back(p);
    }
    std::vector<int32_t> start, slot;
    for (int64_t i = 0; i <= batch; ++i) start.push_back(static_cast<int32_t>(i));
    for (int64_t i = 0; i < batch; ++i) slot.push_back(static_cast<int32_t>((i * 7 + 3) % batch));
    if (batch % 7 == 0)
      for (int64_t i = 0; i < batch; ++i) slot[i] = static_cast<int32_t>(i);
    query_start_ = memory_.upload(start);
    slot_ = memory_.upload(slot);
    for (int step = 0; step < buffer_len; ++step) {
      std::vector<Cursor> replay, conventional;
      for (int64_t i = 0; i < batch; ++i) {
        const int phase = static_cast<int>((step + i) % buffer_len);
        const int64_t start_of = 3 + 16 * (i % 5);
        // Phase 0 folds a full ring.
        replay.push_back({.ring_start = start_of + (phase ? 0 : buffer_len),
                          .ring_count = phase,
                          .ring_limit = buffer_len,
                          .fold_count = phase ? 0 : buffer_len});
        conventional.push_back({.ring_start = start_of, .ring_limit = buffer_len});
      }
      cursors_.push_back(memory_.upload(replay));
      no_history_.push_back(memory_.upload(conventional));
    }
    check(cudaDeviceSynchronize());
  }

  int64_t layers() const { return layers_; }
  int64_t steps_per_graph() const { return ring_.buffer_len * layers_; }

  cudaGraphExec_t graph(Route route, const cuda::LaunchConfig* config, cudaStream_t stream) {
    const auto device = cuda::current_device();
    cudaGraph_t captured;
    cudaGraphExec_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int step = 0; step < ring_.buffer_len; ++step) {
      for (auto& p : params_) {
        p.route = route;
        p.batch = {batch_, query_start_, slot_,
                   route == Route::kConventional ? no_history_[step] : cursors_[step], ring_};
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
    p.batch = {batch_, query_start_, slot_, cursors_[0], ring_};
    return cuda::to_string(cuda::choose_launch(cuda::describe(p), cuda::current_device()));
  }

 private:
  Op op_;
  int64_t batch_, layers_ = 0;
  RingConfig ring_;
  Memory memory_;
  std::vector<RecurrentStepParams> params_;
  int32_t *query_start_ = nullptr, *slot_ = nullptr;
  std::vector<Cursor*> cursors_, no_history_;
};

int repeats(int64_t batch) { return batch >= 128 ? 7 : 15; }

void compare(const Op& op, int64_t batch, double ceiling, cudaStream_t stream) {
  Problem problem(op, batch, 16);
  std::vector<cudaGraphExec_t> graphs{problem.graph(Route::kConventional, nullptr, stream),
                                      problem.graph(Route::kOutputOnly, nullptr, stream)};
  const auto ms = interleaved(graphs, stream, repeats(batch));
  double us[2];
  for (int i = 0; i < 2; ++i) {
    us[i] = ms[i] * 1e3 / problem.steps_per_graph();
    check(cudaGraphExecDestroy(graphs[i]));
  }
  const auto rate = [&](Route route, double time) {
    return own_bytes(op, route, batch, 16) / time * 1e-6;
  };
  const double conventional = rate(Route::kConventional, us[0]),
               replay = rate(Route::kOutputOnly, us[1]);
  std::printf("%-28s %5ld %9.2f %6.2f   %9.2f %6.2f %5.1f%% %6.3f   %s\n", op.name, batch, us[0],
              conventional, us[1], replay, 100 * replay / ceiling * 1e12, us[1] / us[0],
              problem.chosen(Route::kOutputOnly).c_str());
  std::fflush(stdout);
}

void tune(const Op& op, int64_t batch, Route route, double ceiling, cudaStream_t stream) {
  Problem problem(op, batch, 16);
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
          if (op.shape.head_dim * heads / slices < warps * 8) continue;
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
  std::printf("%s batch %ld %s:\n", op.name, batch, route_name(route));
  for (size_t i = 0; i < std::min<size_t>(tries.size(), 8); ++i)
    std::printf("   %9.2f us %5.1f%%  %s\n", tries[i].us,
                own_bytes(op, route, batch, 16) / tries[i].us * 1e8 / ceiling,
                cuda::to_string(tries[i].config).c_str());
  std::fflush(stdout);
}

void run(int argc, char** argv) {
  std::vector<int64_t> batches{1, 8, 32, 128, 256};
  std::string only;
  bool tuning = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--tune") {
      tuning = true;
    } else if (argument == "--only" && i + 1 < argc) {
      only = argv[++i];
    } else if (argument == "--batch" && i + 1 < argc) {
      batches.clear();
      for (char* next = argv[++i]; *next; next += *next == ',')
        batches.push_back(std::strtol(next, &next, 10));
    } else {
      fail("op_cuda: unknown argument ", argument);
    }
  }
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  const double ceiling = read_bandwidth(stream);
  std::printf("pure read %.3f TB/s\n", ceiling * 1e-12);
  if (!tuning)
    std::printf("%-28s %5s %9s %6s   %9s %6s %6s %6s\n", "op", "batch", "conv. us", "TB/s",
                "replay us", "TB/s", "share", "ratio");
  for (const Op& op : kOps) {
    if (!only.empty() && std::string(op.name).find(only) == std::string::npos) continue;
    for (const int64_t batch : batches) {
      if (tuning) {
        tune(op, batch, Route::kOutputOnly, ceiling, stream);
        if (!op.fp8_copy) tune(op, batch, Route::kConventional, ceiling, stream);
      } else {
        compare(op, batch, ceiling, stream);
      }
    }
  }
}

}  // namespace
}  // namespace replayssm

int main(int argc, char** argv) {
  try {
    replayssm::run(argc, argv);
  } catch (const replayssm::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
