"""Plots `replayssm bench accuracy MODEL --precision-sweep --json` as an SVG.

    python3 tools/plot_precision.py sweep.svg MODEL.json [MODEL.json ...]

Per model two panels: the read copy rounded alone, and the recurrence rounded alone. KL against
float32 by quarter of the window; one colour per format, one line style per buffer length. Needs
matplotlib.
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "replayssm", "font.size": 9})
from matplotlib import pyplot  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

STYLES = [":", "-", "--", "-."]
PANELS = [("read", "recurrence", "read copy rounded"), ("recurrence", "read", "recurrence rounded")]


def draw(axes, results, varied, other, colours, styles):
    for result in results:
        if result[other] != "float32" or result[varied] == "float32":
            continue
        axes.plot(
            [1, 2, 3, 4],
            result["quarter_kl"],
            color=colours[result[varied]],
            linestyle=styles[result["buffer_len"]],
            marker="o",
            markersize=3,
        )


def main(target, sources):
    reports = []
    for source in sources:
        with open(source, encoding="utf-8") as file:
            reports.append(json.load(file))
    results = [result for report in reports for result in report["results"]]
    formats = list(dict.fromkeys(r[side] for r in results for side in ("read", "recurrence")))
    formats.remove("float32")
    colours = {name: f"C{i}" for i, name in enumerate(formats)}
    buffers = sorted({result["buffer_len"] for result in results})
    styles = {length: STYLES[i % len(STYLES)] for i, length in enumerate(buffers)}

    figure, grid = pyplot.subplots(
        len(reports), 2, figsize=(8, 3 * len(reports)), sharex=True, sharey=True, squeeze=False
    )
    for report, row in zip(reports, grid):
        for axes, (varied, other, title) in zip(row, PANELS):
            draw(axes, report["results"], varied, other, colours, styles)
            axes.set_title(f"{report['model']}: {title}")
            axes.set_yscale("log")
            axes.set_xticks([1, 2, 3, 4])
            axes.grid(alpha=0.3)
        row[0].set_ylabel("mean KL to float32")
    for axes in grid[-1]:
        axes.set_xlabel(f"quarter of the window of {reports[-1]['window']} tokens")
    lines = [Line2D([], [], color=colours[name], label=name) for name in formats]
    lines += [
        Line2D([], [], color="black", linestyle=styles[length], label=f"buffer {length}")
        for length in buffers
    ]
    figure.legend(handles=lines, loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.5 / (3 * len(reports)), 1, 1))
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
