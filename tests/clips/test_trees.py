"""`partition` and `combine`: leaves that are taken out of a tree and put back."""

import dataclasses

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from clipgrad._arrays.trees import combine, is_clippable, is_none, map_clippable, partition
from tests.helpers import array, key_of

LEAVES = [
    None, 1, 2.5, True, "text", np.ones(2), array([0.0] * 3), array([0, 1], np.int32),
    key_of(0), np.zeros(2, jax.dtypes.float0),
]  # fmt: skip
leaves = st.sampled_from(LEAVES)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


def flat(tree):
    return jax.tree.leaves(tree, is_leaf=is_none)


def structure(tree):
    return jax.tree.structure(tree, is_leaf=is_none)


def assert_is_the_same(actual, expected):
    assert structure(actual) == structure(expected)
    assert all(a is b for a, b in zip(flat(actual), flat(expected), strict=True))


@pytest.mark.slow
@hypothesis.given(tree=trees, data=st.data())
def test_combine_undoes_partition(tree, data):
    number = len(flat(tree))
    flags = data.draw(st.lists(st.booleans(), min_size=number, max_size=number))
    chosen, rest = partition(tree, flags)
    assert_is_the_same(combine(chosen, rest), tree)
    assert structure(chosen) == structure(tree)
    for leaf, flag, a, b in zip(flat(tree), flags, flat(chosen), rest, strict=True):
        inside, outside = (a, b) if flag else (b, a)
        assert inside is leaf and outside is None


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Strict:
    """A node that can't be made of ``None``, as those of some libraries."""

    value: object

    def __post_init__(self):
        if self.value is None:
            raise TypeError("value: got None")

    def tree_flatten(self):
        return [self.value], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_a_node_that_refuses_none_passes_where_all_leaves_are_chosen():
    tree = [Strict(array(np.ones(2))), Strict(array(np.zeros(1)))]
    chosen, rest = partition(tree, is_clippable)
    assert rest == [None, None]
    np.testing.assert_array_equal(combine(chosen, rest)[0].value, [1, 1])
    doubled = map_clippable(lambda leaf: 2 * leaf, tree)
    np.testing.assert_array_equal(doubled[0].value, [2, 2])
