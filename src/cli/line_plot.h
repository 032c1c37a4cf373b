// Figures of lines over a logarithmic axis, as SVG.
#pragma once

#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

namespace replayssm::cli {

struct PlotLine {
  std::string name;
  std::vector<double> x{}, y{};  // as many of each
};

struct LinePlot {
  std::string title, x_label;
  std::vector<PlotLine> lines;
};

// The plots side by side. x is above 0, its ticks are the first line's values; y begins at 0.
std::string svg(std::span<const LinePlot> plots);

// Tokens per second over batch sizes, and beside them how many times those of the first line.
std::string speed_plots(const std::string& title, const std::vector<PlotLine>& tokens_per_second);

// Where a command's figure goes (--plot), opened before anything is measured; an empty path:
// nowhere. Throws Error where it cannot be written to.
class PlotFile {
 public:
  explicit PlotFile(const std::filesystem::path& path);
  void write(const std::string& figure);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace replayssm::cli
