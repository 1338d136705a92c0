"""Draws docs/benchmarks.png: a cell that is run in a session of our own server.

`data.json` holds {"bars": [[title, times better], …], "growth": {name: [[sessions, MiB], …]}}.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]

OURS, FLOOR, INK, GRID = "#2f6fb5", "#8a929c", "#22262b", "#e6e8eb"

data = json.loads(Path("data.json").read_text())
plt.rcParams.update({"font.size": 10, "text.color": INK, "axes.labelcolor": INK})
plt.rcParams.update({"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": GRID})
figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 4.6), width_ratios=(3, 2), layout="constrained", dpi=150
)

names, times = zip(*data["bars"][::-1], strict=True)
bars = left.barh(names, times, color=OURS, height=0.62)
labels = [f"{value:.2g}x" if value < 10 else f"{value:.0f}x" for value in times]
left.bar_label(bars, labels, padding=4, color=INK)
left.set_xscale("log")
left.set_xlim(min(1, min(times) * 0.8), max(times) * 2)
left.minorticks_off()
left.set_title("Times better than jupyter_client + ipykernel", loc="left", fontsize=11)
left.set_xticks([1, 10, 100], ["1x", "10x", "100x"])
left.grid(axis="x", color=GRID)

for name, points in data["growth"].items():
    colour = OURS if name.startswith("kernel-mcp") else FLOOR
    counts, values = zip(*points, strict=True)
    right.plot(counts, values, "o-", color=colour, linewidth=2, markersize=5)
    right.annotate(
        name, (counts[-1], values[-1]), (0, 8), textcoords="offset points",
        color=colour, ha="right", va="bottom", fontsize=9,
    )  # fmt: skip
right.set_xticks(sorted({count for points in data["growth"].values() for count, _ in points}))
right.set_ylim(0, right.get_ylim()[1] * 1.08)
right.set_xlabel("sessions")
right.set_title("MiB of all processes, pandas used", loc="left", fontsize=11)
right.grid(axis="y", color=GRID)

for axes in (left, right):
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
plt.show()
