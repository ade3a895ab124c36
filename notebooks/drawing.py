"""Figures for the lessons: the elements that each device holds, and the shards of an array."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

# One color per device, light enough for black text.
COLORS = ["#8ecae6", "#ffb703", "#90be6d", "#f4978e", "#cdb4db", "#ffe066", "#83c5be", "#d4a373"]
MIXED = "#e0e0e0"  # for a sum over devices

plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.titlesize": 10})


def values_by_device(array):
    """Return each addressable device's shard of an array as a NumPy array, keyed by device ID."""
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}


def draw_devices(ax, array, title, color_by="device", n_devices=8):
    """Draw one column of numbers per device. Zeros are left blank.

    Args:
        ax: the axes to draw on.
        array: the array to draw, of any shape.
        title: the title of the drawing.
        color_by: "device" colors a number by its device, "position" colors it by its position in
            the column, and "sum" colors all numbers gray. A device ID colors all numbers with that
            device's color.
        n_devices: number of columns. Devices with IDs from `n_devices` on are not drawn.
    """
    parts = {device: part.ravel() for device, part in values_by_device(array).items()}
    height = max(part.size for part in parts.values())
    for device in range(n_devices):
        ax.text(device + 0.5, -0.15, str(device), ha="center", va="bottom", color="grey")
        for position, value in enumerate(parts.get(device, np.zeros(height))):
            by = {"device": device, "position": position}.get(color_by, color_by)
            color = MIXED if by == "sum" else COLORS[by % 8]
            face = color if value else "white"
            ax.add_patch(Rectangle((device, position), 1, 1, facecolor=face, edgecolor="white"))
            text = f"{value:g}" if value else ""
            ax.text(device + 0.5, position + 0.52, text, ha="center", va="center", fontsize=8)
        ax.add_patch(Rectangle((device, 0), 1, height, fill=False, edgecolor="grey", linewidth=1))
    ax.set(xlim=(-0.1, n_devices + 0.1), ylim=(height + 0.1, -0.9))
    ax.set_title(title)
    ax.axis("off")


def draw_before_after(before, after, name, colors=("device", "device")):
    """Draw the numbers on eight devices before and after a collective.

    `colors` has the value of `color_by` for each of the two drawings.
    """
    heights = [max(v.size for v in values_by_device(a).values()) for a in (before, after)]
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.75 + 0.19 * max(heights)))
    titles = (f"before {name}", f"after {name}")
    for ax, array, title, color_by in zip(axes, (before, after), titles, colors, strict=True):
        draw_devices(ax, array, title, color_by)
        ax.set_ylim(max(heights) + 0.1, -0.9)  # both drawings have the same scale
    plt.show()


def draw_shards(ax, array, title, names=("row", "column")):
    """Draw the shards of an array's last two dimensions, and the devices that hold each shard.

    If more than four devices hold a shard, the label is "all devices". `names` are the names of the
    two dimensions.
    """
    rows, columns = array.shape[-2:]
    owners = {}
    for shard in array.addressable_shards:
        place = shard.index[-2].indices(rows)[:2], shard.index[-1].indices(columns)[:2]
        owners.setdefault(place, []).append(shard.device.id)
    for ((top, bottom), (left, right)), devices in owners.items():
        size = (right - left, bottom - top)
        color = COLORS[min(devices) % 8]
        ax.add_patch(Rectangle((left, top), *size, facecolor=color, edgecolor="white", lw=2))
        text = "device" + ("s\n" if len(devices) > 1 else "\n") + ", ".join(map(str, devices))
        if len(devices) > 4:
            text = "all\ndevices"
        ax.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=8)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[0, columns], yticks=[0, rows])
    ax.set(xlabel=names[1], ylabel=names[0], title=title)
    ax.set_aspect("equal")
