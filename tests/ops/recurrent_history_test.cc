// Random lives of sequences: every op in any order, beside the reference and beside a state that is
// updated at every token.
#include <gtest/gtest.h>

#include <algorithm>

#include "ops/cpu/slots.h"
#include "ops/read_copy_check.h"
#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

class RecurrentHistory : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

// A third of them with a read copy that is exact, a third with one of 8 bits.
std::vector<Case> copied_cases() {
  std::vector<Case> list = cases();
  for (size_t i = 0; i < list.size(); ++i) {
    if (i % 3 == 2) continue;
    list[i].checkpoint = DType::kFloat32;
    list[i].read_copy = i % 3 == 0   ? DType::kFloat32
                        : i % 2 == 0 ? DType::kInt8
                                     : DType::kFloat8E4M3;
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Shapes, RecurrentHistory, ::testing::ValuesIn(copied_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// A sequence that lives in slot 0 or 1 of a pool. Whatever it does, its outputs are those of the
// reference; in the end its state has the bits of the conventional one.
class Life {
 public:
  Life(const Case& c, const RingConfig& ring, uint32_t seed, ThreadPool& threads)
      : case_(c),
        threads_(threads),
        random_(seed),
        in_(random_inputs(c, kTokens, seed)),
        pool_(c, ring, 3),
        plain_case_(without_copy(c)),
        plain_(plain_case_, {}, 1),
        oracle_(c) {
    pool_.clear(0);
    pool_.cursors[0].ring_start += random_() % 500;
    pool_.cursors[0].ring_limit = 1 + static_cast<int32_t>(random_() % ring.buffer_len);
    plain_.clear(0);
  }

  void run_to_its_end() {
    while (next_ + pool_.ring().max_window <= kTokens) {
      switch (random_() % 8) {
        case 0: fold(case_, pool_, slot_, threads_); break;
        case 1: move(true); break;
        case 2: move(false); break;
        default: step(); break;
      }
      pool_.poison_ring(slot_);
    }
    fold(case_, pool_, slot_, threads_);
    EXPECT_LT(relative_error(pool_.slot_values(slot_), oracle_.state()), state_tolerance(case_));
    if (case_.checkpoint == DType::kFloat32) {
      EXPECT_TRUE(std::ranges::equal(pool_.slot(slot_), plain_.slot(0)));
    }
    EXPECT_TRUE(pool_.untouched(2));
    if (case_.read_copy) expect_copy_of_checkpoint(case_, pool_, slot_);
  }

 private:
  static constexpr int64_t kTokens = 80;

  // A window, chain or tree, of which a path is accepted.
  void step() {
    const int64_t tokens = random_() % (pool_.ring().max_window + 1);
    const Route route = kRoutes[1 + random_() % 2];
    Window window{&in_, next_, next_ + tokens, slot_, {}};
    std::vector<int64_t> path;
    if (random_() % 2 == 0) {
      for (int32_t i = 0; i < tokens; ++i)
        window.parent.push_back(static_cast<int32_t>(random_() % (i + 1)) - 1);
      if (tokens > 0) path = reference::path_to(window.parent, random_() % tokens);
    }
    if (path.empty()) {
      for (int64_t i = 0; i < tokens; ++i) path.push_back(i);
    }
    path.resize(random_() % (path.size() + 1));
    const auto o = run(case_, pool_, Op::kStep, route, {window}, threads_)[0];
    if (tokens > 0 && !pool_.scaled()) {
      EXPECT_LT(relative_error(o, oracle_.outputs(in_, next_, next_ + tokens, window.parent)),
                output_tolerance(case_))
          << name(case_) << " " << route_name(route) << " at " << next_;
    }
    if (!window.parent.empty()) compact(path, static_cast<int32_t>(tokens));
    commit_step(pool_.cursors[slot_], std::ssize(path), route);
    for (const int64_t i : path) {
      oracle_.commit(in_, next_ + i);
      decode(plain_case_, plain_, Route::kConventional, in_, next_ + i, next_ + i + 1, 1, threads_);
    }
    next_ += tokens;
  }

  // The accepted path of a tree becomes the first rows of its window.
  void compact(const std::vector<int64_t>& rows, int32_t tokens) {
    const int32_t query_start[] = {0, tokens}, accepted = static_cast<int32_t>(rows.size());
    std::vector<int32_t> path(rows.begin(), rows.end());
    path.resize(tokens, -1);
    CompactParams p;
    p.shape = case_.shape;
    p.batch = {1, query_start, &slot_, pool_.cursors.data(), pool_.ring()};
    p.state = pool_.state();
    p.path = path.data();
    p.accepted = &accepted;
    cpu::compact(p, threads_);
  }

  // To the other slot, as it stands or folded; what it leaves behind becomes NaN (pitfalls 16, 26:
  // a ring left behind, a copy forgotten).
  void move(bool folded) {
    const int32_t to = 1 - slot_;
    if (folded) {
      fold(case_, pool_, slot_, threads_, to);
    } else {
      SlotCopyParams p;
      p.shape = case_.shape;
      p.batch = {1, nullptr, &slot_, nullptr, pool_.ring()};
      p.state = pool_.state();
      p.target_slot = &to;
      cpu::slot_copy(p, threads_);
      pool_.cursors[to] = pool_.cursors[slot_];
    }
    for (PoolArray* array : pool_.arrays()) std::ranges::fill(array->slot(slot_), 0xff);
    slot_ = to;
  }

  static Case without_copy(Case c) {
    c.read_copy.reset();
    return c;
  }

  Case case_;
  ThreadPool& threads_;
  std::mt19937 random_;
  Inputs in_;
  Pool pool_;
  Case plain_case_;
  Pool plain_;
  Oracle oracle_;
  int32_t slot_ = 0;
  int64_t next_ = 0;
};

TEST_P(RecurrentHistory, AnyLifeIsThatOfItsCommittedTokens) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    std::mt19937 random(seed);
    const RingConfig ring{.buffer_len = 1 + static_cast<int32_t>(random() % 18),
                          .max_window = 1 + static_cast<int32_t>(random() % 8)};
    SCOPED_TRACE(name(GetParam()) + " seed " + std::to_string(seed) +
                 " B=" + std::to_string(ring.buffer_len) + " T=" + std::to_string(ring.max_window));
    Life(GetParam(), ring, seed, threads_).run_to_its_end();
  }
}

}  // namespace
}  // namespace replayssm::testing
