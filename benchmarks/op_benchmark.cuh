// What programs share that time ops on a CUDA device: cold L2 (layers in turn), CUDA graph,
// medians.
//
//   PROGRAM [--batch N,N,...] [--only TEXT]
//
// Columns: microseconds per call within a chain of calls, TB/s by the op's own bytes, those as a
// share of a pure read measured in the same run.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "core/check.h"
#include "device_benchmark.cuh"

namespace replayssm {

// One op at one batch size: the same call over the memory of `layers` layers.
struct Problem {
  double bytes = 0;  // of a call
  std::vector<std::function<void(cudaStream_t)>> layers;
};

struct Context {
  int64_t batch = 1;
  BenchmarkMemory memory;

  // Layers enough that none finds its memory in the cache.
  int64_t layers(double bytes) const {
    const double cold = double(int64_t{256} << 20);
    return std::clamp<int64_t>(static_cast<int64_t>(cold / bytes), 2, 256);
  }
};

struct Op {
  std::string name;
  std::function<Problem(Context&)> make;
  int64_t most = INT64_MAX;  // batch
};

inline void measure(const Op& op, int64_t batch, double ceiling, cudaStream_t stream) {
  Context context;
  context.batch = batch;
  const Problem problem = op.make(context);
  check(cudaDeviceSynchronize());
  const int64_t layers = std::ssize(problem.layers), rounds = std::max<int64_t>(1, 32 / layers);
  cudaGraph_t captured;
  cudaGraphExec_t graph;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int64_t round = 0; round < rounds; ++round)
    for (const auto& layer : problem.layers) layer(stream);
  check(cudaStreamEndCapture(stream, &captured));
  check(cudaGraphInstantiate(&graph, captured, 0));
  check(cudaGraphDestroy(captured));
  const double us = interleaved({graph}, stream, 9)[0] * 1e3 / double(layers * rounds);
  check(cudaGraphExecDestroy(graph));
  std::printf("%-36s %5ld %9.2f %7.3f %6.1f%%\n", op.name.c_str(), batch, us,
              problem.bytes / us * 1e-6, problem.bytes / us * 1e8 / ceiling);
  std::fflush(stdout);
}

inline void run(const std::vector<Op>& ops, std::vector<int64_t> batches, int argc, char** argv) {
  std::string only;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--only" && i + 1 < argc) {
      only = argv[++i];
    } else if (argument == "--batch" && i + 1 < argc) {
      batches.clear();
      for (char* next = argv[++i]; *next; next += *next == ',')
        batches.push_back(std::strtol(next, &next, 10));
    } else {
      fail("unknown argument ", argument);
    }
  }
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  const double ceiling = read_bandwidth(stream);
  std::printf("pure read %.3f TB/s\n%-36s %5s %9s %7s %7s\n", ceiling * 1e-12, "op", "batch", "us",
              "TB/s", "share");
  for (const Op& op : ops) {
    if (op.name.find(only) == std::string::npos) continue;
    for (const int64_t batch : batches)
      if (batch <= op.most) measure(op, batch, ceiling, stream);
  }
}

// What main returns.
inline int run_main(const std::vector<Op>& ops, const std::vector<int64_t>& batches, int argc,
                    char** argv) {
  try {
    run(ops, batches, argc, argv);
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}

}  // namespace replayssm
