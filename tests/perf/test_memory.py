"""The lower bound on a step's memory."""

from jaxgpt.config import MeshShape, load_config
from jaxgpt.perf.memory import score_bytes


def test_a_pipeline_stores_the_scores_of_one_group_of_layers():
    words = ("model.n_layer=8", "model.attention=xla", "parallel.mesh=data=1,stage=2")
    words += ("train.gradient_accumulation_steps=2", "parallel.schedule=circular")
    shape = MeshShape(stage=2)
    once, twice = (
        score_bytes(load_config("tiny", *words, f"parallel.stage_repeats={n}"), shape, on_cpu=False)
        for n in (1, 2)
    )
    assert once == 2 * twice > 0


def test_a_ring_stores_no_scores():
    words = ("model.dropout=0", "parallel.mesh=context=2")
    shape = MeshShape(context=2)
    ring, ulysses = (
        score_bytes(load_config("tiny", *words, f"parallel.context_impl={impl}"), shape, True)
        for impl in ("ring", "ulysses")
    )
    assert ring == 0 < ulysses
