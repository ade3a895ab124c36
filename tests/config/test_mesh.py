"""Mesh shapes: named and short forms, and how to add an axis."""

import pytest

from jaxgpt.config import MeshShape, axes_with, check_batch, load_config, mesh_shape
from jaxgpt.config.mesh import AXES, SHORT_FORM


@pytest.mark.parametrize(
    ("text", "sizes", "short"),
    [
        ("2,1,4", (2, 1, 4), "2,1,4"),
        ("data=2,tensor=4", (2, 1, 4), "2,1,4"),
        ("tensor=4, data=2", (2, 1, 4), "2,1,4"),
        ("fsdp=-1", (1, -1, 1), "1,-1,1"),
        ("-1,2,4", (-1, 2, 4), "-1,2,4"),
    ],
)
def test_sizes_come_in_order_or_by_name(text, sizes, short):
    shape = MeshShape.parse(text)
    assert tuple(shape[axis] for axis in SHORT_FORM) == sizes and str(shape) == short
    assert load_config("tiny", "--mesh", text).parallel.mesh == text


@pytest.mark.parametrize(
    "text",
    ["", "2", "2,1", "2,1,4,1", "0,1,1", "-2,1,1", "-1,-1,1", "a,b,c", "rows=x", "data=2,data=4"]
    + ["data=2,4", "data=", "data=1=2", "data=2,"],
)
def test_other_texts_are_refused_with_examples(text):
    with pytest.raises(ValueError, match="2,1,4.*data=2,tensor=4"):
        MeshShape.parse(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("data=2,tensr=2", "did you mean tensor?"), ("rows=2", "use one of stage, data, fsdp, ")],
)
def test_an_unknown_axis_gets_the_nearest_one(text, hint):
    with pytest.raises(ValueError, match="is not a mesh axis; ") as caught:
        MeshShape.parse(text)
    assert hint in str(caught.value)


def test_the_number_of_devices_fills_minus_one():
    assert MeshShape(-1, 2, 4).fill(16) == MeshShape(2, 2, 4)
    for shape, n_devices in ((MeshShape(-1, 2, 4), 12), (MeshShape(2, 1, 4), 4)):
        with pytest.raises(ValueError, match=f"job.*{n_devices} devices"):
            shape.fill(n_devices)


def test_roles_say_over_how_many_devices_something_is_split():
    shape = MeshShape(2, 3, 4)
    assert shape.split_of("splits_batch") == 6
    assert shape.split_of("splits_heads") == 4
    assert axes_with("shards_parameters", "splits_heads") == ("fsdp", "tensor")


def test_a_further_axis_is_a_line_of_the_table(monkeypatch):
    monkeypatch.setitem(AXES, "replica", frozenset({"splits_batch", "reduces_gradients"}))
    config = load_config("tiny", "--mesh", "data=2,replica=3", "train.batch_size=24")
    shape = mesh_shape(config, 6)
    assert str(shape) == "data=2,replica=3" and shape.split_of("splits_batch") == 6
    check_batch(config, shape)
    assert str(MeshShape(2, 1, 4)) == "2,1,4"
