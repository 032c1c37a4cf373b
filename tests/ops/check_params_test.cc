#include "ops/check_params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>

#include "replay/cursor.h"
#include "replayssm/error.h"

namespace replayssm {
namespace {

using ::testing::HasSubstr;

template <class Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

alignas(64) std::array<char, 4096> memory;
void* at(int64_t offset) { return memory.data() + offset; }
template <class T>
T* at(int64_t offset) {
  return reinterpret_cast<T*>(memory.data() + offset);
}

// Arguments that every check accepts.
template <class Params>
Params accepted(Family family = Family::kGatedDelta) {
  Params p;
  p.shape = {family, 4, 2, 16, 32};
  p.batch.sequences = 2;
  p.batch.query_start = at<int32_t>(0);
  p.batch.slot = at<int32_t>(64);
  p.batch.cursors = at<Cursor>(128);
  p.state.checkpoint = at(0);
  p.state.ring_v = p.state.ring_k = at(0);
  p.state.ring_b = at<float>(0);
  if (family == Family::kKimiDelta) {
    p.state.ring_gate = at(0);
  } else {
    p.state.ring_g = at<float>(0);
  }
  p.state.activation_dtype = DType::kBFloat16;
  if constexpr (requires { p.channel_gate; }) {
    if (family == Family::kKimiDelta) p.channel_gate = {at<float>(0), at<float>(0)};
  }
  if constexpr (std::derived_from<Params, RecurrentStepParams>) {
    p.v = p.k = p.q = at(0);
    p.v_stride = 64;
    p.k_stride = p.q_stride = 64;
    p.b = p.g = at<float>(0);
    p.gate = at(0);
    p.gate_stride = 128;
    p.o = at(0);
  }
  if constexpr (requires { p.snapshots; }) p.snapshots = at(0), p.source = at<int32_t>(0);
  if constexpr (requires { p.target_slot; }) p.target_slot = at<int32_t>(0);
  if constexpr (requires { p.path; }) p.path = p.accepted = at<int32_t>(0);
  return p;
}

ConvParams accepted_conv() {
  ConvParams p;
  p.batch = {2, at<int32_t>(0), at<int32_t>(0), at<Cursor>(0), {}};
  p.channels = 40;
  p.activation_dtype = DType::kBFloat16;
  p.x = p.weight = at<float>(0);
  p.x_stride = 40;
  p.inputs = p.y = at(0);
  return p;
}

// Changes one argument of an accepted call; the error names it.
template <class Params>
struct Refused {
  std::function<void(Params&)> change;
  std::string message;
};

TEST(CheckParams, AcceptsWhatIsRight) {
  for (const Family family : {Family::kMamba2, Family::kGatedDelta, Family::kKimiDelta}) {
    for (const int64_t alignment : {1, 16}) {
      check_params(accepted<RecurrentStepParams>(family), alignment);
      check_params(accepted<RecurrentPrefillParams>(family), alignment);
      check_params(accepted<SnapshotStepParams>(family), alignment);
      check_params(accepted<RecurrentFoldParams>(family), alignment);
      check_params(accepted<SlotCopyParams>(family), alignment);
      check_params(accepted<SlotClearParams>(family), alignment);
      check_params(accepted<CompactParams>(family), alignment);
    }
  }
  check_params(accepted_conv(), 16);
  RecurrentStepParams empty = accepted<RecurrentStepParams>();  // no sequence, no memory of tokens
  empty.batch.sequences = 0;
  empty.v = empty.k = empty.q = empty.o = nullptr;
  empty.batch.slot = nullptr;
  check_params(empty);
}

TEST(CheckParams, NamesWhatIsWrongWithAStep) {
  using P = RecurrentStepParams;
  const std::vector<Refused<P>> cases = {
      {[](P& p) { p.shape.family = Family{9}; },
       "shape.family: expected mamba2, gdn or kda, got 9"},
      {[](P& p) { p.shape.heads = 0; }, "shape.heads: expected at least 1, got 0"},
      {[](P& p) { p.shape.key_heads = 3; },
       "shape.key_heads: expected a divisor of heads = 4, got 3"},
      {[](P& p) { p.shape.head_dim = -2; }, "shape.head_dim: expected at least 1, got -2"},
      {[](P& p) { p.shape.state_dim = 1025; }, "shape.state_dim: expected at most 1024, got 1025"},
      {[](P& p) { p.route = Route{7}; }, "route: expected one of the three, got 7"},
      {[](P& p) { p.batch.sequences = -1; }, "batch.sequences: expected at least 0, got -1"},
      {[](P& p) { p.batch.ring.buffer_len = 0; },
       "batch.ring.buffer_len: expected at least 1, got 0"},
      {[](P& p) { p.batch.ring.conv_kernel = 9; },
       "batch.ring.conv_kernel: expected at most 8, got 9"},
      {[](P& p) { p.batch.slot = nullptr; }, "batch.slot: expected memory, got a null pointer"},
      {[](P& p) { p.batch.cursors = nullptr; }, "batch.cursors: expected memory"},
      {[](P& p) {
         p.batch.parent = at<int32_t>(0);
         p.route = Route::kConventional;
       },
       "batch.parent: expected null with the conventional route, got a pointer"},
      {[](P& p) { p.state.checkpoint_dtype = DType::kInt8; },
       "state.checkpoint_dtype: expected float32, float16 or bfloat16, got int8"},
      {[](P& p) { p.state.checkpoint = at(8); },
       "state.checkpoint: expected 16-byte alignment, got an address of 8-byte alignment"},
      {[](P& p) { p.state.ring_v = at(4); },
       "state.ring_v: expected 16-byte alignment, got an address of 4-byte alignment"},
      {[](P& p) { p.state.ring_g = nullptr; }, "state.ring_g: expected memory"},
      {[](P& p) { p.state.read_copy = {at(0), nullptr, DType::kFloat8E4M3}; },
       "state.read_copy.scale: expected memory"},
      {[](P& p) { p.state.read_copy = {at(0), nullptr, DType{17}}; },
       "state.read_copy.dtype: expected one of the types, got 17"},
      {[](P& p) { p.v_stride = 63; }, "v_stride: expected at least 64, got 63"},
      {[](P& p) { p.k_stride = 68; },
       "k_stride: expected rows of 16-byte alignment, got 68 elements of 2 bytes"},
      {[](P& p) { p.q = nullptr; }, "q: expected memory, got a null pointer"},
      {[](P& p) { p.g = nullptr; }, "g: expected memory"},
      {[](P& p) { p.z = at(0); }, "z_stride: expected at least 64, got 0"},
      {[](P& p) { p.skip = at<float>(2); }, "skip: expected 4-byte alignment"},
      {[](P& p) { p.o = at(2); }, "o: expected 16-byte alignment"},
      {[](P& p) { p.o_dtype = DType::kInt8; }, "o_dtype: expected float32"},
      {[](P& p) { p.rounding.seed = at<uint64_t>(4); }, "rounding.seed: expected 8-byte alignment"},
  };
  for (const auto& c : cases) {
    P p = accepted<P>();
    c.change(p);
    EXPECT_THAT(message_of([&] { check_params(p, 16); }), HasSubstr(c.message));
  }
}

TEST(CheckParams, KimiDeltaHasGatesOfItsOwn) {
  using P = RecurrentStepParams;
  const std::vector<Refused<P>> cases = {
      {[](P& p) { p.channel_gate.bias = nullptr; }, "channel_gate.bias: expected memory"},
      {[](P& p) { p.gate = nullptr; }, "gate: expected memory"},
      {[](P& p) { p.gate_stride = 127; }, "gate_stride: expected at least 128, got 127"},
      {[](P& p) { p.state.ring_gate = nullptr; }, "state.ring_gate: expected memory"},
  };
  for (const auto& c : cases) {
    P p = accepted<P>(Family::kKimiDelta);
    p.g = nullptr;
    check_params(p);
    c.change(p);
    EXPECT_THAT(message_of([&] { check_params(p); }), HasSubstr(c.message));
  }
}

TEST(CheckParams, ElementsNeedTheirOwnAlignmentAtTheLeast) {
  auto p = accepted<RecurrentStepParams>();
  p.state.ring_v = at(2);
  check_params(p);
  p.state.ring_v = at(1);
  EXPECT_EQ(message_of([&] { check_params(p); }),
            "state.ring_v: expected 2-byte alignment, got an address of 1-byte alignment");
}

TEST(CheckParams, ConventionalNeedsNoRing) {
  auto p = accepted<RecurrentStepParams>();
  p.state.ring_v = p.state.ring_k = p.state.ring_b = p.state.ring_g = nullptr;
  EXPECT_THAT(message_of([&] { check_params(p); }), HasSubstr("state.ring_v"));
  p.route = Route::kConventional;
  check_params(p);
}

TEST(CheckParams, NamesWhatIsWrongWithTheOtherOps) {
  auto prefill = accepted<RecurrentPrefillParams>();
  prefill.batch.parent = at<int32_t>(0);
  EXPECT_THAT(message_of([&] { check_params(prefill); }),
              HasSubstr("batch.parent: expected null for a prefill"));
  auto snapshots = accepted<SnapshotStepParams>();
  snapshots.source = nullptr;
  EXPECT_THAT(message_of([&] { check_params(snapshots); }), HasSubstr("source: expected memory"));
  auto fold = accepted<RecurrentFoldParams>();
  fold.batch.query_start = nullptr;
  check_params(fold);
  fold.target_slot = at<int32_t>(1);
  EXPECT_THAT(message_of([&] { check_params(fold); }),
              HasSubstr("target_slot: expected 4-byte alignment"));
  auto copy = accepted<SlotCopyParams>();
  copy.conv_inputs = at(0);
  EXPECT_THAT(message_of([&] { check_params(copy); }), HasSubstr("channels: expected at least 1"));
  copy.channels = 5;
  copy.target_slot = nullptr;
  EXPECT_THAT(message_of([&] { check_params(copy); }), HasSubstr("target_slot: expected memory"));
  auto compact = accepted<CompactParams>();
  compact.path = nullptr;
  EXPECT_THAT(message_of([&] { check_params(compact); }), HasSubstr("path: expected memory"));
  auto clear = accepted<SlotClearParams>();
  clear.batch.slot = nullptr;
  EXPECT_THAT(message_of([&] { check_params(clear); }), HasSubstr("batch.slot: expected memory"));
  for (const auto& [change, message] : std::vector<Refused<ConvParams>>{
           {[](ConvParams& p) { p.channels = 0; }, "channels: expected at least 1, got 0"},
           {[](ConvParams& p) { p.x_stride = 39; }, "x_stride: expected at least 40, got 39"},
           {[](ConvParams& p) { p.x_dtype = DType::kFloat16; },
            "x_dtype: expected float32 or activation_dtype = bfloat16, got float16"},
           {[](ConvParams& p) { p.x_dtype = DType::kBFloat16, p.x = at<char>(1); },
            "x: expected 2-byte alignment"},
           {[](ConvParams& p) { p.inputs = at(8); }, "inputs: expected 16-byte alignment"},
           {[](ConvParams& p) { p.y = nullptr; }, "y: expected memory"},
           {[](ConvParams& p) { p.weight = at<float>(2); }, "weight: expected 4-byte alignment"},
           {[](ConvParams& p) { p.activation_dtype = DType::kInt8; }, "activation_dtype:"}}) {
    ConvParams p = accepted_conv();
    change(p);
    EXPECT_THAT(message_of([&] { check_params(p, 16); }), HasSubstr(message));
  }
}

// A batch of three sequences (one of them padding) in a pool of four slots.
struct Arrays {
  std::array<int32_t, 4> query_start = {0, 2, 3, 5};
  std::array<int32_t, 3> slot = {3, -1, 0};
  std::array<int32_t, 5> parent = {-1, 0, -1, -1, -1};
  std::array<Cursor, 4> cursors;
  RingConfig ring{.buffer_len = 8, .max_window = 3, .conv_kernel = 4};

  Arrays() { cursors.fill(reset_cursor(ring)); }
  SequenceBatch batch() const {
    return {3, query_start.data(), slot.data(), cursors.data(), ring, parent.data()};
  }
};

TEST(CheckBatch, NamesWhatLiesBehindThePointers) {
  struct Case {
    std::function<void(Arrays&)> change;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](Arrays&) {}, "no error"},
      {[](Arrays& a) { a.slot[0] = 4; }, "batch.slot[0]: expected -1 or a slot below 4, got 4"},
      {[](Arrays& a) { a.slot[2] = -2; }, "batch.slot[2]: expected -1 or a slot below 4, got -2"},
      {[](Arrays& a) { a.slot[2] = 3; },
       "batch.slot[2]: expected a slot of its own, got slot 3, which batch.slot[0] has"},
      {[](Arrays& a) { a.slot[0] = -1; }, "no error"},
      {[](Arrays& a) { a.query_start[0] = -1; }, "batch.query_start[0]: expected at least 0"},
      {[](Arrays& a) { a.query_start[2] = 1; },
       "batch.query_start[2]: expected at least the 2 before it, got 1"},
      {[](Arrays& a) { a.query_start[1] = 0; },
       "no error"},  // an empty window, and one of three tokens for padding
      {[](Arrays& a) { a.ring.max_window = 1; },
       "batch.query_start[1]: expected a window of at most max_window = 1 tokens, got 2"},
      {[](Arrays& a) { a.parent[1] = 1; },
       "batch.parent[1]: expected -1 or a token before token 1 of its window, got 1"},
      {[](Arrays& a) { a.parent[4] = -2; }, "batch.parent[4]: expected -1 or a token before"},
      {[](Arrays& a) { a.cursors[3].ring_count = 9; },
       "batch.cursors[3].ring_count: expected 0 to 8, got 9"},
      {[](Arrays& a) { a.cursors[1].ring_count = 9; }, "no error"},  // not in the batch
      {[](Arrays& a) { a.cursors[0].fold_count = -1; },
       "batch.cursors[0].fold_count: expected 0 to 8, got -1"},
      {[](Arrays& a) { a.cursors[0].ring_limit = 9; },
       "batch.cursors[0].ring_limit: expected 0 to 8, got 9"},
      {[](Arrays& a) { a.cursors[0].ring_start = 2; },
       "batch.cursors[0].ring_start: expected at least 3, got 2"},
      {[](Arrays& a) { a.cursors[0].ring_count = 7; },
       "batch.cursors[0].ring_count: expected a step that has begun"},
  };
  for (const Case& c : cases) {
    Arrays arrays;
    c.change(arrays);
    EXPECT_THAT(message_of([&] { check_batch(arrays.batch(), 4, WindowUse::kDecode); }),
                HasSubstr(c.message));
  }
}

TEST(CheckBatch, PromptsMayBeLongAndFoldsHaveNoWindows) {
  Arrays arrays;
  arrays.query_start = {0, 1000, 1000, 5000};
  auto batch = arrays.batch();
  batch.parent = nullptr;
  check_batch(batch, 4, WindowUse::kPrompt);
  arrays.cursors[0].ring_count = 2;
  check_batch(batch, 4, WindowUse::kAny);
  EXPECT_EQ(message_of([&] { check_batch(batch, 4, WindowUse::kPrompt); }),
            "batch.cursors[0].ring_count: expected an empty ring, got 2 rows");
  EXPECT_THAT(message_of([&] { check_batch(batch, 4, WindowUse::kDecode); }), HasSubstr("1000"));
  batch.query_start = nullptr;
  check_batch(batch, 4, WindowUse::kNone);
}

// Every cursor that begin leaves passes.
TEST(CheckBatch, AcceptsWhatBeginLeaves) {
  for (const int32_t buffer_len : {1, 3, 8}) {
    Arrays arrays;
    arrays.ring.buffer_len = buffer_len;
    arrays.slot = {0, -1, -1};
    arrays.query_start = {0, 0, 0, 0};
    arrays.cursors.fill(reset_cursor(arrays.ring));
    for (int step = 0; step < 40; ++step) {
      const int32_t window = step * 7 % 4;
      arrays.query_start = {0, window, window, window};
      begin_step(arrays.cursors[0], window, arrays.ring);
      auto batch = arrays.batch();
      batch.parent = nullptr;
      EXPECT_EQ(message_of([&] { check_batch(batch, 4, WindowUse::kDecode); }), "no error");
      commit_step(arrays.cursors[0], std::min(window, step % 3), Route::kOutputOnly);
    }
  }
}

TEST(CheckBatch, TargetsAreNeitherSourcesNorShared) {
  const Arrays arrays;
  const auto error = [&](std::array<int32_t, 3> targets) {
    return message_of([&] { check_targets(arrays.batch(), targets.data(), 4); });
  };
  EXPECT_EQ(error({1, -1, 2}), "no error");
  EXPECT_EQ(error({1, 2, -1}), "no error");
  EXPECT_THAT(error({1, -1, 1}), HasSubstr("target_slot[2]: expected a slot of its own"));
  EXPECT_THAT(error({1, -1, 3}),
              HasSubstr("target_slot[2]: expected a slot that is no source, got slot 3, which is "
                        "batch.slot[0]"));
  EXPECT_THAT(error({9, -1, 1}), HasSubstr("target_slot[0]: expected -1 or a slot below 4, got 9"));
}

TEST(CheckBatch, PathsAscendWithinTheirWindows) {
  const Arrays arrays;
  const auto error = [&](std::array<int32_t, 5> path, std::array<int32_t, 3> accepted) {
    return message_of([&] { check_path(arrays.batch(), path.data(), accepted.data()); });
  };
  EXPECT_EQ(error({0, 1, 0, 1, -7}, {2, 1, 1}), "no error");
  EXPECT_THAT(error({0, 1, 0, 1, 0}, {2, 1, 3}),
              HasSubstr("accepted[2]: expected 0 to the window's 2 tokens, got 3"));
  EXPECT_THAT(error({1, 1, 0, 0, 0}, {2, 1, 1}), HasSubstr("path[1]: expected 2 to 1, got 1"));
  EXPECT_THAT(error({0, 1, 0, 2, 0}, {2, 1, 1}), HasSubstr("path[3]: expected 0 to 1, got 2"));
}

}  // namespace
}  // namespace replayssm
