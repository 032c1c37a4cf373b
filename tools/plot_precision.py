"""Plots `replayssm bench accuracy MODEL --precision-sweep --json` as an SVG; prints its tables.

    python3 tools/plot_precision.py sweep.svg SWEEP.json [SWEEP.json ...]

Per model two panels: the read copy rounded alone, and the recurrence rounded alone. KL against
float32 by quarter of the window; one colour per format, one line style per buffer length. The
tables, in Markdown, are the same figures and the mean KL of every pair of formats. Needs
matplotlib.
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "replayssm", "svg.fonttype": "none", "font.size": 9})
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


def read_reports(sources):
    """One report per model; files of the same model are put together."""
    reports = {}
    for source in sources:
        with open(source, encoding="utf-8") as file:
            report = json.load(file)
        if report["model"] in reports:
            reports[report["model"]]["results"] += report["results"]
        else:
            reports[report["model"]] = report
    return list(reports.values())


def print_row(cells):
    print("| " + " | ".join(cells) + " |")


def print_header(cells):
    print_row(cells)
    print_row(["---"] * len(cells))


def print_alone(report, buffers):
    """First and last quarter of every format that is rounded alone."""
    print_header(["rounded", "format"] + [f"buffer {length}" for length in buffers])
    for varied, other, title in PANELS:
        chosen = [r for r in report["results"] if r[other] == "float32" != r[varied]]
        for name in dict.fromkeys(r[varied] for r in chosen):
            by_buffer = {r["buffer_len"]: r["quarter_kl"] for r in chosen if r[varied] == name}
            quarters = [by_buffer[length] for length in buffers]
            ends = [f"{first:.1e} → {last:.1e}" for first, *_, last in quarters]
            print_row([title.removesuffix(" rounded"), name] + ends)


def print_pairs(report, buffer_len):
    """The mean KL of every pair: one row per recurrence, one column per read format."""
    chosen = [r for r in report["results"] if r["buffer_len"] == buffer_len]
    reads = list(dict.fromkeys(r["read"] for r in chosen))
    print_header(["recurrence \\ read"] + reads)
    for name in dict.fromkeys(r["recurrence"] for r in chosen):
        means = {r["read"]: r["mean_kl"] for r in chosen if r["recurrence"] == name}
        print_row([name] + [f"{means[read]:.1e}" for read in reads])


def main(target, sources):
    reports = read_reports(sources)
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

    for report in reports:
        print(f"\n{report['model']}, {report['tokens']} tokens:\n")
        print_alone(report, buffers)
        print(f"\nMean KL at buffer {buffers[len(buffers) // 2]}:\n")
        print_pairs(report, buffers[len(buffers) // 2])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
