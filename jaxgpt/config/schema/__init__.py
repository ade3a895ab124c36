"""Every setting of a run, as frozen dataclasses: its type, its default, and a line about it.

The defaults are those of the preset `tiny`; --help shows them.
"""

from jaxgpt.config.schema.model import DataConfig, ModelConfig, OptimizerConfig
from jaxgpt.config.schema.run import CheckpointConfig, Config, SpikeConfig
