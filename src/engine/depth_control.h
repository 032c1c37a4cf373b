// How deep drafts are: as deep as pays, from what was accepted lately and what passes took.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/draft.h"

namespace replayssm {

// Seconds as a function of a count, from measurements: straight between counts that are known, flat
// in front of them, and behind them as steep as the last piece. Counts of similar size count as
// one. The first passes of a kind may take far longer than all others, since they prepare these: a
// count is known once it was measured three times, by the shortest of them. Where that is long ago,
// the sooner the fewer they were, it is to be measured anew.
class CostCurve {
 public:
  void add(int64_t count, double seconds);
  double at(int64_t count) const;  // 0 where nothing is known
  // Measurements since the last one of the count; very many where there was none.
  int64_t age(int64_t count) const;

 private:
  struct Point {
    double count = 0, seconds = 0;  // means of those measured lately
    int64_t measured = 0, time = 0;
  };
  static int64_t bucket(int64_t count);
  bool is_old(const Point& point) const;

  std::map<int64_t, Point> points_;
  int64_t time_ = 0;
};

class DepthControl {
 public:
  DepthControl(int64_t most_rows, bool adaptive) : most_rows_(most_rows), adaptive_(adaptive) {}

  // A pass over `rows` rows of so many decoding sequences; drafts of so many tokens for them.
  void time_pass(int64_t sequences, int64_t rows, double seconds);
  void time_draft(int64_t sequences, int64_t drafted, double seconds);

  // A request's draft: so many tokens were accepted.
  void count(Acceptance& request, int64_t accepted, int64_t drafted) {
    request.add(accepted, drafted);
    all_.add(accepted, drafted);
  }

  // Cuts the requests' depths. The expected tokens per second of the next pass are the measure: a
  // token of a draft brings the probability that all before it and itself are accepted, and costs a
  // row. Where nothing is drafted, one request in turn tries, now and then.
  void choose(std::span<DraftRequest> requests);
  // Which of so many requests tries at present; -1: none, so that drafters that follow it may rest.
  int64_t trying(int64_t requests) const {
    return passes_ % kTenure < kTries ? passes_ / kTenure % requests : -1;
  }

 private:
  // Of so many passes the same request tries in the first few.
  static constexpr int64_t kTenure = 256, kTries = 64;
  static constexpr double kMemory = 64;  // tokens

  struct Costs {
    CostCurve pass, draft;
  };
  Costs& costs_of(int64_t sequences);
  std::vector<int64_t> best(std::span<const DraftRequest> requests, const Costs& costs) const;
  bool tries(const Costs& costs) const;

  int64_t most_rows_;
  bool adaptive_;
  std::map<int64_t, Costs> costs_;  // of similar numbers of sequences, over rows beside theirs
  Acceptance all_{kMemory};         // of all requests' drafts
  int64_t passes_ = 0;
};

}  // namespace replayssm
