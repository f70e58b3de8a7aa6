"""The usual suspects: operations without a finite value or derivative at some point."""

from typing import NamedTuple


class Suspect(NamedTuple):
    """A row of the table of `docs/nan.md`.

    Attributes:
      code: the operation as an expression of ``x``.
      at: where it goes wrong.
      computes: what the backward pass computes there.
      instead: what to write instead, for people; code comes first.
      kind: "vjp", or "value" if the value goes wrong too.
      primitives: the operations of JAX that go wrong; empty: any.
      functions: the functions around them; empty: any.
      dtype: the dtype of the operation, if it matters.
    """

    code: str
    at: str
    computes: str
    instead: str
    kind: str
    primitives: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    dtype: str | None = None

    @property
    def advice(self) -> str:
        """What happens and what to write, in a line that stands by itself."""
        written = DOUBLE_WHERE_CODE if self.instead == DOUBLE_WHERE else self.instead
        return f"at {self.at} it computes {self.computes}; write {written.replace('`', '')}"


DOUBLE_WHERE_CODE = "jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0), a double where (docs/nan.md)"
DOUBLE_WHERE = "the double `where` below"
SUSPECTS = (
    Suspect("jnp.sqrt(x)", "0", "1 / 0", DOUBLE_WHERE, "vjp", ("sqrt", "rsqrt", "cbrt")),
    Suspect(
        "jnp.linalg.norm(jnp.stack([x, x]))",
        "0",
        "0 / 0",
        DOUBLE_WHERE,
        "vjp",
        ("sqrt",),
        ("norm",),
    ),
    Suspect(
        "jnp.where(x > 0, jnp.log(x), 0.0)",
        "0",
        "0 · inf, from the branch not taken",
        DOUBLE_WHERE,
        "vjp",
        ("log", "log1p", "div", "exp", "expm1", "atan2"),
    ),
    Suspect("x ** 0.3", "0", "1 / 0", DOUBLE_WHERE, "vjp", ("pow",)),
    Suspect(
        "jnp.std(jnp.stack([x, x]))",
        "0",
        "0 / 0 for equal numbers",
        "`jnp.sqrt(jnp.var(jnp.stack([x, x])) + 1e-6)`",
        "vjp",
        ("sqrt",),
        ("std", "_std", "nanstd"),
    ),
    Suspect(
        "jnp.log(jax.nn.softmax(jnp.stack([x, 0.0]))[0])",
        "-200",
        "the log of an underflow",
        "`jax.nn.log_softmax(jnp.stack([x, 0.0]))[0]`",
        "value",
        ("log",),
    ),
    Suspect(
        "jax.nn.softmax(jnp.stack([x, -jnp.inf]))[0]",
        "-inf",
        "a row that is masked throughout",
        "a finite mask, such as `jnp.finfo(x.dtype).min`",
        "value",
        ("sub", "div"),
        ("softmax", "log_softmax", "logsumexp", "softmax_cross_entropy"),
    ),
    Suspect(
        "jnp.arccos(x)",
        "1",
        "1 / 0",
        "`jnp.arccos(0.999999 * x)`",
        "vjp",
        ("acos", "asin", "atanh", "acosh"),
    ),
    Suspect(
        "x.astype(jnp.float16) ** 4",
        "300",
        "more than 65504, the largest float16",
        "`x.astype(jnp.bfloat16) ** 4`, or a loss scale",
        "value",
        (),
        (),
        "float16",
    ),
)


def suspect(kind: str, operation: str, function: str | None, dtype: str) -> Suspect | None:
    """The row that an operation belongs to, the most special one."""
    fits = [
        row
        for row in SUSPECTS
        if row.kind == kind
        and (not row.primitives or operation in row.primitives)
        and (not row.functions or function in row.functions)
        and row.dtype in (None, dtype)
    ]
    return max(fits, key=lambda row: (bool(row.functions), bool(row.primitives)), default=None)
