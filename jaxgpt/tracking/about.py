"""The names and settings of a run, for trackers."""

from collections.abc import Mapping
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


def flat_settings(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a flat dict, with keys such as `out` and `model.n_layer`.

    `nested` is the result of `Config.to_dict` or the content of a config.yaml.
    """
    out: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            out |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            out[name] = value
    return out
