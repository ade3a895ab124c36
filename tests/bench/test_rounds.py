"""What benchmarks replace: the data, and the checkpoints of the training loop."""

import re
from pathlib import Path
from types import SimpleNamespace

from jaxgpt.bench.rounds import NoCheckpoints, _with_data
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import load_config
from jaxgpt.data.dataset import open_dataset, with_vocabulary
from jaxgpt.train import loop


def test_random_tokens_can_replace_the_data_of_a_large_vocabulary(tmp_path):
    job = SimpleNamespace(cluster=ProcessGroup("test"), folder=tmp_path)
    config, why = _with_data(load_config("tiny", "model.vocab_size=128256"), True, job)
    config = with_vocabulary(config, open_dataset(config.data, config.model))
    assert config.model.vocab_size == 128256 and why == "random tokens, because --synthetic"


def test_no_checkpoints_has_every_method_that_the_training_loop_calls():
    called = set(re.findall(r"\bcheckpoints\.([a-z_]+)\(", Path(loop.__file__).read_text()))
    assert {"check", "save", "close", "newest_complete"} <= called
    assert called <= set(dir(NoCheckpoints))
