// Cursors moved on the device end where the host's arithmetic puts them.
#include "ops/cuda/cursors.h"

#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>

#include "ops/cuda/launches.h"
#include "replay/cursors.h"
#include "replay/step_plan.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

constexpr RingConfig kRing{.buffer_len = 16, .max_window = 7, .conv_kernel = 4};
constexpr int64_t kSlots = 700, kSequences = 300;

// Sequences and padding in random slots, targets among the slots that are no source.
struct Batch {
  explicit Batch(uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> slots(kSlots);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    for (int64_t s = 0; s < kSequences; ++s) {
      slot.push_back(random() % 5 == 0 ? -1 : slots[s]);
      target.push_back(random() % 5 == 0 ? -1 : slots[kSequences + s]);
      const auto window = static_cast<int32_t>(random() % (kRing.max_window + 1));
      query_start.push_back(query_start.back() + window);
      accepted.push_back(static_cast<int32_t>(random() % (window + 1)));
    }
    for (int64_t i = 0; i < kSlots; ++i) {
      const auto count = static_cast<int32_t>(random() % 17);
      cursors.push_back({.ring_start = 3 + (static_cast<int64_t>(random()) << 10),
                         .ring_count = count,
                         .ring_limit = count + static_cast<int32_t>(random() % (17 - count)),
                         .fold_count = static_cast<int32_t>(random() % 17)});
    }
    device_slot = slot, device_target = target, device_start = query_start;
    device_accepted = accepted;
  }
  SequenceBatch batch() const {
    return {kSequences, device_start.data(), device_slot.data(), nullptr, kRing};
  }

  std::vector<int32_t> slot, target, query_start{0}, accepted;
  std::vector<Cursor> cursors;
  DeviceArray<int32_t> device_slot, device_target, device_start, device_accepted;
};

// `device` enqueues on cursors in device memory what `host` does.
template <class Device, class Host>
void compare(const char* what, const Batch& b, Device&& device, Host&& host) {
  std::vector<Cursor> want = b.cursors;
  host(want.data());
  const auto got = same_in_every_run([&](bool graph) {
    const DeviceArray<Cursor> cursors(b.cursors);
    run_call([&](cudaStream_t stream) { device(cursors.data(), stream); }, graph);
    std::vector<Cursor> out;
    cursors.download(out);
    std::vector<std::array<int64_t, 4>> fields;
    for (const Cursor& c : out)
      fields.push_back({c.ring_start, c.ring_count, c.ring_limit, c.fold_count});
    return fields;
  });
  for (size_t i = 0; i < got.size(); ++i) {
    const Cursor& c = want[i];
    EXPECT_EQ(got[i],
              (std::array<int64_t, 4>{c.ring_start, c.ring_count, c.ring_limit, c.fold_count}))
        << what << " slot " << i;
  }
}

// Every sequence once, as its cursor says, in the order that the host would choose.
TEST(CudaCursors, BeginPlansTheStep) {
  REQUIRE_DEVICE();
  const Batch b(3);
  std::vector<SequencePlan> want(kSequences), plans;
  int32_t folds = 0, rank[2] = {};
  for (int32_t s = 0; s < kSequences; ++s) {
    const int32_t slot = b.slot[s], token = b.query_start[s];
    const int32_t window = b.query_start[s + 1] - token;
    plans.push_back({.sequence = s, .slot = slot, .token = token, .window = window});
    if (slot < 0) continue;
    Cursor cursor = b.cursors[slot];
    begin_step(cursor, window, kRing);
    plans.back() = plan_sequence(s, slot, token, window, cursor, kRing);
    folds += plans.back().folded > 0;
  }
  for (const SequencePlan& plan : plans) {
    const bool fold = plan.folded > 0;
    want[planned_place(fold, rank[fold]++, folds, kSequences)] = plan;
  }
  const auto got = same_in_every_run([&](bool graph) {
    const DeviceArray<Cursor> cursors(b.cursors);
    const DeviceArray<SequencePlan> plan{std::vector<SequencePlan>(kSequences)};
    SequenceBatch batch = b.batch();
    batch.plan = plan.data();
    run_call([&](cudaStream_t stream) { cuda::begin_steps(batch, cursors.data(), stream); }, graph);
    std::vector<SequencePlan> out;
    plan.download(out);
    std::vector<std::array<int32_t, 8>> fields;
    for (const SequencePlan& p : out) fields.push_back(std::bit_cast<std::array<int32_t, 8>>(p));
    return fields;
  });
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_EQ(got[i], (std::bit_cast<std::array<int32_t, 8>>(want[i]))) << "place " << i;
}

TEST(CudaCursors, MoveAsOnTheHost) {
  REQUIRE_DEVICE();
  for (const uint32_t seed : {1u, 2u}) {
    const Batch b(seed);
    const auto device = b.batch();
    const auto *slot = b.slot.data(), *start = b.query_start.data(), *target = b.target.data();
    const auto *device_target = b.device_target.data(), *accepted = b.device_accepted.data();
    compare(
        "reset", b, [&](Cursor* c, auto stream) { cuda::reset_slots(device, c, stream); },
        [&](Cursor* c) { reset_slots(kSequences, slot, kRing, c); });
    compare(
        "begin", b, [&](Cursor* c, auto stream) { cuda::begin_steps(device, c, stream); },
        [&](Cursor* c) { begin_steps(kSequences, slot, start, kRing, c); });
    for (const Route route : {Route::kConventional, Route::kOutputOnly}) {
      compare(
          "commit", b,
          [&](Cursor* c, auto stream) { cuda::commit_steps(device, accepted, route, c, stream); },
          [&](Cursor* c) { commit_steps(kSequences, slot, b.accepted.data(), route, c); });
    }
    compare(
        "prefill", b, [&](Cursor* c, auto stream) { cuda::commit_prefills(device, c, stream); },
        [&](Cursor* c) { commit_prefills(kSequences, slot, start, kRing, c); });
    compare(
        "fold", b, [&](Cursor* c, auto stream) { cuda::commit_folds(device, c, stream); },
        [&](Cursor* c) { commit_folds(kSequences, slot, nullptr, c); });
    compare(
        "fold elsewhere", b,
        [&](Cursor* c, auto stream) { cuda::commit_folds(device, device_target, c, stream); },
        [&](Cursor* c) { commit_folds(kSequences, slot, target, c); });
    compare(
        "copy", b,
        [&](Cursor* c, auto stream) { cuda::copy_cursors(device, device_target, c, stream); },
        [&](Cursor* c) { copy_cursors(kSequences, slot, target, c); });
  }
}

TEST(CudaCursors, MissingArgumentsAreNamed) {
  Cursor cursor;
  int32_t slot = 0;
  const auto message = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([&] { cuda::begin_steps({1, nullptr, &slot, nullptr, {}}, &cursor, nullptr); }),
            "batch.query_start: expected memory, got a null pointer");
  EXPECT_EQ(
      message([&] { cuda::reset_slots({1, nullptr, nullptr, nullptr, {}}, &cursor, nullptr); }),
      "batch.slot: expected memory, got a null pointer");
  EXPECT_EQ(message([&] {
              cuda::copy_cursors({1, nullptr, &slot, nullptr, {}}, nullptr, &cursor, nullptr);
            }),
            "target_slot: expected memory, got a null pointer");
  EXPECT_EQ(message([&] { cuda::reset_slots({}, nullptr, nullptr); }), "");
}

}  // namespace
}  // namespace replayssm::testing
