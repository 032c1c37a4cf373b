// The part of load_config that works on texts instead of files.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "model/config.h"

namespace replayssm {

struct ConfigText {
  std::string file;  // for messages
  std::string_view text;
};

ModelConfig parse_config(const ConfigText& config, const std::optional<ConfigText>& generation);

}  // namespace replayssm
