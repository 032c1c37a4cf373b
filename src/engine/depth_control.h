// How deep drafts are: as deep as pays, from what was accepted lately and what passes took.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/draft.h"

namespace replayssm {

// Seconds as a function of a count, from measurements: straight between counts that were measured,
// flat in front of them, and behind them as steep as the last piece.
class CostCurve {
 public:
  void add(int64_t count, double seconds);
  bool empty() const { return points_.empty(); }
  double at(int64_t count) const;
  // Passes since the count was measured last; very many where it never was.
  int64_t age(int64_t count) const;

 private:
  struct Point {
    double seconds = 0;
    int64_t time = 0;
  };
  static int64_t bucket(int64_t count);

  std::map<int64_t, Point> points_;
  int64_t time_ = 0;
};

class DepthControl {
 public:
  DepthControl(int64_t most_rows, bool adaptive) : most_rows_(most_rows), adaptive_(adaptive) {}

  // A pass over `rows` rows of so many decoding sequences; drafts of so many tokens for them.
  void time_pass(int64_t sequences, int64_t rows, double seconds);
  void time_draft(int64_t sequences, int64_t drafted, double seconds);

  // Cuts the requests' depths. The expected tokens per second of the next pass are the measure: a
  // token of a draft brings the probability that all before it and itself are accepted, and costs a
  // row. Where nothing is drafted, one request in turn tries.
  void choose(std::span<DraftRequest> requests);
  // Which of so many requests tries at present.
  int64_t trying(int64_t requests) const { return passes_ / kTenure % requests; }

 private:
  static constexpr int64_t kTenure = 256;  // passes for which the same request tries

  struct Costs {
    CostCurve pass, draft;
  };
  Costs& costs_of(int64_t sequences);
  void probe(std::span<DraftRequest> requests, const Costs& costs);

  int64_t most_rows_;
  bool adaptive_;
  std::map<int64_t, Costs> costs_;  // of similar numbers of sequences
  int64_t passes_ = 0;
};

}  // namespace replayssm
