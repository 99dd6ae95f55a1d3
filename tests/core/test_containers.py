"""Containers of tensors."""

import numpy as np
import pytest

import regrad as rg


def test_tree_map():
    tree = {"a": [rg.ones(2), 3.0], "b": (np.zeros(1), None)}
    doubled = rg.tree_map(lambda x: x * 2, tree)
    assert doubled["a"][0].tolist() == [2.0, 2.0] and doubled["a"][1] == 6.0
    assert doubled["b"][0].tolist() == [0.0] and doubled["b"][1] is None
    summed = rg.tree_map(lambda x, y: (x, y), {"w": 1.0}, {"w": {"deep": 2}})
    assert summed == {"w": (1.0, {"deep": 2})}
    with pytest.raises(rg.errors.ArgumentError, match="tree_map: the structures do not fit"):
        rg.tree_map(lambda x, y: x, [1.0, 2.0], [1.0])
    with pytest.raises(rg.errors.ArgumentError, match="expected a function, got int"):
        rg.tree_map(3, [1.0])
