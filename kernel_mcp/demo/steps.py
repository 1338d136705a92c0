"""What the demo asks of the server: one analysis, a step a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One cell: `expects` is text the answer must hold, `status` how the cell must end."""

    title: str
    code: str
    expects: str = ""
    status: str = "ok"
    picture: bool = False


LOAD = Step(
    "Load the file that was just uploaded",
    """\
import pandas as pd

rides = pd.read_csv("rentals.csv", na_values=["n/a"])
print(f"{len(rides)} rows, {rides.duplicated().sum()} of them repeated")
print(rides.isna().sum().to_string())
rides.head(4)""",
    expects="rows,",
)

CLEAN = Step(
    "Clean it; `rides` is still there from the call before",
    """\
rides = rides.drop_duplicates()
rides["date"] = pd.to_datetime(rides["date"], format="mixed")
rides["station"] = rides["station"].str.strip().str.title()
rides = rides[rides["avg_minutes"] < 600].dropna(subset=["rides", "weather"])
rides["temp_c"] = rides.groupby("date")["temp_c"].transform(lambda t: t.fillna(t.mean()))
print(f"{len(rides)} rows, stations: {', '.join(sorted(rides['station'].unique()))}")""",
    expects="stations: Harbour, Museum, North Gate, University",
)

GROUP = Step(
    "Group: rides a day by station and weather",
    """\
table = rides.pivot_table(index="station", columns="weather", values="rides", aggfunc="mean")
table = table[["sun", "cloud", "rain"]].round(0).astype(int)
table["lost in rain"] = ((1 - table["rain"] / table["sun"]) * 100).round().astype(int)
table""",
    expects="lost in rain",
)

PLOT = Step(
    "Plot it",
    """\
import matplotlib.pyplot as plt

colours = {"sun": "#f2b134", "cloud": "#9aa5b1", "rain": "#3a6ea5"}
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
table[list(colours)].plot.bar(ax=left, rot=0, color=list(colours.values()))
left.set(title="Rides a day", xlabel="")
for weather, colour in colours.items():
    days = rides[rides["weather"] == weather]
    right.scatter(days["temp_c"], days["rides"], s=14, color=colour, label=weather)
right.set(title="Warm days bring riders", xlabel="°C", ylabel="rides")
right.legend()
plt.show()""",
    picture=True,
)

REFUSED = Step(
    "A module that was not allowed",
    "import os",
    expects="--allow os",
    status="error",
)

KEPT = Step(
    "And the variables?",
    'print(f"{len(rides)} rows, {table.shape[0]} stations, all still here")',
    expects="still here",
)

ENDLESS = """\
import time

for second in range(3600):
    print("working", second)
    time.sleep(1)"""
