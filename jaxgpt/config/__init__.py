"""Configuration of a run. Each setting is named `section.key`."""

from jaxgpt.config.command import CommandParser, file_path, whole_number
from jaxgpt.config.errors import (
    UsageError,
    check_shape,
    expand_user,
    in_words,
    nearest,
    parse_yaml,
    read_json,
    shorten,
)
from jaxgpt.config.help import is_help
from jaxgpt.config.mesh import MeshShape, axes_with
from jaxgpt.config.parse import (
    TRAIN,
    checked,
    config_from_dict,
    config_from_file,
    load_config,
    override_data,
    parse_args,
    train_command,
)
from jaxgpt.config.sampling import Sampling
from jaxgpt.config.schedule import (
    profile_range,
    should_evaluate,
    should_run_every,
    skip_ranges,
    step_ranges,
)
from jaxgpt.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    SpikeConfig,
)
from jaxgpt.config.validate import (
    check_batch,
    describe_batch_size,
    devices_per_process,
    is_changed,
    mesh_shape,
    parse_mesh,
    with_batch_size,
)
