// Times the ops of a forward pass besides matrix products and the decode step on a CUDA device
// (columns and arguments: op_benchmark.cuh). batch: sequences.

#include "op_benchmark.cuh"
#include "ops/cuda/attention.h"
#include "ops/cuda/experts.h"
#include "ops/cuda/recurrent_prefill.h"
#include "ops/cuda/sampling.h"
#include "replay/bytes.h"

namespace replayssm {
namespace {

constexpr DType kAct = DType::kBFloat16, kSingle = DType::kFloat32;
constexpr int64_t kActBytes = 2;

cuda::InRows rows_of(Context& c, int64_t rows, int64_t width, DType dtype = kAct) {
  return {c.memory.random(rows * width, dtype), width, dtype};
}
cuda::OutRows out_of(Context& c, int64_t rows, int64_t width, DType dtype = kAct) {
  return {c.memory.random(rows * width, dtype), width, dtype};
}
std::vector<int32_t> ascending(int64_t count, int64_t step) {
  std::vector<int32_t> x;
  for (int64_t i = 0; i <= count; ++i) x.push_back(static_cast<int32_t>(i * step));
  return x;
}

Op add_norm(const char* name, int64_t dim) {
  return {name, [=](Context& c) {
            Problem problem;
            problem.bytes = double(c.batch * dim * (12 + kActBytes) + dim * 4);
            for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
              cuda::AddNormParams p;
              p.hidden = out_of(c, c.batch, dim, kSingle);
              p.delta = rows_of(c, c.batch, dim, kSingle);
              p.weight = c.memory.random<float>(dim, kSingle);
              p.eps = 1e-5f;
              p.rows = c.batch;
              p.dim = dim;
              p.y = out_of(c, c.batch, dim);
              problem.layers.push_back([=](cudaStream_t stream) { cuda::add_rms_norm(p, stream); });
            }
            return problem;
          }};
}

Op activation(const char* name, int64_t dim, bool gated) {
  return {name, [=](Context& c) {
            Problem problem;
            const int64_t width = gated ? 2 * dim : dim, rows = c.batch;
            problem.bytes = double(rows * (width + dim) * kActBytes);
            for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
              const cuda::InRows x = rows_of(c, rows, width);
              const cuda::OutRows y = out_of(c, rows, dim);
              problem.layers.push_back([=](cudaStream_t stream) {
                gated ? cuda::swiglu(x, 1, rows, dim, y, stream)
                      : cuda::relu_squared(x, 1, rows, dim, y, stream);
              });
            }
            return problem;
          }};
}

struct Heads {
  int64_t heads, kv_heads, dim;
  bool shared = false;  // values are the keys
};

// A cache in blocks of 16 tokens, dealt in no order.
struct Cached {
  KvCache cache;
  KvBatch batch;
};
Cached cached(Context& c, const Heads& h, int64_t window, int64_t context) {
  constexpr int64_t kBlock = 16;
  const int64_t blocks = (context + kBlock - 1) / kBlock, all = c.batch * blocks;
  std::vector<int32_t> table;
  for (int64_t i = 0; i < all; ++i) table.push_back(static_cast<int32_t>(i * 7919 % all));
  const int64_t elements = all * kBlock * h.kv_heads * h.dim;
  void* k = c.memory.random(elements, kAct);
  return {{k, h.shared ? k : c.memory.random(elements, kAct), kAct, kBlock, h.kv_heads, h.dim},
          {c.batch, c.memory.upload(ascending(c.batch, window)),
           c.memory.upload(std::vector<int64_t>(c.batch, context - window)), c.memory.upload(table),
           blocks}};
}

Op prepare(const char* name, const Heads& h) {
  return {name, [=](Context& c) {
            Problem problem;
            const int64_t width = (h.heads + 2 * h.kv_heads) * h.dim;
            problem.bytes = double(c.batch * width * 2 * kActBytes);
            const float* weight = c.memory.random<float>(h.dim, kSingle);
            for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
              const Cached kv = cached(c, h, 1, 16);
              auto* qkv = c.memory.random<char>(c.batch * width, kAct);
              cuda::AttentionInputParams p;
              p.q = {qkv, width, kAct};
              p.k = {qkv + h.heads * h.dim * kActBytes, width, kAct};
              p.v = {qkv + (h.heads + h.kv_heads) * h.dim * kActBytes, width, kAct};
              p.tokens = c.batch;
              p.heads = h.heads;
              p.q_norm = p.k_norm = p.inverse_frequency = weight;
              p.norm_dim = p.rotary_dim = h.dim;
              p.cache = kv.cache;
              p.batch = kv.batch;
              p.q_out = out_of(c, c.batch, h.heads * h.dim);
              problem.layers.push_back(
                  [=](cudaStream_t stream) { cuda::prepare_attention(p, stream); });
            }
            return problem;
          }};
}

Op attention(const char* name, const Heads& h, int64_t window, int64_t context,
             int64_t most = INT64_MAX) {
  return {
      name,
      [=](Context& c) {
        Problem problem;
        const int64_t tokens = c.batch * window, width = h.heads * h.dim;
        problem.bytes =
            double(c.batch * context * h.kv_heads * h.dim * kActBytes * (h.shared ? 1 : 2)) +
            double(tokens * width * 2 * kActBytes);
        for (int64_t i = 0; i < c.layers(problem.bytes); ++i) {
          const Cached kv = cached(c, h, window, context);
          cuda::AttentionParams p;
          p.shape = {c.batch, tokens, window, context, h.heads, h.kv_heads, h.dim};
          p.cache = kv.cache;
          p.batch = kv.batch;
          p.q = rows_of(c, tokens, width);
          p.scale = 0.1f;
          p.out = out_of(c, tokens, width);
          p.workspace = c.memory.take<void>(cuda::attention_workspace_bytes(p.shape));
          void* plan = c.memory.take<void>(cuda::attention_plan_bytes(p.shape));
          p.plan = plan;
          cuda::plan_attention(p.shape, p.batch, plan, nullptr);
          problem.layers.push_back([=](cudaStream_t stream) { cuda::paged_attention(p, stream); });
        }
        return problem;
      },
      most};
}

// Both products of all chosen experts; a token's choices follow one another.
Op experts(const char* name, int64_t count, int64_t top_k, int64_t hidden, int64_t width) {
  return {name, [=](Context& c) {
            Problem problem;
            std::vector<int32_t> chosen;
            std::vector<bool> used(count);
            for (int64_t i = 0; i < c.batch * top_k; ++i) {
              const int64_t expert = (i / top_k * 7919 % count + i % top_k * 5) % count;
              chosen.push_back(static_cast<int32_t>(expert));
              used[expert] = true;
            }
            const auto active = std::count(used.begin(), used.end(), true);
            problem.bytes = double(active * 2 * hidden * width * kActBytes);
            const int32_t* expert = c.memory.upload(chosen);
            cuda::ExpertPlan plan{{c.batch, top_k, count}};
            plan.memory = c.memory.take<void>(cuda::expert_plan_bytes(plan.shape));
            for (int64_t i = 0; i < 2; ++i) {
              cuda::ExpertProductParams up, down;
              up.plan = down.plan = plan;
              up.x = rows_of(c, c.batch, hidden);
              up.x_per_row = true;
              up.y = out_of(c, c.batch * top_k, width);
              down.x = {up.y.data, width, kAct};
              down.y = out_of(c, c.batch * top_k, hidden);
              up.in = down.out = hidden;
              up.out = down.in = width;
              up.weight = c.memory.random(count * hidden * width, kAct);
              down.weight = c.memory.random(count * hidden * width, kAct);
              problem.layers.push_back([=](cudaStream_t stream) {
                cuda::sort_by_expert(plan, expert, nullptr, stream);
                cuda::expert_product(up, stream);
                cuda::expert_product(down, stream);
              });
            }
            return problem;
          }};
}

Op sampling(const char* name, int64_t vocab, const cuda::SamplingRow& row) {
  return {name, [=](Context& c) {
            Problem problem;
            problem.bytes = double(c.batch * vocab * 4);
            cuda::SampleParams p;
            p.rows = c.batch;
            p.vocab = vocab;
            p.sampling = c.memory.upload(std::vector<cuda::SamplingRow>(c.batch, row));
            p.position = c.memory.upload(std::vector<int64_t>(c.batch, 5));
            p.token = c.memory.take<int32_t>(c.batch * 4);
            for (int64_t i = 0; i < std::min<int64_t>(c.layers(problem.bytes), 16); ++i) {
              p.logits = {c.memory.random(c.batch * vocab, kSingle, 10), vocab, kSingle};
              problem.layers.push_back([=](cudaStream_t stream) { cuda::sample(p, stream); });
            }
            return problem;
          }};
}

Op prefill(const char* name, const RecurrentShape& s, int64_t tokens) {
  return {name,
          [=](Context& c) {
            Problem problem;
            const int64_t n = c.batch * tokens, values = s.heads * s.head_dim,
                          keys = s.key_heads * s.state_dim;
            problem.bytes = double(n * (2 * values + 2 * keys) * kActBytes) +
                            double(c.batch * state_elements(s) * 8);
            for (int64_t i = 0; i < 2; ++i) {
              RecurrentPrefillParams p;
              p.shape = s;
              p.batch.sequences = c.batch;
              p.batch.query_start = c.memory.upload(ascending(c.batch, tokens));
              p.batch.slot = c.memory.upload(ascending(c.batch, 1));
              p.batch.cursors = c.memory.take<Cursor>(c.batch * sizeof(Cursor));
              p.state.checkpoint = c.memory.random(c.batch * state_elements(s), kSingle);
              p.state.activation_dtype = kAct;
              // Rings are checked, not touched.
              p.state.ring_v = p.state.ring_k = p.state.ring_gate = p.state.checkpoint;
              p.state.ring_b = p.state.ring_g = static_cast<float*>(p.state.checkpoint);
              p.v = c.memory.random(n * values, kAct);
              p.k = c.memory.random(n * keys, kAct);
              p.q = c.memory.random(n * keys, kAct);
              p.v_stride = values;
              p.k_stride = p.q_stride = keys;
              p.b = c.memory.random<float>(n * s.heads, kSingle, 0.4f, 0.5f);
              p.g = c.memory.random<float>(n * s.heads, kSingle, 0.1f, -0.11f);
              if (s.family == Family::kKimiDelta) {
                p.gate_stride = s.heads * s.state_dim;
                p.gate = c.memory.random(n * p.gate_stride, kAct);
                p.channel_gate.scale = c.memory.random<float>(s.heads, kSingle, 0.1f, -0.2f);
                p.channel_gate.bias = c.memory.random<float>(s.heads * s.state_dim, kSingle);
              }
              p.o = c.memory.take<void>(n * values * kActBytes);
              p.o_dtype = kAct;
              problem.layers.push_back(
                  [=](cudaStream_t stream) { cuda::recurrent_prefill(p, stream); });
            }
            return problem;
          },
          8};
}

std::vector<Op> ops() {
  constexpr Heads kNano4{40, 8, 128}, kNano30{32, 2, 128}, kQwen4{16, 4, 256},
      kKimi{32, 1, 576, true};
  return {add_norm("add_rms_norm 3136", 3136),
          activation("relu_squared 12544", 12544, false),
          activation("swiglu 9216", 9216, true),
          prepare("prepare_attention 40/8 x 128", kNano4),
          attention("attention 40/8 x 128, 1000 keys", kNano4, 1, 1000),
          attention("attention 32/2 x 128, 1000 keys", kNano30, 1, 1000),
          attention("attention 16/4 x 256, 640 keys", kQwen4, 1, 640),
          attention("attention 32/1 x 576, 1000 keys", kKimi, 1, 1000),
          attention("attention 40/8 x 128, 32000 keys", kNano4, 1, 32000, 8),
          attention("attention 40/8 x 128, T=5", kNano4, 5, 1000),
          attention("attention 40/8 x 128, T=2048", kNano4, 2048, 2048, 8),
          attention("attention 16/4 x 256, T=2048", kQwen4, 2048, 2048, 8),
          experts("experts 6 of 128, 2688 x 1856", 128, 6, 2688, 1856),
          sampling("sample greedy 131072", 131072, {}),
          sampling("sample temperature 131072", 131072, {.temperature = 0.7}),
          sampling("sample top-k top-p 131072", 131072,
                   {.temperature = 0.7, .top_p = 0.95, .top_k = 50}),
          prefill("prefill mamba2 96 x 80, T=2048", {Family::kMamba2, 96, 8, 80, 128}, 2048),
          prefill("prefill gdn 32 x 128, T=2048", {Family::kGatedDelta, 32, 16, 128, 128}, 2048),
          prefill("prefill kda 32 x 128, T=2048", {Family::kKimiDelta, 32, 32, 128, 128}, 2048),
          prefill("prefill gdn 32 x 128, T=16", {Family::kGatedDelta, 32, 16, 128, 128}, 16),
          prefill("prefill kda 32 x 128, T=16", {Family::kKimiDelta, 32, 32, 128, 128}, 16)};
}

}  // namespace
}  // namespace replayssm

int main(int argc, char** argv) {
  return replayssm::run_main(replayssm::ops(), {1, 32, 128}, argc, argv);
}
