// Times the decode step of the recurrence on a CUDA device, replay and conventional interleaved:
// cold L2, whole flush cycles with staggered sequences, CUDA graph, medians.
//
//   op_cuda [--batch N,N,...] [--window N,N,...] [--only TEXT] [--tree] [--tune] [--fused]
//
// Columns: microseconds per layer and step, TB/s by the op's own bytes, those as a share of a pure
// read measured in the same run, and the ratio to conventional. Of windows of several tokens so
// many are accepted as an even draw from 1 .. window says. --tree makes every window a tree.
// --fused times whole layers from projection to gated norm beside the recurrence; "own" is what
// they would take if they added their own bytes at 4.3 TB/s.
//
// --tune tries all launches of replay steps against the rule's, in turn, and prints those that are
// 2% faster as src/ops/cuda/launch_table.inc has them; times go to the error stream.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "decode_problem.cuh"
#include "ops/cuda/launch_table.h"

namespace replayssm {
namespace {

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
              100 * replay / ceiling * 1e12, us[1] / us[0], problem.chosen().c_str());
  std::fflush(stdout);
}

void compare_fused(const Op& op, int64_t batch, const Windows& windows, cudaStream_t stream) {
  Problem problem(op, batch, windows);
  constexpr Route kConventional = Route::kConventional, kReplay = Route::kOutputOnly;
  std::vector<cudaGraphExec_t> graphs{
      problem.graph(kReplay, nullptr, stream),
      problem.graph(kReplay, nullptr, stream, Extent::kFused),
      problem.graph(kReplay, nullptr, stream, Extent::kUnfused),
      problem.graph(kConventional, nullptr, stream, Extent::kFused),
      problem.graph(kConventional, nullptr, stream, Extent::kUnfused)};
  auto us = interleaved(graphs, stream, repeats(batch));
  for (double& time : us) time *= 1e3 / problem.steps_per_graph();
  for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph));
  std::printf("%-28s %2d %5ld %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f %6.3f\n", op.name, windows.tokens,
              batch, us[0], us[0] + problem.layer_bytes() / 4.3e6, us[1], us[2], us[3], us[4],
              us[1] / us[3]);
  std::fflush(stdout);
}

// All ways to cut this step that may pay.
std::vector<cuda::LaunchConfig> launches(const Op& op, int64_t batch) {
  std::vector<cuda::LaunchConfig> all;
  const auto add = [&](const cuda::LaunchConfig& config) {
    if (cuts(op.shape, config)) all.push_back(config);
  };
  for (const int heads : {1, 2, 4, 8}) {
    for (const int warps : {1, 2, 4}) {
      for (const int slices : {1, 2, 4, 8, 16}) {
        if (slices > 1 && batch > 32) break;
        add({.heads = heads, .slices = slices, .warps = warps});
        if (batch <= 16) add({.heads = heads, .slices = slices, .warps = warps, .ahead = true});
      }
      for (const int preparing : {1, 2})
        add({.heads = heads, .warps = warps, .preparing = preparing});
      for (const int fold_blocks : {2, 4, 8})
        if (batch <= 128) add({.heads = heads, .warps = warps, .fold_blocks = fold_blocks});
    }
  }
  return all;
}

const char* type_code(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return "DType::kFloat16";
    case DType::kBFloat16: return "DType::kBFloat16";
    case DType::kFloat8E4M3: return "DType::kFloat8E4M3";
    case DType::kInt8: return "DType::kInt8";
    default: return "DType::kFloat32";
  }
}
void print_entry(const cuda::StepDescription& step, const cuda::LaunchConfig& config) {
  constexpr const char* kFamilies[] = {"kMamba2", "kGatedDelta", "kKimiDelta"};
  const auto& s = step.shape;
  std::printf(
      "{%d, {Family::%s, %ld, %ld, %ld, %ld}, {%s, %s, %s}, %d, %ld, "
      "{%d, %d, %d, %d, %s, %d}},\n",
      cuda::current_device().multiprocessors, kFamilies[static_cast<int>(s.family)], s.heads,
      s.key_heads, s.head_dim, s.state_dim, type_code(step.types.activation),
      type_code(step.types.checkpoint), type_code(step.types.read), step.ring.max_window,
      step.sequences, config.heads, config.slices, config.warps, config.preparing,
      config.ahead ? "true" : "false", config.fold_blocks);
  std::fflush(stdout);
}

void tune(const Op& op, int64_t batch, const Windows& windows, cudaStream_t stream) {
  Problem problem(op, batch, windows);
  const auto step = problem.description();
  const auto device = cuda::current_device();
  std::vector<cuda::LaunchConfig> tried{cuda::launch_by_rule(step, device)};
  for (const cuda::LaunchConfig& each : launches(op, batch))
    if (cuda::step_layout(step.shape, step.ring, step.types, each).total <=
        device.shared_bytes_per_block)
      tried.push_back(each);
  std::vector<cudaGraphExec_t> graphs;
  for (const cuda::LaunchConfig& each : tried)
    graphs.push_back(problem.graph(Route::kOutputOnly, &each, stream));
  const auto ms = interleaved(graphs, stream, 5);
  for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph));
  const size_t best = std::min_element(ms.begin(), ms.end()) - ms.begin();
  const auto us = [&](size_t i) { return ms[i] * 1e3 / problem.steps_per_graph(); };
  std::fprintf(stderr, "%-28s %2d %5ld %9.2f %-28s %9.2f %s\n", op.name, windows.tokens, batch,
               us(0), cuda::to_string(tried[0]).c_str(), us(best),
               cuda::to_string(tried[best]).c_str());
  if (ms[best] < 0.98 * ms[0]) print_entry(step, tried[best]);
}

struct Options {
  std::vector<int64_t> batches{1, 8, 32, 128, 256}, windows{1};
  std::string only;
  bool tree = false, tune = false, fused = false;
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
    } else if (argument == "--fused") {
      options.fused = true;
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
  if (options.tune) {
    std::printf(
        "// Made by `op_cuda --tune`: multiprocessors, shape, types, window, sequences, launch.\n");
  } else {
    std::printf("pure read %.3f TB/s\n", ceiling * 1e-12);
  }
  if (options.fused)
    std::printf("%-28s %2s %5s %9s %9s %9s %9s %9s %9s %6s\n", "op", "T", "batch", "op us",
                "own us", "fused us", "unfused", "conv. us", "unfused", "ratio");
  else if (!options.tune)
    std::printf("%-28s %2s %5s %9s %6s   %9s %6s %6s %6s\n", "op", "T", "batch", "conv. us", "TB/s",
                "replay us", "TB/s", "share", "ratio");
  for (const Op& op : kOps) {
    if (std::string(op.name).find(options.only) == std::string::npos) continue;
    for (const int64_t tokens : options.windows) {
      const Windows windows{static_cast<int32_t>(tokens), options.tree};
      for (const int64_t batch : options.batches) {
        if (options.fused) {
          compare_fused(op, batch, windows, stream);
        } else if (options.tune) {
          tune(op, batch, windows, stream);
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
