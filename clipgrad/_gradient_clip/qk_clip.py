"""Weights of queries and keys scaled down where attention logits are too large."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from clipgrad._numerics import at_least_float32
from clipgrad._trees import nearest, unboxed, with_paths

_FORM = '("attn/logits", "attn/query/kernel", "attn/key/kernel", 1)'


def qk_clip(
    pairs: Iterable[Sequence[Any]], max_logit: ArrayLike = 100.0, balance: float = 0.5
) -> optax.GradientTransformationExtraArgs:
    r"""Scales the kernels of queries and keys so that attention logits stay near a limit.

    This is QK-clip, of MuonClip, for the end of a chain. Let $S$ be the largest logit of a head in
    the forward pass of this step, with its sign: logits far below 0 are no reason to scale, since
    softmax ignores shifts. Then

    $$\gamma = \min(1, \mathrm{max\_logit} / S), \quad u \leftarrow \gamma^{a} (p + u) - p$$

    for the part of the kernels $p$ that belongs to the head, with $a$ = ``balance`` for queries and
    1 - ``balance`` for keys: the logits of the same batch are scaled by $\gamma$. `train_step`
    passes the logits from its ``watch_values``; in your own step pass ``max_logits``, a dictionary
    from names to ``highest`` of `with_value_stats` with ``watch={name: axis}``.

    Guarantees:
      * With updates of 0 the largest logits of this batch are at or below ``max_logit`` after the
        step, up to rounding, if logits are bilinear in the two kernels, as with rotary embeddings;
        they are not if queries or keys are normalized. The next update is added to these kernels,
        so a logit may be above the limit by one update.
      * A head at or below the limit keeps its updates, bit for bit. So does a head whose largest
        logit is NaN or inf, which `skip_spikes` is for.
      * Where several heads of queries share one of keys (grouped queries), it is scaled for the
        largest logit of all of them; query head i uses key head i // (number that share one). So is
        a kernel in several pairs, as of layers that share weights, or of queries and keys alike: by
        the smallest of its factors, once.
      * Logits that are a sum, as in multi-head latent attention, have a pair for each term. A key
        that all heads share, such as the rotary key, is left alone with ``None`` in place of its
        path: the queries of this pair are then scaled by all of $\gamma$. A shared key beside one
        that is split by heads is refused, since it would change the logits of quiet heads.
      * The bias beside a kernel (``"attn/query/bias"``) is scaled with it.
      * Layers that a scan has stacked are scaled each by its own logits: where the statistics have
        leading axes, the kernels have the same. For a kernel that all steps of a scan share, pass
        the largest logits of all steps: ``{name: stats.highest.max(0)}``.

    Args:
      pairs: for each attention ``(name of the logits, path of the query kernel, path of the key
        kernel or None, axis of the heads in the kernels)``. The name is one that `list_names`
        lists. Where several parts share a kernel, as in fused QKV, write
        ``(path, index)`` for a path: ``("attn/qkv/kernel", numpy.s_[:, 0])``; the axis is then that
        of the part. The axis may hold the heads one after the other, as in a kernel of shape
        (features, heads * head size).
      max_logit: the limit.
      balance: the share of the exponent that queries get, from 0 to 1.

    Returns:
      A gradient transformation without state, which needs the parameters and ``max_logits``.

    Raises:
      TypeError: if ``pairs`` are not of this form, or ``max_logit`` or ``balance`` no numbers; by
        ``update``, if the logits of a name are no array of numbers.
      ValueError: if ``max_logit`` is not positive, or ``balance`` not in [0, 1]; by ``init``, if a
        path is not in the parameters; by ``update``, if logits are missing, heads do not fit, or
        keys of the terms of one sum are shared by different numbers of heads.

    References:
      Kimi Team, Kimi K2: Open Agentic Intelligence, 2025, https://arxiv.org/abs/2507.20534.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> params = {"q": jnp.full((2, 1, 2), 4.0), "k": jnp.full((2, 1, 2), 9.0)}
      >>> tx = optax.chain(optax.sgd(0.0), cg.qk_clip([("logits", "q", "k", 1)], max_logit=100.0))
      >>> zeros = optax.tree.zeros_like(params)
      >>> largest = {"logits": jnp.array([400.0])}
      >>> updates, _ = tx.update(zeros, tx.init(params), params, max_logits=largest)
      >>> optax.apply_updates(params, updates)["q"][0, 0], updates["k"][0, 0]
      (Array([2., 2.], dtype=float32), Array([-4.5, -4.5], dtype=float32))
    """
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | Mapping):
        raise TypeError(f"pairs: got {pairs!r}, expected a list of such as {_FORM}")
    chosen = [_checked_pair(pair) for pair in pairs]
    _check_number("max_logit", max_logit, lambda x: x > 0, "a positive number such as 100.0")
    _check_number("balance", balance, lambda x: (x >= 0) & (x <= 1), "a number from 0 to 1")

    def init(params: Any) -> optax.EmptyState:
        leaves = _Leaves.of(params)
        for pair in chosen:
            for part, _ in pair.powers(balance):
                leaves.place(part)
        return optax.EmptyState()

    def update(
        updates: Any, state: Any, params: Any = None, *, max_logits: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("params: got None, expected the parameters, which qk_clip scales")
        leaves, (changed, structure) = _Leaves.of(params), jax.tree.flatten(updates)
        if structure != jax.tree.structure(params):
            raise ValueError(f"updates: got {structure}, expected the structure of the parameters")
        factors: dict[int, jax.Array] = {}
        key_heads: dict[str, tuple[_Pair, int]] = {}
        for pair in chosen:
            largest = _largest_logits(pair, max_logits)
            is_over = jnp.isfinite(largest) & (largest > max_logit)
            gamma = jnp.where(is_over, max_logit / jnp.where(is_over, largest, 1), 1)
            size, own_heads = leaves.head_size(pair, gamma), 0  # of the key, which is the last part
            for part, power in pair.powers(balance):
                shared = leaves.of_heads(pair, part, gamma, size)
                own_heads = shared.shape[-1] // size
                for place, own in leaves.factors(pair, part, shared**power, gamma.ndim):
                    factors[place] = jnp.minimum(factors.get(place, 1), own)
            _check_terms(pair, own_heads, key_heads)
        for place, factor in factors.items():
            changed[place] = _scaled(leaves.values[place], changed[place], factor)
        return structure.unflatten(changed), state

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _check_number(name: str, value: Any, holds: Callable[[Any], Any], expected: str) -> None:
    """Refuses what is no number, and a number of which the condition does not hold."""
    kind = getattr(value, "dtype", None) or np.asarray(value).dtype
    if not jnp.issubdtype(kind, jnp.number):
        raise TypeError(f"{name}: got {value!r}, expected {expected}")
    if not isinstance(value, Tracer) and not np.all(holds(np.asarray(value))):
        raise ValueError(f"{name}: got {value!r}, expected {expected}")


class _Part(NamedTuple):
    """A kernel, or a part of it."""

    path: str
    at: tuple[Any, ...] = (...,)

    def full_index(self, ndim: int) -> tuple[Any, ...]:
        """The index with an entry for each axis of the kernel."""
        own = list(self.at)
        if Ellipsis not in own:
            own.append(Ellipsis)
        place = own.index(Ellipsis)
        return (*own[:place], *[slice(None)] * (ndim - len(own) + 1), *own[place + 1 :])


class _Pair(NamedTuple):
    """The logits of an attention, and what they are made of."""

    name: str
    query: _Part
    key: _Part | None
    axis: int

    def powers(self, balance: float) -> list[tuple[_Part, float]]:
        """The kernels that are scaled, each with its share of the exponent."""
        if self.key is None:
            return [(self.query, 1.0)]
        return [(self.query, balance), (self.key, 1 - balance)]


def _checked_pair(pair: Any) -> _Pair:
    parts = list(pair) if isinstance(pair, tuple | list) else []
    is_pair = len(parts) == 4 and isinstance(parts[0], str) and hasattr(parts[3], "__index__")
    if not is_pair or isinstance(parts[3], bool):
        raise TypeError(f"pairs: got {pair!r}, expected such as {_FORM}")
    key = None if parts[2] is None else _checked_part(parts[2])
    return _Pair(parts[0], _checked_part(parts[1]), key, int(parts[3]))


def _checked_part(part: Any) -> _Part:
    path, *index = part if isinstance(part, tuple | list) and len(part) == 2 else (part,)
    entries = index[0] if index and isinstance(index[0], tuple) else (*index,)
    is_index = all(entry is Ellipsis or isinstance(entry, slice | int) for entry in entries)
    if not isinstance(path, str) or not is_index:
        raise TypeError(
            f'pairs: got {part!r}, expected a path such as "attn/query/kernel", or a path and an '
            'index of slices and integers, such as ("attn/qkv/kernel", numpy.s_[:, 0])'
        )
    return _Part(path, entries) if index else _Part(path)


def _largest_logits(pair: _Pair, max_logits: Any) -> jax.Array:
    """The largest logits of the heads of an attention."""
    if not isinstance(max_logits, Mapping):
        raise ValueError(
            f"max_logits: got {max_logits!r}, expected a dictionary from names to the largest "
            f"logits of each head; write train_step(..., watch_values={{{pair.name!r}: axis}}), or "
            "optimizer.update(grads, state, params, max_logits=...)"
        )
    if pair.name not in max_logits:
        raise ValueError(
            f"max_logits: got no {pair.name!r}, expected the logits of each pair; "
            f"{nearest(pair.name, max_logits)}"
        )
    given = max_logits[pair.name]
    if not isinstance(given, jax.Array | np.ndarray | np.generic | list | float | int):
        raise TypeError(
            f"max_logits: got {type(given).__name__} for {pair.name!r}, expected an array of the "
            "largest logits, such as stats[name].highest"
        )
    largest = jnp.asarray(given)
    if not largest.ndim:
        raise ValueError(
            f"max_logits: got one number for {pair.name!r}, expected one for each head; write "
            f"watch_values={{{pair.name!r}: axis}} with the axis of the heads in the logits"
        )
    return largest.astype(at_least_float32(largest.dtype))


class _Leaves(NamedTuple):
    """The leaves of the parameters by path."""

    places: dict[str, int]
    values: list[Any]

    @classmethod
    def of(cls, params: Any) -> "_Leaves":
        found = [(unboxed(path), leaf) for path, leaf in with_paths(params) if leaf is not None]
        return cls({path: i for i, (path, _) in enumerate(found)}, [leaf for _, leaf in found])

    def place(self, part: _Part) -> int:
        """The place of a kernel; `ValueError` if it is not there."""
        if part.path not in self.places:
            raise ValueError(
                f"pairs: got the path {part.path!r}, expected that of a kernel; "
                f"{nearest(part.path, self.places)}"
            )
        return self.places[part.path]

    def part(self, part: _Part) -> Any:
        """The kernel, or the part of it."""
        kernel = self.values[self.place(part)]
        return kernel[part.full_index(kernel.ndim)]

    def head_size(self, pair: _Pair, gamma: jax.Array) -> int:
        """The number of entries along the axis of heads that each head of queries has."""
        kernel, heads = self.part(pair.query), gamma.shape[-1]
        _check_heads(pair, pair.query, kernel, gamma)
        length = kernel.shape[pair.axis]
        if length % heads:
            raise ValueError(
                f"pairs: got the axis {pair.axis} of {pair.query.path!r} of length {length}, "
                f"expected a multiple of the {heads} heads of {pair.name!r}"
            )
        return length // heads

    def of_heads(self, pair: _Pair, part: _Part, gamma: jax.Array, size: int) -> jax.Array:
        """For each entry along the axis of heads the smallest factor of the heads that use it."""
        kernel, heads = self.part(part), gamma.shape[-1]
        _check_heads(pair, part, kernel, gamma)
        own, rest = divmod(kernel.shape[pair.axis], size)
        if rest or not own or heads % own or kernel.ndim != self.part(pair.query).ndim:
            raise ValueError(
                f"pairs: got the axis {pair.axis} of {part.path!r} of shape {kernel.shape}, "
                f"expected the {heads} heads of {pair.name!r}, or a number that divides them, "
                f"times the size {size} of a head along it; write None for a key without an axis "
                "of heads"
            )
        groups = gamma.reshape(*gamma.shape[:-1], own, heads // own).min(-1)
        return jnp.repeat(groups, size, axis=-1)

    def factors(
        self, pair: _Pair, part: _Part, factor: jax.Array, leading: int
    ) -> list[tuple[int, jax.Array]]:
        """The factors of a kernel and the bias beside it, with their places."""
        kernel, place = self.part(part), self.place(part)
        axis, shape = pair.axis % kernel.ndim, self.values[place].shape
        own = _along(factor, axis, kernel.ndim)
        found = [(place, _spread(own, part.full_index(len(shape)), shape))]
        folder, _, last = part.path.rpartition("/")
        bias = self.places.get(f"{folder}/bias" if folder else "bias")
        if bias is not None and last != "bias":
            found.append((bias, self._of_bias(pair, part, self.values[bias], factor, leading)))
        return found

    def _of_bias(
        self, pair: _Pair, part: _Part, bias: Any, factor: jax.Array, leading: int
    ) -> jax.Array:
        """The factor of a bias, which has the shape of the kernel without its axis of inputs."""
        kernel = self.part(part)
        index, axis = part.full_index(self.values[self.place(part)].ndim), pair.axis % kernel.ndim
        kept = [i for i, entry in enumerate(index) if isinstance(entry, slice)]
        for i, own in enumerate(kept):
            if i == axis or i < leading - 1 or index[own] != slice(None):
                continue
            rest = index[:own] + index[own + 1 :]
            shape = kernel.shape[:i] + kernel.shape[i + 1 :]
            if len(rest) == bias.ndim and bias[rest].shape == shape:
                return _spread(_along(factor, axis - (i < axis), len(shape)), rest, bias.shape)
        raise ValueError(
            f"pairs: got {part.path!r} with a bias of shape {bias.shape} beside it, expected the "
            f"shape of the kernel, {kernel.shape}, without one axis"
        )


def _check_terms(pair: _Pair, own: int, key_heads: dict[str, tuple[_Pair, int]]) -> None:
    """Raises `ValueError` if keys of the terms of a sum are shared by different numbers of heads.

    One factor for a head would become several for its terms.
    """
    other, heads = key_heads.setdefault(pair.name, (pair, own))
    if own == heads:
        return
    shared = pair if own < heads else other
    key = shared.key and shared.key.path
    raise ValueError(
        f"pairs: got keys of {heads} and {own} heads for {pair.name!r}, expected as many in all "
        f"terms of these logits; write None in place of the key {key!r}, which heads share: "
        f"({pair.name!r}, {shared.query.path!r}, None, {shared.axis})"
    )


def _check_heads(pair: _Pair, part: _Part, kernel: Any, gamma: jax.Array) -> None:
    """Raises `ValueError` for a kernel without the axis of heads, or the axes of stacked layers."""
    leading = gamma.shape[:-1]
    is_axis = -kernel.ndim <= pair.axis < kernel.ndim and pair.axis % kernel.ndim >= len(leading)
    if not is_axis or kernel.shape[: len(leading)] != leading:
        layers = f", behind the axes {leading} of stacked layers" if leading else ""
        raise ValueError(
            f"pairs: got {part.path!r} of shape {kernel.shape} with the axis {pair.axis}, expected "
            f"an axis of heads{layers}"
        )


def _along(factor: jax.Array, axis: int, ndim: int) -> jax.Array:
    """Factors with leading axes for layers, and one that is moved to the axis of heads."""
    leading = factor.shape[:-1]
    between = [1] * (axis - len(leading))
    return factor.reshape(*leading, *between, factor.shape[-1], *[1] * (ndim - axis - 1))


def _spread(factor: jax.Array, index: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    """The factor of a part of a leaf as one of the whole, which is 1 elsewhere."""
    is_whole = all(entry == slice(None) for entry in index)
    return factor if is_whole else jnp.ones(shape, factor.dtype).at[index].set(factor)


def _scaled(p: Any, u: Any, factor: jax.Array) -> jax.Array:
    """The updates after which a parameter is multiplied by factors."""
    p, u = jnp.asarray(p), jnp.asarray(u)
    wide = jnp.promote_types(at_least_float32(u.dtype), factor.dtype)
    before, step, scale = p.astype(wide), u.astype(wide), factor.astype(wide)
    new = (scale * (before + step) - before).astype(u.dtype)
    return jnp.where(factor == 1, u, new)
