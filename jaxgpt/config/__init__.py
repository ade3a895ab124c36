"""The configuration of a run.

A setting is named `section.key` everywhere: in a YAML file, in `section.key=value`, in
`--section.key value`, and in every error.
"""

from jaxgpt.config.checks import (
    MESH_AXES,
    UsageError,
    check_batch,
    evaluation_is_due,
    expanded,
    is_due,
    mesh_sizes,
    profile_range,
    skip_ranges,
    step_ranges,
    validate,
)
from jaxgpt.config.command import CommandParser, file_path, name_or_path, whole_number
from jaxgpt.config.parse import (
    config_from_dict,
    config_from_file,
    is_help,
    load_config,
    names_config,
    parse_args,
)
from jaxgpt.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    FaultsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SpikeConfig,
    TrainConfig,
)

__all__ = [
    "MESH_AXES",
    "CheckpointConfig",
    "CommandParser",
    "Config",
    "DataConfig",
    "FaultsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SpikeConfig",
    "TrainConfig",
    "UsageError",
    "check_batch",
    "config_from_dict",
    "config_from_file",
    "evaluation_is_due",
    "expanded",
    "file_path",
    "is_due",
    "is_help",
    "load_config",
    "mesh_sizes",
    "name_or_path",
    "names_config",
    "parse_args",
    "profile_range",
    "skip_ranges",
    "step_ranges",
    "validate",
    "whole_number",
]
