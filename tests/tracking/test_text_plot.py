import unicodedata

import numpy as np

from jaxgpt.tracking.text_plot import plot_text


def dots(line):
    """Return the (row, column) of each dot in a line, by the names of its braille characters."""
    places = {"1": (0, 0), "2": (1, 0), "3": (2, 0), "4": (0, 1), "5": (1, 1), "6": (2, 1)}
    places |= {"7": (3, 0), "8": (3, 1)}
    for i, character in enumerate(line):
        name = unicodedata.name(character)  # such as BRAILLE PATTERN DOTS-147
        for number in name.partition("DOTS-")[2]:
            row, column = places[number]
            yield row, 2 * i + column


def test_a_falling_line_is_drawn_from_corner_to_corner():
    *rows, axis = plot_text(np.arange(1, 101), np.linspace(7.5, 2.5, 100), width=51)
    assert max(map(len, (*rows, axis))) == 51
    assert rows[0].split()[0] == "7.5" and rows[-1].split()[0] == "2.5"
    assert axis.split() == ["step", "1", "100"]
    found = {(4 * i + r, c) for i, line in enumerate(rows) for r, c in dots(line[11:])}
    height, width = 4 * len(rows) - 1, 2 * 40 - 1
    assert {(0, 0), (height, width)} <= found
    assert {c for _, c in found} == set(range(width + 1))  # without gaps
    assert all(abs(r / height - c / width) < 1.1 / height for r, c in found)


def test_gaps_and_constant_values_are_drawn():
    assert plot_text(np.arange(3), np.array([np.nan, 2.0, np.nan]), 40)[0].split()[0] == "2"
    rows = plot_text(np.array([5, 6]), np.array([1.0, 1.0]), 40)
    assert rows[-1].split() == ["step", "5", "6"]


def test_limits_that_are_longer_than_the_plot_are_shown():
    *_, axis = plot_text(np.array([10**12, 2 * 10**12]), np.array([1.0, 2.0]), 31, "tokens")
    assert "1,000,000,000,000" in axis and "2,000,000,000,000" in axis
