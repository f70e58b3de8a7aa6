"""The function under test as a plain function from float leaves to float leaves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._arrays as _arrays
from clipgrad._check import vectors
from clipgrad._check.selection import Selector, select
from clipgrad._check.user_code import UserError, call_user
from clipgrad._programs import held_programs, holds_floats, is_jit, is_shard_map, opened

Leaves = list[jax.Array]
Range = tuple[int, int]


class CheckedFunction(NamedTuple):
    """A function of the leaves to be checked, and the point at which to check it.

    `fun` maps the chosen input leaves to the chosen output leaves; all else is constant.
    `whole` does the same from all array leaves, integers and keys too. `program` is `fun` traced,
    or None if it cannot be.
    """

    fun: Callable[[Leaves], Leaves]
    program: Any
    inputs: Leaves
    names: list[str]
    outputs: Leaves
    output_names: list[str]
    whole: Callable[[Leaves], Leaves]
    arrays: Leaves

    def element(self, index: int) -> str:
        """The name of one real number of the inputs: `args[0]['w'][0, 3]`."""
        places = vectors.offsets(self.inputs)
        k = int(np.searchsorted(places, index, "right") - 1)
        return self.names[k] + _subscript(self.inputs[k], index - int(places[k]))

    def alone(self, k: int, xs: Leaves | None = None) -> Callable[[jax.Array], Leaves]:
        """The function of one leaf, the others held."""
        xs = self.inputs if xs is None else xs
        return lambda x: self.fun([*xs[:k], x, *xs[k + 1 :]])

    def pull_back(self, xs: Leaves, cotangents: Leaves) -> Leaves:
        """The gradient as a function of the inputs and a cotangent."""
        return jax.vjp(self.fun, xs)[1](cotangents)[0]

    @property
    def ranges(self) -> list[Range]:
        """The range of each leaf in the vector of inputs."""
        return vectors.areas(self.inputs)

    @property
    def dtypes(self) -> list[str]:
        """The real types of inputs and outputs, by name."""
        return [vectors.real_name(leaf) for leaf in (*self.inputs, *self.outputs)]


def require_arrays(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises an error for trees without an end, tracers, and numbers that JAX cannot take."""
    _arrays.check_tree("args", (args, kwargs))
    _arrays.check_concrete("args", (args, kwargs))
    for name, tree in (("args", args), ("kwargs", kwargs)):
        leaves = jax.tree.map(lambda leaf: leaf if _has_numbers(leaf) else None, tree)
        _arrays.check_leaves(name, leaves)


def checked_function(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    wrt: Selector | None = None,
    no_grad: Selector | None = None,
    output: Selector | None = None,
) -> CheckedFunction:
    """Call the function once and choose its leaves, or say what is wrong with the request."""
    kwargs = dict(kwargs or {})
    tree = (args, kwargs)
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) if _is_number_leaf(leaf) else leaf for leaf in leaves]
    arrays = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    chosen = _chosen_inputs(fun, args, kwargs, leaves, wrt, no_grad)
    call = _caller(fun, structure, leaves)
    names = _arrays.leaf_names("args", args) + _arrays.leaf_names("kwargs", kwargs)
    _require_finite([leaves[k] for k in chosen], [names[k] for k in chosen])
    result = call(arrays, [leaves[k] for k in arrays])
    _arrays.check_concrete("fun", result)
    pick, outputs, output_names = _chosen_outputs(result, output)
    inputs = [leaves[k] for k in chosen]

    def chosen_fun(xs):
        return pick(call(chosen, xs))

    program, whole = traced(chosen_fun, inputs), lambda xs: pick(call(arrays, xs))
    compiled = _in_new_jit if program and _has_bare_shard_map(program) else lambda fun: fun
    return CheckedFunction(
        fun=compiled(chosen_fun),
        program=program,
        inputs=inputs,
        names=[names[k] for k in chosen],
        outputs=outputs,
        output_names=output_names,
        whole=compiled(whole),
        arrays=[leaves[k] for k in arrays],
    )


def _has_bare_shard_map(program: Any) -> bool:
    """Whether a `shard_map` is in no `jit`, so that JAX compiles its operations at each call."""
    return any(
        is_shard_map(e) or not is_jit(e) and any(map(_has_bare_shard_map, held_programs(e)))
        for e in opened(program)[0].eqns
    )


def _in_new_jit(fun: Callable) -> Callable:
    """The function inside of a `jax.jit` of each call, so that its Python runs each time."""
    return lambda xs: jax.jit(lambda xs: fun(xs))(xs)


DONATED = "{} is donated: the first call used it up; pass the function without donate_argnums"


def donated_arguments(function: CheckedFunction) -> list[str]:
    """The names of the inputs whose buffers the first call of the function used up."""
    pairs = zip(function.names, function.inputs, strict=True)
    return [name for name, x in pairs if x.is_deleted()]


def _has_numbers(leaf):
    is_numpy = isinstance(leaf, (np.ndarray, np.generic))
    return np.issubdtype(leaf.dtype, np.number) if is_numpy else hasattr(leaf, "dtype")


def traced(fun: Callable[[Leaves], Leaves], inputs: Leaves) -> Any:
    """The function as a program, or None if it cannot be traced."""
    try:
        return call_user(jax.make_jaxpr(fun), inputs)
    except UserError:
        return None


def _is_number_leaf(leaf):
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _arrays.is_array(np.asarray(leaf))
    return isinstance(leaf, (float, complex))


def _caller(fun, structure, leaves):
    def call(positions, values):
        new = list(leaves)
        for position, value in zip(positions, values, strict=True):
            new[position] = value
        args, kwargs = jax.tree.unflatten(structure, new)
        return fun(*args, **kwargs)

    return call


def _chosen_inputs(fun, args, kwargs, leaves, wrt, no_grad) -> list[int]:
    paths = _input_paths(fun, args, kwargs)
    floats = [k for k, leaf in enumerate(leaves) if holds_floats(leaf)]
    if not floats:
        raise ValueError(
            f"args: got leaves of {sorted({_leaf_kind(leaf) for leaf in leaves})}, expected a "
            "floating-point array to differentiate"
        )
    names = [paths[k] for k in floats]
    chosen = set(range(len(floats))) if wrt is None else select(wrt, names, "wrt")
    if no_grad is not None:
        chosen -= select(no_grad, names, "no_grad")
    chosen = {k for k in chosen if leaves[floats[k]].size}
    if not chosen:
        raise ValueError(
            f"wrt: got {wrt!r}, with no_grad={no_grad!r}, which leaves nothing to check of "
            f"{', '.join(names).replace('|', ' or ')}; expected a leaf that is not empty"
        )
    return [floats[k] for k in sorted(chosen)]


def _input_paths(fun, args, kwargs):
    parameters = _arrays.parameter_names(fun, len(args))
    paths = []
    for path in _arrays.leaf_paths(args):
        first, _, below = path.partition("/")
        named = parameters[int(first)] if int(first) < len(parameters) else None
        spelled = [first] if named is None else [named, first]
        paths.append("|".join(f"{head}/{below}" if below else head for head in spelled))
    return paths + _arrays.leaf_paths(kwargs)


def _leaf_kind(leaf):
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def _chosen_outputs(out, output):
    leaves = jax.tree.leaves(out)
    floats = [k for k, leaf in enumerate(leaves) if holds_floats(leaf)]
    if not floats:
        raise ValueError(
            f"fun: got {[_leaf_kind(leaf) for leaf in leaves] or out!r} from it, expected a "
            "floating-point array among its results"
        )
    names = _arrays.leaf_names("out", out)
    if output is not None:
        paths = _arrays.leaf_paths(out)
        kept = select(output, [paths[k] or "0" for k in floats], "output")
        floats = [floats[k] for k in sorted(kept)]

    def pick(result):
        results = jax.tree.leaves(result)
        return [results[k] for k in floats]

    return pick, [jnp.asarray(leaf) for leaf in pick(out)], [names[k] for k in floats]


def _require_finite(leaves: Sequence[jax.Array], names: Sequence[str]) -> None:
    for leaf, name in zip(leaves, names, strict=True):
        values = vectors.widened_leaf(leaf).ravel()
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            index = int(bad[0]) * (2 if np.iscomplexobj(values) else 1)
            raise ValueError(
                f"{name}{_subscript(leaf, index)}: got {values[bad[0]]}, expected a "
                "finite number; change it, or leave the argument out with no_grad"
            )


def _subscript(leaf, index: int) -> str:
    part = ""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        index, imaginary = divmod(index, 2)
        part = ".imag" if imaginary else ".real"
    if not leaf.shape:
        return part
    return str([int(i) for i in np.unravel_index(index, leaf.shape)]) + part
