"""The examples of a batch, exchanged among its places without a change of shapes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._trees import is_array, nearest, with_paths

IN_BATCH = "args[1]"  # the name of the inputs that are in the batch begins so


def example_count(batch: Any) -> int:
    """The number of examples: the one leading axis of all arrays."""
    shapes = {path: np.shape(x) for path, x in with_paths(batch) if is_array(x) and np.ndim(x)}
    sizes = {shape[0] for shape in shapes.values()}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            f"batch: got arrays of shapes {list(shapes.values())}, expected one leading axis for "
            "all, of at least two examples"
        )
    return sizes.pop()


def chosen_examples(examples: int | Sequence[int] | None, size: int) -> np.ndarray:
    """Whether each example is one of those that are held beside others; by default half of them."""
    half = np.random.default_rng(0).permutation(size)[: size // 2].tolist()
    wanted = half if examples is None else examples
    numbers = [wanted] if isinstance(wanted, int) else list(wanted)
    known = all(isinstance(i, int | np.integer) and -size <= i < size for i in numbers)
    if not known or not 0 < len({i % size for i in numbers}) < size:
        raise ValueError(
            f"examples: got {examples!r} of {size} examples, expected some of their positions, and "
            "not all"
        )
    chosen = np.zeros(size, bool)
    chosen[numbers] = True
    return chosen


class Exchange(NamedTuple):
    """The inputs of a program, and which of them have the axis of the examples.

    Attributes:
      inputs: the arrays.
      names: their names.
      is_cut: whether each has that axis.
      size: the number of examples.
    """

    inputs: list[Any]
    names: list[str]
    is_cut: list[bool]
    size: int

    @classmethod
    def of(cls, inputs: list[Any], names: list[str], size: int) -> "Exchange":
        """The inputs of a subject."""
        pairs = zip(inputs, names, strict=True)
        return cls(
            inputs, names, [name.startswith(IN_BATCH) and np.ndim(x) > 0 for x, name in pairs], size
        )

    def with_examples(self, numbers: np.ndarray) -> list[Any]:
        """The inputs with these examples in the places of the batch."""
        return [
            _rows(x, numbers) if is_cut else x
            for x, is_cut in zip(self.inputs, self.is_cut, strict=True)
        ]

    def with_batch(self, batch: Any) -> list[Any]:
        """The inputs with another batch of the same types; the weights stay."""
        left = iter([x for x in jax.tree.leaves(batch) if is_array(x)])
        pairs = zip(self.inputs, self.names, strict=True)
        return [next(left) if name.startswith(f"{IN_BATCH}[0]") else x for x, name in pairs]

    @property
    def is_uniform(self) -> bool:
        """Whether all examples are equal."""
        pairs = zip(self.inputs[:-1], self.is_cut, strict=False)  # the last are weights
        return all(_all_equal(x) for x, is_cut in pairs if is_cut)


def _rows(x: Any, numbers: np.ndarray) -> Any:
    found = x[numbers]
    return jax.device_put(found, x.sharding) if isinstance(x, jax.Array) else found


def _all_equal(x: Any) -> bool:
    host = _plain_numbers(x)
    return np.array_equal(host, np.broadcast_to(host[:1], host.shape))


def _plain_numbers(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def padded_places(batch: Any, other: Any) -> np.ndarray:
    """The places where batches differ, as (examples, positions) of the first array that does."""
    arrays, there = (dict(with_paths(x)) for x in (batch, other))
    types = [{p: (np.shape(x), str(getattr(x, "dtype", ""))) for p, x in t.items()}
             for t in (arrays, there)]  # fmt: skip
    if types[0] != types[1]:
        wrong = next((p for p in there if types[1][p] != types[0].get(p)), "")
        raise ValueError(
            f"padding: got {wrong or 'nothing'} of type {types[1].get(wrong)}, expected the batch "
            f"with other numbers where it is padded; {nearest(wrong, arrays)}; for other shapes "
            "write compare(fun, fun, (params, batch), other_args=(params, longer))"
        )
    for path, x in arrays.items():
        if (
            is_array(x)
            and np.ndim(x)
            and np.any(differs := _plain_numbers(x) != _plain_numbers(there[path]))
        ):
            return differs.any(axis=tuple(range(2, differs.ndim)))
    raise ValueError("padding: got the batch itself, expected other numbers where it is padded")
