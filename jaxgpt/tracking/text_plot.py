"""Plots as text, for terminals."""

import numpy as np

HEIGHT = 8  # height of a plot in lines
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # bits of braille dots
BLANK, MARGIN = 0x2800, 11  # MARGIN: columns for the limits of the y-axis


def plot_text(steps: np.ndarray, values: np.ndarray, width: int, axis: str = "step") -> list[str]:
    """Return the lines of a plot, including the limits of both axes.

    The plot is `width` columns wide, but at least 31. Long axis limits or a long `axis` may make a
    line wider. `steps` (N,) must be increasing, and `values` (N,) must contain at least one finite
    value. Finite values are connected by lines, and other values are skipped. `axis` is the name of
    the x-axis. Each character is a braille cell of 2 x 4 dots.
    """
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    low, high, columns = values.min(), values.max(), max(20, width - MARGIN)
    between = np.linspace(steps[0], steps[-1], 2 * columns)  # connect the points with lines
    first, last = f"{axis} {steps[0]:,}", f"{steps[-1]:,}"
    values = np.append(values, np.interp(between, steps, values))
    steps = np.append(steps, between)
    x = (steps - steps[0]) / max(np.ptp(steps), 1) * (2 * columns - 1)
    y = (high - values) / (high - low if high > low else 1) * (4 * HEIGHT - 1)
    x, y = x.round().astype(int), y.round().astype(int)
    dots = np.zeros((HEIGHT, 4, columns, 2), int)
    dots[y // 4, y % 4, x // 2, x % 2] = 1
    cells = BLANK + np.einsum("hacb,ab->hc", dots, DOTS)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    rows = zip(labels, cells.tolist(), strict=True)
    lines = [f"{label:>{MARGIN - 1}} {''.join(map(chr, row))}" for label, row in rows]
    return [*lines, f"{'':{MARGIN}}{first}{last:>{max(0, columns - len(first))}}"]
