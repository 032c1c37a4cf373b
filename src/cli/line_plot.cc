#include "cli/line_plot.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.h"

namespace replayssm::cli {
namespace {

constexpr double kWidth = 420, kHeight = 344;                       // of a plot
constexpr double kLeft = 64, kRight = 16, kTop = 36, kBottom = 72;  // around its lines
constexpr std::array kColours = {"#6b6b6b", "#c2701c", "#1c6dc2", "#2c8a3e", "#8a2c7a"};

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '&': result += "&amp;"; break;
      default: result += c;
    }
  }
  return result;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     escaped(text));
}

std::string line_between(double x0, double y0, double x1, double y1) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#dddddd\"/>\n", x0,
      y0, x1, y1);
}

// The least of 1, 2 and 5 times a power of ten that cuts `largest` into at most `most` steps.
double tick_of(double largest, int most) {
  const double power = std::pow(10, std::floor(std::log10(largest / most)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power * most >= largest) return factor * power;
  }
  return 10 * power;
}

class Drawing {
 public:
  Drawing(const LinePlot& plot, double left) : plot_(plot), left_(left + kLeft) {
    for (const PlotLine& line : plot.lines) {
      for (const double x : line.x) {
        x0_ = std::min(x0_, std::log(x));
        x1_ = std::max(x1_, std::log(x));
      }
      for (const double y : line.y) largest_ = std::max(largest_, y);
    }
    tick_ = tick_of(largest_, 6);
    largest_ = std::ceil(largest_ / tick_) * tick_;
  }

  std::string text() const {
    std::string out = text_at(left_ + width() / 2, kTop - 14, "middle", plot_.title);
    out += text_at(left_ + width() / 2, kHeight - 34, "middle", plot_.x_label);
    const int ticks = static_cast<int>(std::lround(largest_ / tick_));
    for (int i = 0; i <= ticks; ++i) {
      const double y = i * tick_;
      out += line_between(left_, y_of(y), left_ + width(), y_of(y));
      out += text_at(left_ - 6, y_of(y) + 4, "end", fmt::format("{:.6g}", y));
    }
    for (const double x : plot_.lines.front().x)
      out += text_at(x_of(x), kHeight - kBottom + 18, "middle", fmt::format("{:.6g}", x));
    for (size_t i = 0; i < plot_.lines.size(); ++i) out += curve(i);
    return out;
  }

 private:
  static double width() { return kWidth - kLeft - kRight; }
  double x_of(double x) const {
    return x1_ > x0_ ? left_ + (std::log(x) - x0_) / (x1_ - x0_) * width() : left_ + width() / 2;
  }
  double y_of(double y) const {
    return kHeight - kBottom - y / largest_ * (kHeight - kTop - kBottom);
  }

  std::string curve(size_t index) const {
    const PlotLine& line = plot_.lines[index];
    const std::string colour = kColours[index % kColours.size()];
    std::string points, out;
    for (size_t i = 0; i < line.x.size(); ++i) {
      const double x = x_of(line.x[i]), y = y_of(line.y[i]);
      points += fmt::format("{:.1f},{:.1f} ", x, y);
      out +=
          fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x, y, colour);
    }
    out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n",
                       points, colour);
    // Names stand side by side below, where no line runs.
    const double share = (width() + kLeft) / static_cast<double>(plot_.lines.size());
    const double x = left_ - kLeft + share * (static_cast<double>(index) + 0.5);
    out += fmt::format("<g fill=\"{}\">{}</g>\n", colour,
                       text_at(x, kHeight - 12, "middle", line.name));
    return out;
  }

  const LinePlot& plot_;
  double left_;
  double x0_ = HUGE_VAL, x1_ = -HUGE_VAL, largest_ = 1e-9, tick_ = 0;
};

}  // namespace

std::string svg(std::span<const LinePlot> plots) {
  const double width = kWidth * static_cast<double>(plots.size());
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      width, kHeight);
  for (size_t i = 0; i < plots.size(); ++i)
    out += Drawing(plots[i], kWidth * static_cast<double>(i)).text();
  return out + "</svg>\n";
}

std::string speed_plots(const std::string& title, const std::vector<PlotLine>& tokens_per_second) {
  const PlotLine& base = tokens_per_second.front();
  const std::string x_label = "batch size";
  std::array<LinePlot, 2> plots = {
      LinePlot{.title = title + ": tokens/s", .x_label = x_label, .lines = tokens_per_second},
      LinePlot{
          .title = "speed-up over " + base.name, .x_label = x_label, .lines = tokens_per_second}};
  for (PlotLine& line : plots[1].lines) {
    for (size_t i = 0; i < line.y.size(); ++i) line.y[i] /= base.y[i];
  }
  return svg(plots);
}

PlotFile::PlotFile(const std::filesystem::path& path) : path_(path) {
  if (path.empty()) return;
  file_.open(path);
  if (!file_) fail("--plot: cannot write to ", path.string());
}

void PlotFile::write(const std::string& figure) {
  if (!(file_ << figure << std::flush)) fail("--plot: cannot write to ", path_.string());
}

}  // namespace replayssm::cli
