// Stop strings in a stream of text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace replayssm {

// Lets text through up to the first stop string that completes; where several complete on the same
// byte, up to the longest. Text that may still turn out to be the start of a stop string is held
// back. The result does not depend on how the text is cut into pushes.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stop);  // none of them empty

  // Returns the text that became certain. Nothing follows once matched() is true.
  std::string push(std::string_view text);
  // At the end of the text: what was held back.
  std::string finish();
  bool matched() const { return matched_; }

 private:
  std::vector<std::string> stop_;
  std::string held_;
  bool matched_ = false;
};

}  // namespace replayssm
