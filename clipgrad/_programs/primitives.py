"""JAX's primitives by their objects: a table has a row for each, whatever JAX calls it.

Most are in `jax.extend.core.primitives`. JAX has no public object for some: such a one is looked up
in a program that is traced once, in a thread of its own, where no context of a caller's holds.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.extend.core import Primitive, jaxprs_in_params
from jax.extend.core import primitives as jax_primitives

TableRow = TypeVar("TableRow")


class TracedOnce(NamedTuple):
    """A function of arrays whose program has primitives that JAX gives no public object for."""

    name: str  # what the function does
    run: Callable[..., Any]
    shape: tuple[int, ...] = (2,)
    module: str = "jax"  # who has not imported it has no such primitive


@functools.cache
def public_primitives() -> Mapping[Primitive, str]:
    """The primitives of `jax.extend.core.primitives`, with their names there."""
    members = vars(jax_primitives).items()
    return {value: name for name, value in members if isinstance(value, Primitive)}


class PrimitiveTable(Mapping[Primitive, TableRow], Generic[TableRow]):
    """Rows by primitive.

    Args:
      name: the name of the table, for messages.
      rows: each row with its primitives: names in `jax.extend.core.primitives`, where ``?`` is for
        one that the oldest JAX does not have, and probes.
    """

    def __init__(self, name: str, rows: Mapping[TableRow, tuple[str | TracedOnce, ...]]):
        self.name, self._rows = name, dict(rows)
        self._lock = threading.Lock()
        probes = (
            (p, row) for row, entries in rows.items() for p in entries if isinstance(p, TracedOnce)
        )
        self._waiting: dict[TracedOnce, TableRow] = dict(probes)
        self._found: dict[TracedOnce, set[Primitive]] = {}
        self._probed: dict[Primitive, TableRow] = {}

    def __getitem__(self, primitive: Primitive) -> TableRow:
        if (row := self.get(primitive)) is None:
            raise KeyError(primitive)
        return row

    def get(self, primitive: Primitive, default: Any = None) -> Any:
        """The row of a primitive, or ``default``; no probe is traced for one that JAX names."""
        if primitive in public_primitives():
            return self._public.get(primitive, default)
        self._find()
        return self._probed.get(primitive, default)

    def __iter__(self) -> Iterator[Primitive]:
        self._find()
        yield from self._public | self._probed

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def probes_without_primitives(self) -> list[str]:
        """The probes in whose programs this JAX has only primitives with rows of their own."""
        self._find()
        return [p.name for p, primitives in self._found.items() if not primitives]

    @functools.cached_property
    def _public(self) -> dict[Primitive, TableRow]:
        pairs = [
            (n, row) for row, entries in self._rows.items() for n in entries if isinstance(n, str)
        ]
        rows = {self._named(name): row for name, row in pairs}
        return {primitive: row for primitive, row in rows.items() if primitive is not None}

    def _named(self, name: str) -> Primitive | None:
        primitive = getattr(jax_primitives, name.removesuffix("?"), None)
        if primitive is None and not name.endswith("?"):
            raise AttributeError(
                f"clipgrad: JAX {jax.__version__} has no jax.extend.core.primitives.{name}, which "
                f"the table {self.name} of clipgrad._programs needs; install a version of JAX "
                "that clipgrad is tested with"
            )
        return primitive

    def _find(self) -> None:
        """Trace the probes that have not been traced and whose modules are there."""
        if not any(probe.module in sys.modules for probe in self._waiting):
            return
        with self._lock:
            thread = threading.Thread(target=self._trace)
            thread.start()
            thread.join()

    def _trace(self) -> None:
        for probe, row in [*self._waiting.items()]:
            if probe.module in sys.modules:
                primitives = self._found[probe] = _primitives_of(probe) - self._probed.keys()
                self._probed.update(dict.fromkeys(primitives, row))
                del self._waiting[probe]


def _primitives_of(probe: TracedOnce) -> set[Primitive]:
    """The primitives in the program of a probe without a public object; none if JAX lacks it."""
    try:
        program = jax.make_jaxpr(probe.run)(jax.ShapeDtypeStruct(probe.shape, "float32"))
    except Exception:  # `test_each_program_that_is_traced_once_has_a_primitive` says which
        return set()
    return _innermost(program)


def _innermost(program: Any) -> set[Primitive]:
    """The primitives without a public object whose programs hold none themselves."""
    primitives: set[Primitive] = set()
    for equation in getattr(program, "jaxpr", program).eqns:
        inside = set().union(*map(_innermost, jaxprs_in_params(equation.params)))
        primitives |= inside or {equation.primitive} - public_primitives().keys()
    return primitives


def on_a_mesh(run: Callable[[Any], Any], spec: tuple = ("d",), is_explicit: bool = False) -> Any:
    """A function on a mesh of one device, mapped along it or with explicit axes: for probes."""
    sharding = jax.sharding
    kind = sharding.AxisType.Explicit if is_explicit else sharding.AxisType.Auto

    def on_mesh(x: Any) -> Any:
        mesh = sharding.AbstractMesh((1,), ("d",), axis_types=(kind,))
        if is_explicit:
            with sharding.use_abstract_mesh(mesh):
                return run(x)
        over, result = sharding.PartitionSpec("d"), sharding.PartitionSpec(*spec)
        return jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=result)(x)

    return on_mesh
