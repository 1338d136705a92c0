"""Makes `rentals.csv`: a spring of bicycle rentals in a town that does not exist.

Untidy on purpose: gaps, repeated rows, spellings, a counter that stuck. Every run writes the same
file: `python kernel_mcp/demo/generate.py`.
"""

from __future__ import annotations

import csv
import io
import math
from datetime import date, timedelta
from pathlib import Path
from random import Random

FILE = Path(__file__).parent / "rentals.csv"

_SEED = 20240301
_FIRST = date(2024, 3, 1)
_DAYS = 92
_STATIONS = {"Harbour": 210, "Museum": 150, "North Gate": 95, "University": 260}
_WEATHER = {"sun": (0.45, 1.15), "cloud": (0.33, 1.0), "rain": (0.22, 0.45)}


def generate() -> str:
    """The content of the file."""
    chance = Random(_SEED).random
    rows: list[list[str]] = []
    for day in range(_DAYS):
        when = _FIRST + timedelta(days=day)
        weather = _weather(chance())
        warmth = 6 + 13 * day / _DAYS + 4 * math.sin(day / 5) + 3 * (chance() - 0.5)
        for station, usual in _STATIONS.items():
            share = _WEATHER[weather][1] * (0.6 + warmth / 25) * (0.85 + 0.3 * chance())
            if when.weekday() >= 5:
                share *= 0.55 if station == "University" else 1.35
            row = [
                when.isoformat() if chance() > 0.04 else when.strftime("%Y/%m/%d"),
                _spelling(station, chance()),
                weather if chance() > 0.02 else "",
                f"{warmth:.1f}" if chance() > 0.05 else "",
                str(round(usual * share)) if chance() > 0.02 else "n/a",
                f"{14 + 8 * chance():.1f}" if chance() > 0.01 else "9999.0",
            ]
            rows += [row] * (2 if chance() < 0.03 else 1)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["date", "station", "weather", "temp_c", "rides", "avg_minutes"])
    writer.writerows(rows)
    return text.getvalue()


def _weather(draw: float) -> str:
    for name, (share, _) in _WEATHER.items():
        draw -= share
        if draw < 0:
            return name
    return "cloud"


def _spelling(station: str, draw: float) -> str:
    if draw < 0.03:
        return station.upper()
    return f" {station.lower()} " if draw < 0.05 else station


if __name__ == "__main__":
    FILE.write_text(generate(), encoding="utf-8")
