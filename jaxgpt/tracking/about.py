"""The names and settings of a run, for trackers."""

from typing import Any


def names(run: Any) -> dict[str, str | None]:
    """Return the `project`, `name` and `group` of a run.

    The default name is the name of the run directory, and the default group is None.
    """
    train = run.config.train
    return {
        "project": train.tracker_project,
        "name": train.tracker_name or run.directory.absolute().name,
        "group": train.tracker_group,
    }


def settings(config: Any) -> dict[str, Any]:
    """Return the settings of a run as a flat dict, with keys such as `out` and `model.n_layer`."""
    out: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        nested = value if isinstance(value, dict) else None
        out |= {name: value} if nested is None else {f"{name}.{k}": v for k, v in nested.items()}
    return out
