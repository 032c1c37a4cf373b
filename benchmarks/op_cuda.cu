// Times the decode step of the recurrence on a CUDA device, replay and conventional interleaved:
// cold L2, whole flush cycles with staggered sequences, CUDA graph, medians.
//
//   op_cuda [--batch N,N,...] [--window N,N,...] [--only TEXT] [--tree] [--tune] [--fused]
//
// Columns: microseconds per layer and step, TB/s by the op's own bytes, those as a share of a pure
// read measured in the same run, and the ratio to conventional. Of windows of several tokens so
// many are accepted as an even draw from 1 .. window says. --tree makes every window a tree. --tune
// tries launch configurations. --fused times whole layers from projection to gated norm beside the
// recurrence; "own" is what they would take if they added their own bytes at 4.3 TB/s.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "decode_problem.cuh"

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
              100 * replay / ceiling * 1e12, us[1] / us[0],
              problem.chosen(Route::kOutputOnly).c_str());
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
  std::printf("pure read %.3f TB/s\n", ceiling * 1e-12);
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
