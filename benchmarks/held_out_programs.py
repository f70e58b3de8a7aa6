"""Held-out programs: wrong and right gradients to judge checkers by.

They were written without knowledge of any checker, by one who had read none. `CASES` has functions
that make a `Case` each; ``family`` is right, ``family__bug`` is its twin with a wrong rule. Each was
established by central differences in float64, element by element, before a checker saw it: a right
rule is off by less than 1e-5 of its leaf, a wrong one by more than 5e-4 of at least one element, or
it is NaN. ``order=2``: the first derivative is right, and the second is in question.

`SPECIAL` names right programs for which differences at the point are no test: kinks, surrogates and
bfloat16 inside. A checker may answer that it can't tell.

Arguments are float32 where they are differentiated. The names of variables are those of formulas.
"""
# ruff: noqa: D101, D102, E501, E741

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl


class Case(NamedTuple):
    name: str
    wrong: bool
    fun: Callable
    args: tuple
    argnums: tuple
    order: int = 1
    note: str = ""


CASES = []
SPECIAL = {}


def case(f):
    CASES.append(f)
    return f


def family(right="", own=False, order=1, special=None, wrong_order=None, **wrong):
    """Register `fn(bug)` once per bug; bug None is the right twin (right=None: none)."""

    def deco(fn):
        def add(bug, note, order):
            name = fn.__name__ if bug is None else fn.__name__ + "__" + bug

            def build():
                fun, args, argnums = fn(bug)
                return Case(
                    name,
                    bug is not None,
                    fun,
                    args,
                    argnums,
                    order,
                    ("own; " if own else "") + note,
                )

            build.__name__ = name
            case(build)
            if bug is None and special:
                SPECIAL[name] = special

        if right is not None:
            add(None, right, order)
        for b, n in wrong.items():
            add(b, n, order)
        return fn

    return deco


class Rnd:
    def __init__(self, seed):
        self.r = np.random.default_rng(seed)

    def n(self, *s, k=1.0, m=0.0):
        return np.asarray(m + k * self.r.standard_normal(s), np.float32)

    def u(self, lo, hi, *s):
        return np.asarray(self.r.uniform(lo, hi, s), np.float32)

    def i(self, lo, hi, *s):
        return np.asarray(self.r.integers(lo, hi, s), np.int32)


def rule(primal, bwd):
    """custom_vjp with bwd(args, out, g) -> tuple of cotangents."""
    f = jax.custom_vjp(primal)

    def fwd(*a):
        y = primal(*a)
        return y, (a, y)

    f.defvjp(fwd, lambda res, g: tuple(bwd(res[0], res[1], g)))
    return f


# ---------------------------------------------------------------- normalizations
@family(
    "RMSNorm kernel rule, rows of very different scale",
    n_minus_1="projection term divided by n-1, not n",
    eps_missing="backward recomputes rstd without eps (only the tiny row notices)",
    dw_mean="dw is the mean over rows, not the sum",
)
def rmsnorm(bug):
    r = Rnd(1)
    x = r.n(6, 16) * np.array([[1], [1], [1e-2], [1], [30], [1]], np.float32)
    eps = 1e-5

    def primal(x, w):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w

    def bwd(a, y, g):
        x, w = a
        n = x.shape[-1]
        s = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + (0 if bug == "eps_missing" else eps))
        xh, gw = x * s, g * w
        dot = jnp.sum(gw * xh, -1, keepdims=True)
        dx = s * (gw - xh * dot / (n - 1 if bug == "n_minus_1" else n))
        red = jnp.mean if bug == "dw_mean" else jnp.sum
        return dx, red(g * xh, 0)

    return rule(primal, bwd), (x, r.n(16, m=1, k=0.3)), (0, 1)


@family(
    "LayerNorm in Pallas (interpret), 13 rows in blocks of 4, padded last block",
    last_block="partial last block left out of dgamma/dbeta",
    mean_term="dx lacks the mean(g) term of the centering",
)
def layernorm_pallas(bug):
    r = Rnd(2)
    N, D, B = 13, 8, 4
    eps = 1e-5

    def stats(x):
        mu = jnp.mean(x, -1, keepdims=True)
        rs = lax.rsqrt(jnp.mean((x - mu) ** 2, -1, keepdims=True) + eps)
        return (x - mu) * rs, rs

    def fk(x_ref, w_ref, b_ref, o_ref):
        xh, _ = stats(x_ref[...])
        o_ref[...] = xh * w_ref[...][None] + b_ref[...][None]

    def bk(x_ref, w_ref, g_ref, dx_ref, dw_ref, db_ref):
        xh, rs = stats(x_ref[...])
        g = g_ref[...]
        gw = g * w_ref[...][None]
        m1 = 0 if bug == "mean_term" else jnp.mean(gw, -1, keepdims=True)
        m2 = jnp.mean(gw * xh, -1, keepdims=True)
        dx_ref[...] = rs * (gw - m1 - xh * m2)
        dw_ref[...] = jnp.sum(g * xh, 0)[None]
        db_ref[...] = jnp.sum(g, 0)[None]

    rows = pl.BlockSpec((B, D), lambda i: (i, 0))
    vec = pl.BlockSpec((D,), lambda i: (0,))
    part = pl.BlockSpec((1, D), lambda i: (i, 0))
    nb = -(-N // B)
    P = nb * B

    def pad(x):
        return jnp.pad(x, ((0, P - N), (0, 0)))

    def primal(x, w, b):
        y = pl.pallas_call(
            fk,
            grid=(nb,),
            in_specs=[rows, vec, vec],
            out_specs=rows,
            out_shape=jax.ShapeDtypeStruct((P, D), x.dtype),
            interpret=True,
        )(pad(x), w, b)
        return y[:N]

    def bwd(a, y, g):
        x, w, b = a
        S = jax.ShapeDtypeStruct
        dx, dw, db = pl.pallas_call(
            bk,
            grid=(nb,),
            in_specs=[rows, vec, rows],
            out_specs=[rows, part, part],
            out_shape=[S((P, D), x.dtype), S((nb, D), x.dtype), S((nb, D), x.dtype)],
            interpret=True,
        )(pad(x), w, pad(g))
        k = N // B if bug == "last_block" else nb
        return dx[:N], dw[:k].sum(0), db[:k].sum(0)

    return rule(primal, bwd), (r.n(N, D), r.n(D, m=1, k=0.2), r.n(D)), (0, 1, 2)


@family(
    "training-mode BatchNorm with masked rows",
    var_const="variance treated as constant",
    count="backward uses N, forward counts only valid rows",
)
def batchnorm_masked(bug):
    r = Rnd(3)
    mask = np.array([1, 1, 1, 1, 1, 1, 1, 0, 0, 1], bool)

    def norm(x, m):
        c = m.sum()
        mu = (x * m).sum(0) / c
        var = ((x - mu) ** 2 * m).sum(0) / c
        return mu, var, c

    def primal(x, mask):
        m = mask[:, None].astype(x.dtype)
        mu, var, c = norm(x, m)
        return (x - mu) * lax.rsqrt(var + 1e-3) * m

    def bwd(a, y, g):
        x, mask = a
        m = mask[:, None].astype(x.dtype)
        mu, var, c = norm(x, m)
        if bug == "count":
            c = float(x.shape[0])
        s = lax.rsqrt(var + 1e-3)
        g = g * m
        dx = g - g.sum(0) / c
        if bug != "var_const":
            dx = dx - y * (g * y).sum(0) / c
        return dx * s * m, None

    return rule(primal, bwd), (r.n(10, 4, k=2, m=1), mask), (0,)


@family(
    "weight norm w = g v/|v|",
    own=True,
    no_projection="dv lacks the projection (norm treated as constant)",
    axis="dg reduced over the wrong axis of a square weight",
)
def weight_norm(bug):
    r = Rnd(4)

    def primal(v, g):
        return g[:, None] * v / jnp.linalg.norm(v, axis=1, keepdims=True)

    def bwd(a, y, ct):
        v, g = a
        n = jnp.linalg.norm(v, axis=1, keepdims=True)
        u = v / n
        dg = jnp.sum(ct * u, axis=0 if bug == "axis" else 1)
        dv = ct
        if bug != "no_projection":
            dv = ct - u * jnp.sum(ct * u, 1, keepdims=True)
        return dv * g[:, None] / n, dg

    return rule(primal, bwd), (r.n(5, 5), r.n(5)), (0, 1)


# ---------------------------------------------------------------- losses
@family(
    "linear + softmax cross entropy in vocabulary chunks with ignore_index",
    ignore_leak="ignored rows still receive softmax gradient",
    count_total="backward divides by all rows, forward by valid rows",
    last_chunk="last partial vocabulary chunk left out of dh",
)
def xent_chunked(bug):
    r = Rnd(5)
    N, D, V, C = 7, 5, 20, 6
    lab = np.array([3, -100, 19, 0, -100, 12, 18], np.int32)

    def primal(h, w, lab):
        m = jnp.full((N,), -jnp.inf, h.dtype)
        s = jnp.zeros((N,), h.dtype)
        picked = jnp.zeros((N,), h.dtype)
        for a in range(0, V, C):
            z = h @ w[:, a : a + C]
            mn = jnp.maximum(m, z.max(1))
            s = s * jnp.exp(m - mn) + jnp.exp(z - mn[:, None]).sum(1)
            m = mn
            picked += jnp.where(lab[:, None] == a + jnp.arange(z.shape[1]), z, 0).sum(1)
        valid = lab >= 0
        return jnp.where(valid, m + jnp.log(s) - picked, 0).sum() / valid.sum()

    def bwd(a, y, g):
        h, w, lab = a
        valid = (lab >= 0).astype(h.dtype)
        sc = g / (N if bug == "count_total" else valid.sum())
        lse = jax.nn.logsumexp(h @ w, axis=1)
        dh, dw = jnp.zeros_like(h), []
        for c in range(0, V, C):
            wc = w[:, c : c + C]
            p = jnp.exp(h @ wc - lse[:, None])
            d = p - (lab[:, None] == c + jnp.arange(wc.shape[1]))
            d = d * sc
            if bug != "ignore_leak":
                d = d * valid[:, None]
            dw.append(h.T @ d)
            if not (bug == "last_chunk" and c + C > V):
                dh += d @ wc.T
        return dh, jnp.concatenate(dw, 1), None

    return rule(primal, bwd), (r.n(N, D), r.n(D, V), lab), (0, 1)


@family(
    "focal loss rule", own=True, modulator_const="(1-p)^gamma treated as constant in the backward"
)
def focal_loss(bug):
    r = Rnd(6)
    t = r.i(0, 2, 9)
    gam = 2.0

    def primal(x, t):
        s = jnp.where(t == 1, x, -x)
        return -(jax.nn.sigmoid(-s) ** gam) * jax.nn.log_sigmoid(s)

    def bwd(a, y, g):
        x, t = a
        sg = jnp.where(t == 1, 1, -1).astype(x.dtype)
        s = sg * x
        p, q, lp = jax.nn.sigmoid(s), jax.nn.sigmoid(-s), jax.nn.log_sigmoid(s)
        d = -(q**gam) * q
        if bug is None:
            d = d + gam * q**gam * p * lp
        return g * d * sg, None

    return rule(primal, bwd), (r.n(9, k=2), t), (0,)


@family(
    "Huber with delta=0.7 written by hand",
    own=True,
    delta_lost="linear zone returns sign(r), not delta*sign(r)",
)
def huber(bug):
    r = Rnd(7)
    d = 0.7

    def primal(p, t):
        e = p - t
        return jnp.where(jnp.abs(e) < d, 0.5 * e * e, d * (jnp.abs(e) - 0.5 * d)).mean()

    def bwd(a, y, g):
        e = a[0] - a[1]
        q = jnp.where(jnp.abs(e) < d, e, (1 if bug else d) * jnp.sign(e)) * g / e.size
        return q, -q

    return rule(primal, bwd), (r.n(4, 5), r.n(4, 5)), (0, 1)


@family(
    "symmetric InfoNCE (rows and columns) with temperature",
    own=True,
    rows_only="gradient of the column direction left out for the second tower",
    temperature="log-temperature gradient lacks the positive pair term",
)
def infonce(bug):
    r = Rnd(8)

    def primal(a, b, lt):
        z = a @ b.T * jnp.exp(lt)
        d = jnp.diag(z)
        return 0.5 * (jax.nn.logsumexp(z, 1) - d + jax.nn.logsumexp(z, 0) - d).mean()

    def bwd(args, y, g):
        a, b, lt = args
        s = jnp.exp(lt)
        z = a @ b.T * s
        n = z.shape[0]
        pr, pc = jax.nn.softmax(z, 1), jax.nn.softmax(z, 0)
        dz = (0.5 * (pr + pc) - jnp.eye(n)) * g / n
        dzb = (pr - jnp.eye(n)) * g / n if bug == "rows_only" else dz
        dlt = jnp.sum(0.5 * (pr + pc) * g / n * z) if bug == "temperature" else jnp.sum(dz * z)
        return (dz @ b * s).astype(a.dtype), (dzb.T @ a * s).astype(a.dtype), dlt.astype(a.dtype)

    return rule(primal, bwd), (r.n(6, 4, k=0.5), r.n(6, 4, k=0.5), np.float32(0.3)), (0, 1, 2)


@family(
    "PPO clipped surrogate objective, hand-written rule",
    own=True,
    negative_adv="clip side of positive advantages used for negative ones too",
)
def ppo_clip(bug):
    r = Rnd(9)
    eps = 0.2

    def primal(lp, old, adv):
        rt = jnp.exp(lp - old)
        return -jnp.minimum(rt * adv, jnp.clip(rt, 1 - eps, 1 + eps) * adv).mean()

    def bwd(a, y, g):
        lp, old, adv = a
        rt = jnp.exp(lp - old)
        if bug:
            live = rt < 1 + eps
        else:
            live = jnp.where(adv >= 0, rt < 1 + eps, rt > 1 - eps)
        dl = -jnp.where(live, rt * adv, 0) * g / lp.size
        da = -jnp.where(live, rt, jnp.where(adv >= 0, 1 + eps, 1 - eps)) * g / lp.size
        if bug:
            da = -jnp.minimum(rt, 1 + eps) * g / lp.size
        return dl, -dl, da

    return rule(primal, bwd), (r.n(12, k=0.4), r.n(12, k=0.4), r.n(12)), (0, 1, 2)


@family(
    "KL(p||q) from logits",
    minus_kl="dp lacks the -KL centering term (log p + 1 forgotten under softmax)",
)
def kl_logits(bug):
    r = Rnd(10)

    def primal(a, b):
        la, lb = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
        return jnp.sum(jnp.exp(la) * (la - lb), -1)

    def bwd(args, y, g):
        la, lb = jax.nn.log_softmax(args[0]), jax.nn.log_softmax(args[1])
        p, q = jnp.exp(la), jnp.exp(lb)
        c = 0 if bug else y[:, None]
        return g[:, None] * p * (la - lb - c), g[:, None] * (q - p)

    return rule(primal, bwd), (r.n(5, 7), r.n(5, 7)), (0, 1)


@family(
    "JS divergence with stop_gradient on log-mixture: looks wrong, but the mixture term sums to zero"
)
def js_stop_gradient(bug):
    r = Rnd(11)

    def f(a, b):
        p, q = jax.nn.softmax(a), jax.nn.softmax(b)
        lm = lax.stop_gradient(jnp.log(0.5 * (p + q)))
        return 0.5 * jnp.sum(p * (jnp.log(p) - lm) + q * (jnp.log(q) - lm), -1)

    return f, (r.n(4, 6), r.n(4, 6)), (0, 1)


@family("Dirichlet log density", own=True, total="digamma of the total concentration left out")
def dirichlet_logpdf(bug):
    r = Rnd(12)
    G, DG = jax.scipy.special.gammaln, jax.scipy.special.digamma

    def primal(al, x):
        return G(al.sum(-1)) - G(al).sum(-1) + ((al - 1) * jnp.log(x)).sum(-1)

    def bwd(a, y, g):
        al, x = a
        d = jnp.log(x) - DG(al)
        if not bug:
            d = d + DG(al.sum(-1, keepdims=True))
        return g[:, None] * d, g[:, None] * (al - 1) / x

    x = r.u(0.1, 1, 5, 4)
    return rule(primal, bwd), (r.u(0.5, 4, 5, 4), x / x.sum(-1, keepdims=True)), (0, 1)


@family(
    "Student-t log density with respect to nu, mu, sigma",
    own=True,
    nu_half="nu gradient lacks the -1/(2 nu) of the normalizer",
    sigma="dsigma lacks the -1/sigma of the Jacobian",
)
def student_t(bug):
    r = Rnd(13)
    G, DG = jax.scipy.special.gammaln, jax.scipy.special.digamma

    def primal(x, nu, mu, sg):
        z = (x - mu) / sg
        return (
            G((nu + 1) / 2)
            - G(nu / 2)
            - 0.5 * jnp.log(nu * np.pi)
            - jnp.log(sg)
            - (nu + 1) / 2 * jnp.log1p(z * z / nu)
        ).sum()

    def bwd(a, y, g):
        x, nu, mu, sg = a
        z = (x - mu) / sg
        w = (nu + 1) * z / (nu + z * z)
        dnu = (
            0.5 * DG((nu + 1) / 2)
            - 0.5 * DG(nu / 2)
            - 0.5 * jnp.log1p(z * z / nu)
            + 0.5 * w * z / nu
        )
        if bug != "nu_half":
            dnu = dnu - 0.5 / nu
        ds = w * z / sg - (0 if bug == "sigma" else 1 / sg)
        return -g * w / sg, g * dnu.sum(), g * (w / sg).sum(), g * ds.sum()

    return (
        rule(primal, bwd),
        (r.n(8, k=2), np.float32(3.3), np.float32(0.2), np.float32(1.4)),
        (0, 1, 2, 3),
    )


# ---------------------------------------------------------------- attention & friends
@family(
    "causal attention, flash-style backward from the saved lse",
    dk_scale="dk lacks the 1/sqrt(d) scale",
    mask_off="backward mask lets the next token in (k=1)",
    delta="delta row term missing the last head",
)
def attention_causal(bug):
    r = Rnd(14)
    H, T, D = 2, 6, 4
    sc = D**-0.5

    def logits(q, k):
        return jnp.einsum("htd,hsd->hts", q, k) * sc

    def primal(q, k, v):
        s = jnp.where(jnp.tri(T, dtype=bool), logits(q, k), -jnp.inf)
        return jnp.einsum("hts,hsd->htd", jax.nn.softmax(s, -1), v)

    def bwd(a, o, g):
        q, k, v = a
        s = logits(q, k)
        lse = jax.nn.logsumexp(
            jnp.where(jnp.tri(T, dtype=bool), s, -jnp.inf), axis=-1, keepdims=True
        )
        p = jnp.where(jnp.tri(T, k=1 if bug == "mask_off" else 0, dtype=bool), jnp.exp(s - lse), 0)
        dv = jnp.einsum("hts,htd->hsd", p, g)
        dp = jnp.einsum("htd,hsd->hts", g, v)
        delta = jnp.sum(o * g, -1, keepdims=True)
        if bug == "delta":
            delta = delta.at[-1].set(0)
        ds = p * (dp - delta)
        dq = jnp.einsum("hts,hsd->htd", ds, k) * sc
        dk = jnp.einsum("hts,htd->hsd", ds, q) * (1 if bug == "dk_scale" else sc)
        return dq, dk, dv

    return rule(primal, bwd), (r.n(H, T, D), r.n(H, T, D), r.n(H, T, D)), (0, 1, 2)


@family(
    "grouped-query attention core, kv heads shared by two query heads",
    group_mean="dk averaged over the group instead of summed",
    kv_order="dv reduction groups the query heads in the wrong order (tile vs repeat)",
)
def gqa(bug):
    r = Rnd(15)
    Hq, Hk, T, D = 4, 2, 5, 4

    def core(q, k, v):
        p = jax.nn.softmax(jnp.einsum("htd,hsd->hts", q, k) / 2)
        return jnp.einsum("hts,hsd->htd", p, v)

    def primal(q, k, v):
        return core(q, jnp.repeat(k, 2, 0), jnp.repeat(v, 2, 0))

    def bwd(a, o, g):
        q, k, v = a
        dq, dk, dv = jax.vjp(core, q, jnp.repeat(k, 2, 0), jnp.repeat(v, 2, 0))[1](g)
        dk = dk.reshape(Hk, 2, T, D)
        dk = dk.mean(1) if bug == "group_mean" else dk.sum(1)
        dv = dv.reshape(2, Hk, T, D).sum(0) if bug == "kv_order" else dv.reshape(Hk, 2, T, D).sum(1)
        return dq, dk, dv

    return rule(primal, bwd), (r.n(Hq, T, D), r.n(Hk, T, D), r.n(Hk, T, D)), (0, 1, 2)


@family(
    "partial RoPE, the tail dims pass through",
    forward_rotation="backward rotates by +theta (forward kernel reused)",
    tail="cotangent of the pass-through dims dropped",
)
def rope(bug):
    r = Rnd(16)
    T, H, D, R = 5, 2, 8, 6

    def rot(x, pos, sign):
        half = R // 2
        th = pos[:, None].astype(x.dtype) * (100.0 ** (-jnp.arange(half, dtype=x.dtype) / half))
        c, s = jnp.cos(th)[:, None], sign * jnp.sin(th)[:, None]
        a, b, t = x[..., :half], x[..., half:R], x[..., R:]
        return a * c - b * s, a * s + b * c, t

    def primal(x, pos):
        return jnp.concatenate(rot(x, pos, 1), -1)

    def bwd(a, y, g):
        u, v, t = rot(g, a[1], 1 if bug == "forward_rotation" else -1)
        if bug == "tail":
            t = jnp.zeros_like(t)
        return jnp.concatenate([u, v, t], -1), None

    return rule(primal, bwd), (r.n(T, H, D), np.array([0, 1, 2, 7, 9], np.int32)), (0,)


@family(
    "GEGLU with tanh gelu",
    sigmoid_gelu="backward differentiates the x*sigmoid(1.702x) approximation",
    cubic3="derivative of the cubic term lacks the factor 3",
)
def geglu(bug):
    r = Rnd(17)
    c, k = 0.7978845608028654, 0.044715

    def primal(a, b):
        return 0.5 * a * (1 + jnp.tanh(c * (a + k * a**3))) * b

    def bwd(args, y, g):
        a, b = args
        if bug == "sigmoid_gelu":
            s = jax.nn.sigmoid(1.702 * a)
            d = s + 1.702 * a * s * (1 - s)
        else:
            t = jnp.tanh(c * (a + k * a**3))
            d = 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * c * (1 + (1 if bug else 3) * k * a * a)
        return g * b * d, g * 0.5 * a * (1 + jnp.tanh(c * (a + k * a**3)))

    return rule(primal, bwd), (r.n(6, 7, k=1.5), r.n(6, 7)), (0, 1)


@family(
    "gated linear attention with per-step decay, state carried through a scan",
    own=True,
    decay_grad="decay gradient uses the state after the update",
    decay_carry="state cotangent is not decayed on its way back",
)
def linear_attention(bug):
    r = Rnd(18)
    T, D = 7, 3

    def run(q, k, v, a):
        def step(S, t):
            q, k, v, a = t
            Sn = a * S + jnp.outer(k, v)
            return Sn, (S, Sn, q @ Sn)

        return lax.scan(step, jnp.zeros((D, D), q.dtype), (q, k, v, a))[1]

    def primal(q, k, v, a):
        return run(q, k, v, a)[2]

    def bwd(args, o, g):
        Sp, Sn, _ = run(*args)

        def step(dS, t):
            q, k, v, a, Sp, Sn, g = t
            dS = dS + jnp.outer(q, g)
            out = (Sn @ g, dS @ v, k @ dS, jnp.sum(dS * (Sn if bug == "decay_grad" else Sp)))
            return (dS if bug == "decay_carry" else a * dS), out

        z = jnp.zeros((D, D), g.dtype)
        return lax.scan(step, z, (*args, Sp, Sn, g), reverse=True)[1]

    return rule(primal, bwd), (r.n(T, D), r.n(T, D), r.n(T, D), r.u(0.7, 0.99, T)), (0, 1, 2, 3)


@family(
    "diagonal SSM scan",
    stale_h="da_t uses h_t, not h_{t-1}",
    h0="cotangent of the initial state lacks the first decay",
)
def ssm_scan(bug):
    r = Rnd(19)
    T, N = 9, 4

    def hs(a, b, h0):
        def step(h, t):
            h = t[0] * h + t[1]
            return h, h

        return lax.scan(step, h0, (a, b))[1]

    def primal(a, b, c, h0):
        return jnp.sum(c * hs(a, b, h0), -1)

    def bwd(args, y, g):
        a, b, c, h0 = args
        h = hs(a, b, h0)
        hp = h if bug == "stale_h" else jnp.concatenate([h0[None], h[:-1]])

        def step(lam, t):
            a, gc, hp = t
            lam = lam + gc
            return a * lam, (lam * hp, lam)

        dh0, (da, db) = lax.scan(step, jnp.zeros_like(h0), (a, g[:, None] * c, hp), reverse=True)
        if bug == "h0":
            dh0 = db[0]
        return da, db, g[:, None] * h, dh0

    return rule(primal, bwd), (r.u(0.5, 0.98, T, N), r.n(T, N), r.n(T, N), r.n(N)), (0, 1, 2, 3)


@family(
    "LSTM cell hand-written backward",
    own=True,
    forget="forget-gate gradient uses the new cell state",
    c_path="cell cotangent from h ignores the direct dc",
)
def lstm_cell(bug):
    r = Rnd(20)
    sg = jax.nn.sigmoid

    def gates(x, h, W):
        return jnp.split(jnp.concatenate([x, h], -1) @ W, 4, -1)

    def primal(x, h, c, W):
        i, f, o, u = gates(x, h, W)
        cn = sg(f) * c + sg(i) * jnp.tanh(u)
        return sg(o) * jnp.tanh(cn), cn

    def bwd(a, y, g):
        x, h, c, W = a
        gh, gc = g
        i, f, o, u = gates(x, h, W)
        i, f, o, u = sg(i), sg(f), sg(o), jnp.tanh(u)
        cn = y[1]
        tc = jnp.tanh(cn)
        dc = gh * o * (1 - tc * tc)
        if bug != "c_path":
            dc = dc + gc
        dz = jnp.concatenate(
            [
                dc * u * i * (1 - i),
                dc * (cn if bug == "forget" else c) * f * (1 - f),
                gh * tc * o * (1 - o),
                dc * i * (1 - u * u),
            ],
            -1,
        )
        xh = jnp.concatenate([x, h], -1)
        dxh = dz @ W.T
        return dxh[:, : x.shape[1]], dxh[:, x.shape[1] :], dc * f, xh.T @ dz

    return rule(primal, bwd), (r.n(3, 2), r.n(3, 4), r.n(3, 4), r.n(6, 16, k=0.5)), (0, 1, 2, 3)


@family(
    "top-2 mixture of experts, gates renormalized over the two picked",
    renorm="gate backward treats the renormalizing sum as constant",
    combine="experts' gradient not weighted by the gate of the second pick",
)
def moe_top2(bug):
    r = Rnd(21)

    def gate(z):
        p = jax.nn.softmax(z, -1)
        v, i = lax.top_k(p, 2)
        return v / v.sum(-1, keepdims=True), i

    def combine_p(y, g, i):
        return jnp.sum(jnp.take_along_axis(y, i[..., None], 1) * g[..., None], 1)

    def combine_b(a, out, ct):
        y, g, i = a
        w = g.at[:, 1].set(1) if bug == "combine" else g
        dsel = ct[:, None] * w[..., None]
        n = jnp.arange(y.shape[0])[:, None]
        return (
            jnp.zeros_like(y).at[n, i].add(dsel),
            jnp.sum(jnp.take_along_axis(y, i[..., None], 1) * ct[:, None], -1),
            None,
        )

    combine = rule(combine_p, combine_b)

    def gate_b(z, out, ct):
        (z,) = z
        ct = ct[0]
        v, i = out
        d = ct * v if bug == "renorm" else v * (ct - jnp.sum(ct * v, -1, keepdims=True))
        return (jnp.zeros_like(z).at[jnp.arange(z.shape[0])[:, None], i].add(d),)

    gate_c = rule(gate, gate_b)

    def f(x, wg, we):
        g, i = gate_c(x @ wg)
        return combine(jnp.einsum("nd,edk->nek", x, we), g, i)

    return f, (r.n(8, 4), r.n(4, 5), r.n(5, 4, 3)), (0, 1, 2)


@family(
    "embedding lookup with repeated tokens",
    set_not_add="scatter with .set: repeated tokens overwrite",
    scale="sqrt(d) embedding scale missing in the backward",
)
def embedding(bug):
    r = Rnd(22)
    ids = np.array([[1, 4, 4, 0], [7, 1, 9, 9]], np.int32)

    def primal(E, ids):
        return E[ids] * np.sqrt(6.0).astype(E.dtype)

    def bwd(a, y, g):
        E, ids = a
        g = g * (1.0 if bug == "scale" else np.sqrt(6.0).astype(E.dtype))
        z = jnp.zeros_like(E).at[ids]
        return (z.set(g) if bug == "set_not_add" else z.add(g)), None

    return rule(primal, bwd), (r.n(10, 6), ids), (0,)


@family("LoRA linear layer", own=True, scale_one="alpha/r missing from dA only")
def lora(bug):
    r = Rnd(23)
    s = 16 / 3

    def primal(x, W, A, B):
        return x @ W + s * (x @ A) @ B

    def bwd(a, y, g):
        x, W, A, B = a
        gB = g @ B.T
        return (g @ W.T + s * gB @ A.T, x.T @ g, (1 if bug else s) * x.T @ gB, s * (x @ A).T @ g)

    return (
        rule(primal, bwd),
        (r.n(5, 6), r.n(6, 4), r.n(6, 3, k=0.1), r.n(3, 4, k=0.1)),
        (0, 1, 2, 3),
    )


@family(
    "autoencoder with tied weights, relu code",
    double="decoder contribution to W counted twice",
    decoder_lost="only the encoder use of W gets gradient",
)
def tied_weights(bug):
    r = Rnd(24)

    def primal(x, W):
        return jax.nn.relu(x @ W) @ W.T

    def bwd(a, y, g):
        x, W = a
        pre = x @ W
        h = jax.nn.relu(pre)
        dp = (g @ W) * (pre > 0)
        dec = g.T @ h
        k = {"double": 2, "decoder_lost": 0}.get(bug, 1)
        return dp @ W.T, x.T @ dp + k * dec

    return rule(primal, bwd), (r.n(4, 6), r.n(6, 3)), (0, 1)


@family(
    "softmax head that also returns lse (z-loss)",
    lse_ignored="cotangent of the second output ignored",
)
def softmax_with_lse(bug):
    r = Rnd(25)

    def primal(x):
        l = jax.nn.logsumexp(x, -1)
        return jnp.exp(x - l[:, None]), l

    def bwd(a, y, g):
        p, _ = y
        gp, gl = g
        d = p * (gp - jnp.sum(p * gp, -1, keepdims=True))
        return (d if bug else d + p * gl[:, None],)

    return rule(primal, bwd), (r.n(4, 6),), (0,)


@family(
    "dropout with a key argument",
    own=True,
    rescale="1/(1-p) left out of the backward",
    redraw="backward redraws its mask from a split key",
)
def dropout(bug):
    r = Rnd(26)

    def mask(key, s):
        return jax.random.uniform(key, s, dtype=jnp.float32) < 0.75

    def primal(x, key):
        return jnp.where(mask(key, x.shape), x / 0.75, 0)

    def bwd(a, y, g):
        x, key = a
        if bug == "redraw":
            key = jax.random.split(key)[0]
        return jnp.where(mask(key, x.shape), g if bug == "rescale" else g / 0.75, 0), None

    return rule(primal, bwd), (r.n(5, 8), np.array([0, 42], np.uint32)), (0,)


# ---------------------------------------------------------------- convolution, FFT, transforms
@family(
    "dilated 1-D convolution by hand, zero padding",
    dx_flip="dx is the correlation again (kernel not flipped)",
    dw_pad="dw window off by one in the padding",
)
def conv1d_dilated(bug):
    r = Rnd(40)
    K, dil, pad = 3, 2, 2

    def taps(x, p=pad):
        T = x.shape[-1]
        xp = jnp.pad(x, ((0, 0), (p, 2 * pad - p)))
        return jnp.stack([xp[:, k * dil : k * dil + T] for k in range(K)], 1)

    def primal(x, w):
        return jnp.einsum("ckt,okc->ot", taps(x), w)

    def bwd(a, y, g):
        x, w = a
        t = taps(g)
        dx = jnp.einsum("okt,okc->ct", t, w if bug == "dx_flip" else w[:, ::-1])
        dw = jnp.einsum("ckt,ot->okc", taps(x, pad - 1 if bug == "dw_pad" else pad), g)
        return dx, dw

    return rule(primal, bwd), (r.n(3, 11), r.n(2, K, 3)), (0, 1)


@family("circular convolution through rfft", conj="conjugate of the kernel spectrum missing in dx")
def fft_conv(bug):
    r = Rnd(41)
    F, I = jnp.fft.rfft, jnp.fft.irfft

    def primal(x, k):
        return I(F(x) * F(k), n=x.shape[-1])

    def bwd(a, y, g):
        x, k = a
        G = F(g)
        dx = I(G * (F(k) if bug else jnp.conj(F(k))), n=x.shape[-1])
        return dx, I(G * jnp.conj(F(x)), n=x.shape[-1]).sum(0)

    return rule(primal, bwd), (r.n(3, 9), r.n(9)), (0, 1)


@family(
    "band power of the half spectrum (even length)",
    own=True,
    nyquist="Nyquist bin doubled like the inner bins in the backward",
    hermitian="inner bins not doubled in the backward",
)
def band_power(bug):
    r = Rnd(42)
    N = 16

    def wts(x):
        w = np.full(N // 2 + 1, 2.0)
        w[0] = w[-1] = 1
        return jnp.asarray(w, x.dtype)

    def primal(x, filt):
        X = jnp.fft.rfft(x)
        return jnp.sum(wts(x) * filt * (X.real**2 + X.imag**2), -1) / N

    def bwd(a, y, g):
        x, filt = a
        X = jnp.fft.rfft(x)
        w = np.ones(N // 2 + 1)
        if bug == "nyquist":
            w[-1] = 2
        if bug == "hermitian":
            w[1:-1] = 0.5
        w = jnp.asarray(w, x.dtype)
        dx = 2 * jnp.fft.irfft(X * filt * w, n=N) * g[:, None]
        return dx, jnp.sum(wts(x) * (X.real**2 + X.imag**2) * g[:, None], 0) / N

    return rule(primal, bwd), (r.n(3, N), r.u(0.2, 1, N // 2 + 1)), (0, 1)


@family(
    "complex product; JAX cotangents of holomorphic maps are not conjugated",
    conj="PyTorch convention: cotangent multiplied by the conjugate",
)
def complex_mul(bug):
    r = Rnd(43)

    def primal(z, w):
        return z * w

    def bwd(a, y, g):
        z, w = a
        return (g * jnp.conj(w), g * jnp.conj(z)) if bug else (g * w, g * z)

    cm = rule(primal, bwd)

    def f(a, b, c, d):
        y = cm(lax.complex(a, b), lax.complex(c, d))
        return y.real, y.imag

    return f, (r.n(6), r.n(6), r.n(6), r.n(6)), (0, 1, 2, 3)


@family(
    "complex phase-retrieval amplitude |F z| with a custom rule on |.|",
    phase="unit phase not conjugated in the cotangent",
)
def complex_abs(bug):
    r = Rnd(44)

    def bwd(a, y, g):
        z = a[0]
        u = z / y
        return (g * (u if bug else jnp.conj(u)),)

    ab = rule(lambda z: jnp.abs(z), bwd)

    def f(re, im):
        return ab(jnp.fft.fft(lax.complex(re, im)))

    return f, (r.n(7), r.n(7)), (0, 1)


@family("complex-valued output: impulse response of a damped oscillator (plain AD)")
def complex_output(bug):
    r = Rnd(45)

    def f(w, tau, amp):
        t = jnp.arange(12, dtype=w.dtype) * 0.2
        return jnp.sum(amp[:, None] * jnp.exp(lax.complex(-t / tau[:, None], w[:, None] * t)), 0)

    return f, (r.u(1, 4, 3), r.u(0.5, 2, 3), r.n(3)), (0, 1, 2)


@family(
    "fast Walsh-Hadamard transform, orthonormal", own=True, scale="backward lacks the 1/sqrt(n)"
)
def hadamard(bug):
    r = Rnd(46)

    def wht(x):
        n = x.shape[-1]
        h = 1
        while h < n:
            x = x.reshape(x.shape[0], -1, 2, h)
            x = jnp.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], 2).reshape(
                x.shape[0], n
            )
            h *= 2
        return x

    def primal(x):
        return wht(x) / np.sqrt(x.shape[-1]).astype(x.dtype)

    def bwd(a, y, g):
        return (wht(g) if bug else primal(g),)

    return rule(primal, bwd), (r.n(2, 16),), (0,)


@family(
    "pixel shuffle",
    own=True,
    perm_again="backward applies the forward axis order instead of its inverse",
)
def pixel_shuffle(bug):
    r = Rnd(47)
    s = 2

    def primal(x):
        C, H, W = x.shape
        return x.reshape(C // 4, s, s, H, W).transpose(0, 3, 1, 4, 2).reshape(C // 4, H * s, W * s)

    def bwd(a, y, g):
        C, H, W = a[0].shape
        z = g.reshape(C // 4, H, s, W, s)
        z = z.transpose(0, 4, 2, 1, 3) if bug else z.transpose(0, 2, 4, 1, 3)
        return (z.reshape(C, H, W),)

    return rule(primal, bwd), (r.n(8, 3, 3),), (0,)


@family(
    "overlapping max pooling, window 3 stride 2",
    own=True,
    overlap_set="overlapping windows overwrite each other's gradient",
)
def maxpool_overlap(bug):
    r = Rnd(48)

    def idx(T):
        return np.arange(0, T - 2, 2)[:, None] + np.arange(3)

    def primal(x):
        return x[:, idx(x.shape[1])].max(-1)

    def bwd(a, y, g):
        x = a[0]
        ix = idx(x.shape[1])
        am = jnp.asarray(ix)[:, 0] + x[:, ix].argmax(-1)
        z = jnp.zeros_like(x).at[jnp.arange(x.shape[0])[:, None], am]
        return (z.set(g) if bug else z.add(g),)

    return rule(primal, bwd), (r.n(4, 15),), (0,)


@family(
    "average pooling SAME, padding excluded from the count",
    own=True,
    edge_count="backward divides by the full window at the edges",
)
def avgpool_edge(bug):
    r = Rnd(49)

    def win(x):
        xp = jnp.pad(x, ((0, 0), (1, 1)))
        return xp[:, :-2] + xp[:, 1:-1] + xp[:, 2:]

    def cnt(T, dt):
        c = np.full(T, 3.0)
        c[0] = c[-1] = 2
        return jnp.asarray(c, dt)

    def primal(x):
        return win(x) / cnt(x.shape[1], x.dtype)

    def bwd(a, y, g):
        return (win(g / (3 if bug else cnt(g.shape[1], g.dtype))),)

    return rule(primal, bwd), (r.n(2, 9),), (0,)


@family("nearest upsampling x3", own=True, mean="backward averages the 3x3 block")
def upsample_nearest(bug):
    r = Rnd(50)

    def primal(x):
        return jnp.repeat(jnp.repeat(x, 3, 0), 3, 1)

    def bwd(a, y, g):
        H, W = a[0].shape
        z = g.reshape(H, 3, W, 3)
        return (z.mean((1, 3)) if bug else z.sum((1, 3)),)

    return rule(primal, bwd), (r.n(3, 4),), (0,)


@family(
    "bilinear sampling of an image at query points",
    swap="x and y components of the coordinate gradient swapped",
    align="align_corners scale (W-1)/2 missing from dx only",
)
def bilinear_sample(bug):
    r = Rnd(51)

    def parts(im, uv):
        H, W = im.shape
        x = (uv[:, 0] + 1) * (W - 1) / 2
        y = (uv[:, 1] + 1) * (H - 1) / 2
        x0, y0 = jnp.floor(x).astype(int), jnp.floor(y).astype(int)
        return x - x0, y - y0, x0, y0

    def primal(im, uv):
        a, b, i, j = parts(im, uv)
        return (1 - b) * ((1 - a) * im[j, i] + a * im[j, i + 1]) + b * (
            (1 - a) * im[j + 1, i] + a * im[j + 1, i + 1]
        )

    def bwd(args, out, g):
        im, uv = args
        H, W = im.shape
        a, b, i, j = parts(im, uv)
        dim = jnp.zeros_like(im)
        for dj, wb in ((0, 1 - b), (1, b)):
            for di, wa in ((0, 1 - a), (1, a)):
                dim = dim.at[j + dj, i + di].add(g * wa * wb)
        dx = (1 - b) * (im[j, i + 1] - im[j, i]) + b * (im[j + 1, i + 1] - im[j + 1, i])
        dy = (1 - a) * (im[j + 1, i] - im[j, i]) + a * (im[j + 1, i + 1] - im[j, i + 1])
        dx = dx * (1 if bug == "align" else (W - 1) / 2)
        dy = dy * (H - 1) / 2
        d = jnp.stack([dy, dx] if bug == "swap" else [dx, dy], -1)
        return dim, g[:, None] * d

    return rule(primal, bwd), (r.n(5, 7), r.u(-0.95, 0.95, 8, 2)), (0, 1)


@family(
    "5-point heat step with a no-flux left wall and a Dirichlet right wall",
    own=True,
    wall="adjoint treats the no-flux wall like an inner cell",
)
def heat_step(bug):
    r = Rnd(52)

    def lap(u):
        up = jnp.concatenate([u[:1], u, jnp.zeros_like(u[:1])])
        return up[:-2] - 2 * u + up[2:]

    def primal(u, k):
        for _ in range(3):
            u = u + k * lap(u)
        return u

    def bwd(a, y, g):
        u, k = a
        us = []
        for _ in range(3):
            us.append(u)
            u = u + k * lap(u)
        dk = 0
        for u in us[::-1]:
            dk = dk + jnp.sum(g * lap(u))
            h = g * k
            L = jnp.concatenate([jnp.zeros_like(h[:1]), h, jnp.zeros_like(h[:1])])
            A = L[:-2] - 2 * h + L[2:]
            if not bug:
                A = A.at[0].add(h[0])
            g = g + A
        return g, dk

    return rule(primal, bwd), (r.n(12), np.float32(0.21)), (0, 1)


@family(
    "upwind advection with a velocity of both signs",
    own=True,
    negative_v="backward uses the left stencil also where the velocity is negative",
)
def upwind(bug):
    r = Rnd(53)

    def primal(u, v):
        left = u - jnp.roll(u, 1)
        right = jnp.roll(u, -1) - u
        return u - 0.3 * jnp.where(v > 0, v * left, v * right)

    def bwd(a, y, g):
        u, v = a
        left, right = u - jnp.roll(u, 1), jnp.roll(u, -1) - u
        gp = -0.3 * g * v
        l, q = (gp, 0 * gp) if bug else (jnp.where(v > 0, gp, 0), jnp.where(v > 0, 0, gp))
        du = g + l - jnp.roll(l, -1) + jnp.roll(q, 1) - q
        return du, -0.3 * g * jnp.where(v > 0, left, right)

    return rule(primal, bwd), (r.n(10), r.n(10)), (0, 1)


# ---------------------------------------------------------------- linear algebra
@family(
    "linear solve, unsymmetric matrix",
    no_transpose="adjoint solve uses A, not A^T",
    outer_t="dA = -x lam^T (transposed outer product)",
)
def solve_rule(bug):
    r = Rnd(60)

    def bwd(a, x, g):
        A, b = a
        lam = jnp.linalg.solve(A if bug == "no_transpose" else A.T, g)
        return (-jnp.outer(x, lam) if bug == "outer_t" else -jnp.outer(lam, x)), lam

    return (
        rule(jnp.linalg.solve, bwd),
        (r.n(5, 5) + 3 * np.eye(5, dtype=np.float32), r.n(5)),
        (0, 1),
    )


@family(
    "least squares by normal equations, overdetermined",
    residual="dA lacks the residual term (rule of the square case)",
)
def lstsq_rule(bug):
    r = Rnd(61)

    def primal(A, b):
        return jnp.linalg.solve(A.T @ A, A.T @ b)

    def bwd(a, x, g):
        A, b = a
        lam = jnp.linalg.solve(A.T @ A, g)
        db = A @ lam
        dA = -jnp.outer(db, x)
        if not bug:
            dA = dA + jnp.outer(b - A @ x, lam)
        return dA, db

    return rule(primal, bwd), (r.n(8, 3), r.n(8)), (0, 1)


@family(
    "Cholesky of B B^T + 4I",
    half_diag="Phi does not halve the diagonal",
    no_sym="cotangent only lower-triangular, not symmetrized, times 2 lost",
)
def cholesky_rule(bug):
    r = Rnd(62)

    def bwd(a, L, g):
        S = jnp.tril(L.T @ g)
        if bug != "half_diag":
            S = S - 0.5 * jnp.diag(jnp.diag(S))
        Li = jax.scipy.linalg.solve_triangular(L, jnp.eye(L.shape[0], dtype=L.dtype), lower=True)
        M = Li.T @ S @ Li
        return (jnp.tril(M) if bug == "no_sym" else 0.5 * (M + M.T),)

    ch = rule(lambda A: jnp.linalg.cholesky(A), bwd)

    def f(B):
        return ch(B @ B.T + 4 * jnp.eye(B.shape[0], dtype=B.dtype))

    return f, (r.n(4, 4),), (0,)


@family(
    "matrix logarithm of an SPD matrix by eigh, Daleckii-Krein rule, a doubled eigenvalue",
    diag_f="divided difference on equal eigenvalues filled with f, not f'",
    no_backrot="cotangent not rotated into the eigenbasis on the right",
)
def logm_spd(bug):
    r = Rnd(63)
    Q = np.linalg.qr(r.n(5, 5))[0]
    A = (Q * np.array([0.5, 1.5, 1.5, 2.2, 4])) @ Q.T

    def primal(A):
        w, V = jnp.linalg.eigh(0.5 * (A + A.T))
        return (V * jnp.log(w)) @ V.T

    def bwd(a, y, g):
        w, V = jnp.linalg.eigh(0.5 * (a[0] + a[0].T))
        d = w[:, None] - w[None]
        near = jnp.abs(d) < 1e-3 * w[:, None]
        lw = jnp.log(w)
        fill = lw[:, None] + 0 * d if bug == "diag_f" else 2 / (w[:, None] + w[None])
        K = jnp.where(near, fill, (lw[:, None] - lw[None]) / jnp.where(near, 1, d))
        G = V.T @ (0.5 * (g + g.T))
        G = G if bug == "no_backrot" else G @ V
        M = V @ (K * G) @ V.T
        return (0.5 * (M + M.T),)

    return rule(primal, bwd), (np.asarray(A, np.float32),), (0,)


@family(
    right=None,
    ad_nan="plain AD through eigh of a matrix with exactly equal eigenvalues: NaN, though sum f(lambda) is smooth",
)
def eigh_degenerate(bug):
    Rnd(64)
    A = np.diag(np.array([2, 2, 3, 5], np.float32))

    def f(A):
        w, V = jnp.linalg.eigh(0.5 * (A + A.T))
        return (V * jnp.sqrt(w)) @ V.T

    return f, (A,), (0,)


@family("nuclear norm through svd, rectangular", uv="gradient scaled by the singular values")
def nuclear_norm(bug):
    r = Rnd(65)

    def bwd(a, y, g):
        U, s, Vt = jnp.linalg.svd(a[0], full_matrices=False)
        return (g * (U * s if bug else U) @ Vt,)

    return rule(lambda A: jnp.linalg.svd(A, compute_uv=False).sum(), bwd), (r.n(4, 6),), (0,)


@family("log|det| of an unsymmetric matrix", transposed="gradient is A^-1, not A^-T")
def logdet_rule(bug):
    r = Rnd(66)

    def bwd(a, y, g):
        I = jnp.linalg.inv(a[0])
        return (g * (I if bug else I.T),)

    return rule(lambda A: jnp.linalg.slogdet(A)[1], bwd), (r.n(5, 5),), (0,)


@family(
    "determinant of a singular 3x3 matrix by cofactors",
    own=True,
    nan="det * inv^T at a singular matrix: the derivative is the cofactor matrix",
)
def det_singular(bug):
    A = np.array([[1, 2, 3], [2, 4, 6], [0.5, -1, 1]], np.float32)

    def primal(A):
        return A[0] @ jnp.cross(A[1], A[2])

    def bwd(a, y, g):
        A = a[0]
        if bug:
            return (g * y * jnp.linalg.inv(A).T,)
        return (
            g * jnp.stack([jnp.cross(A[1], A[2]), jnp.cross(A[2], A[0]), jnp.cross(A[0], A[1])]),
        )

    return rule(primal, bwd), (A,), (0,)


@family(
    "matrix exponential, adjoint by the block-triangular trick",
    commuting="dA = expm(A)^T g as if dA commuted with A",
)
def expm_rule(bug):
    r = Rnd(67)
    ex = jax.scipy.linalg.expm

    def bwd(a, y, g):
        A = a[0].T
        n = A.shape[0]
        if bug:
            return (y.T @ g,)
        Z = jnp.zeros_like(A)
        return (ex(jnp.block([[A, g], [Z, A]]))[:n, n:],)

    return rule(lambda A: ex(A), bwd), (r.n(4, 4, k=0.5),), (0,)


@family(
    "Lyapunov equation A X + X A^T + Q = 0 by Kronecker solve",
    own=True,
    adjoint="adjoint equation solved with A instead of A^T",
    one_side="dA from one of the two products only",
)
def lyapunov(bug):
    r = Rnd(68)

    def lyap(A, Q):
        n = A.shape[0]
        I = jnp.eye(n, dtype=A.dtype)
        return jnp.linalg.solve(jnp.kron(A, I) + jnp.kron(I, A), -Q.reshape(-1)).reshape(n, n)

    def bwd(a, X, g):
        A, Q = a
        S = lyap(A if bug == "adjoint" else A.T, g)
        dA = S @ X.T
        dA = 2 * dA if bug == "one_side" else dA + S.T @ X
        return dA, S

    A = r.n(3, 3, k=0.5) - 2 * np.eye(3, dtype=np.float32)
    return rule(lyap, bwd), (A, r.n(3, 3)), (0, 1)


@family(
    "tridiagonal (Thomas) solve with its adjoint solve",
    own=True,
    bands="sub- and superdiagonal not exchanged in the adjoint solve",
    first="gradient of the superdiagonal taken with x of the same row",
)
def tridiag(bug):
    r = Rnd(69)

    def thomas(l, d, u, b):
        def fw(c, t):
            cp, bp = c
            l, d, u, b = t
            m = d - l * cp
            cp, bp = u / m, (b - l * bp) / m
            return (cp, bp), (cp, bp)

        z = jnp.zeros((), d.dtype)
        l = jnp.concatenate([z[None], l])
        u = jnp.concatenate([u, z[None]])
        _, (cp, bp) = lax.scan(fw, (z, z), (l, d, u, b))

        def bk(x, t):
            x = t[1] - t[0] * x
            return x, x

        return lax.scan(bk, z, (cp, bp), reverse=True)[1]

    def bwd(a, x, g):
        l, d, u, b = a
        lam = thomas(l, d, u, g) if bug == "bands" else thomas(u, d, l, g)
        du = -lam[:-1] * (x[:-1] if bug == "first" else x[1:])
        return -lam[1:] * x[:-1], -lam * x, du, lam

    n = 7
    return rule(thomas, bwd), (r.n(n - 1), r.u(3, 4, n), r.n(n - 1), r.n(n)), (0, 1, 2, 3)


@family("Householder reflection of an unnormalized v", norm="derivative of 1/|v|^2 left out")
def householder(bug):
    r = Rnd(70)

    def primal(v, x):
        return x - 2 * v * (v @ x) / (v @ v)

    def bwd(a, y, g):
        v, x = a
        n = v @ v
        dv = -2 * (g * (v @ x) + x * (v @ g)) / n
        if not bug:
            dv = dv + 4 * v * (v @ g) * (v @ x) / n**2
        return dv, primal(v, g)

    return rule(primal, bwd), (r.n(5), r.n(5)), (0, 1)


@family("QR-based orthonormal basis projector (plain AD, sign free)")
def qr_projector(bug):
    r = Rnd(71)

    def f(A, x):
        Q, _ = jnp.linalg.qr(A)
        return Q @ (Q.T @ x)

    return f, (r.n(6, 3), r.n(6)), (0, 1)


@family(
    "inverse square root by 20 Newton-Schulz steps with the implicit (Sylvester) rule",
    own=True,
    one_sided="Sylvester adjoint approximated by half a solve",
)
def inv_sqrt_ns(bug):
    r = Rnd(72)

    def primal(A):
        A = 0.5 * (A + A.T)
        n = A.shape[0]
        I = jnp.eye(n, dtype=A.dtype)
        c = jnp.linalg.norm(A)
        Y, Z = A / c, I
        for _ in range(20):
            T = 1.5 * I - 0.5 * Z @ Y
            Y, Z = Y @ T, T @ Z
        return Z / jnp.sqrt(c)

    def bwd(a, Z, g):
        g = 0.5 * (g + g.T)
        n = Z.shape[0]
        S = jnp.linalg.inv(Z)
        G = -(Z @ g @ Z)
        if bug:
            M = 0.5 * jnp.linalg.solve(S, G)
        else:
            I = jnp.eye(n, dtype=Z.dtype)
            M = jnp.linalg.solve(jnp.kron(S, I) + jnp.kron(I, S), G.reshape(-1)).reshape(n, n)
        return (0.5 * (M + M.T),)

    B = r.n(4, 4)
    return rule(primal, bwd), (B @ B.T / 4 + np.eye(4, dtype=np.float32),), (0,)


@family(
    "pairwise distance kernel sum of one set, double where on the diagonal",
    diag_nan="sqrt at the zero diagonal: NaN",
)
def cdist_self(bug):
    r = Rnd(73)

    def f(x):
        d2 = jnp.sum((x[:, None] - x[None]) ** 2, -1)
        if bug:
            return jnp.exp(-jnp.sqrt(d2)).sum(1)
        z = d2 == 0
        return jnp.exp(-jnp.where(z, 0, jnp.sqrt(jnp.where(z, 1, d2)))).sum(1)

    return f, (r.n(6, 3),), (0,)


@family("cosine similarity rows", second="gradient of the second argument not projected")
def cosine(bug):
    r = Rnd(74)

    def primal(a, b):
        return jnp.sum(a * b, -1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))

    def bwd(args, y, g):
        a, b = args
        na, nb = (
            jnp.linalg.norm(a, axis=-1, keepdims=True),
            jnp.linalg.norm(b, axis=-1, keepdims=True),
        )
        g, y = g[:, None], y[:, None]
        return (
            g * (b / nb - y * a / na) / na,
            g * (a / na) / nb if bug else g * (a / na - y * b / nb) / nb,
        )

    return rule(primal, bwd), (r.n(5, 4), r.n(5, 4, k=8)), (0, 1)


@family("Poincare ball distance (arccosh)", alpha_beta="v's rule uses u's conformal factor")
def poincare(bug):
    r = Rnd(75)

    def primal(u, v):
        al, be = 1 - jnp.sum(u * u, -1), 1 - jnp.sum(v * v, -1)
        return jnp.arccosh(1 + 2 * jnp.sum((u - v) ** 2, -1) / (al * be))

    def half(u, v, y, g, al, be):
        d2 = jnp.sum((u - v) ** 2, -1)
        c = (2 / (al * be) / jnp.sinh(y) * g)[:, None]
        return c * (2 * (u - v) + 2 * u * (d2 / al)[:, None])

    def bwd(a, y, g):
        u, v = a
        al, be = 1 - jnp.sum(u * u, -1), 1 - jnp.sum(v * v, -1)
        return half(u, v, y, g, al, be), half(v, u, y, g, al if bug else be, be if bug else al)

    return rule(primal, bwd), (r.u(-0.5, 0.5, 5, 2), r.u(-0.5, 0.5, 5, 2)), (0, 1)


@family(
    "Haversine distance in km from degrees",
    own=True,
    radians="longitude gradient lacks pi/180",
    cos_lat="lat1 gradient lacks the d cos(lat1) term",
)
def haversine(bug):
    Rnd(76)
    R, D = 6371.0, np.pi / 180

    def primal(p, q):
        a, b = p * D, q * D
        h = (
            jnp.sin((b[0] - a[0]) / 2) ** 2
            + jnp.cos(a[0]) * jnp.cos(b[0]) * jnp.sin((b[1] - a[1]) / 2) ** 2
        )
        return 2 * R * jnp.arcsin(jnp.sqrt(h))

    def bwd(args, y, g):
        a, b = args[0] * D, args[1] * D
        s2 = jnp.sin((b[1] - a[1]) / 2) ** 2
        h = jnp.sin((b[0] - a[0]) / 2) ** 2 + jnp.cos(a[0]) * jnp.cos(b[0]) * s2
        c = g * R / jnp.sqrt(h * (1 - h)) * D
        dl = 0.5 * jnp.sin(b[0] - a[0])
        dlon = 0.5 * jnp.cos(a[0]) * jnp.cos(b[0]) * jnp.sin(b[1] - a[1])
        da0 = -dl - (0 if bug == "cos_lat" else jnp.sin(a[0]) * jnp.cos(b[0]) * s2)
        db0 = dl - jnp.cos(a[0]) * jnp.sin(b[0]) * s2
        k = 1 / D if bug == "radians" else 1
        return jnp.stack([c * da0, -c * dlon * k]), jnp.stack([c * db0, c * dlon * k])

    return (
        rule(primal, bwd),
        (np.array([47.4, 8.5], np.float32), np.array([40.7, -74.0], np.float32)),
        (0, 1),
    )


@family(
    "cross product",
    own=True,
    operand_order="first argument's gradient has the operands in the wrong order",
)
def cross_rule(bug):
    r = Rnd(77)

    def bwd(args, y, g):
        a, b = args
        return (jnp.cross(g, b) if bug else jnp.cross(b, g)), jnp.cross(g, a)

    return rule(lambda a, b: jnp.cross(a, b), bwd), (r.n(4, 3), r.n(4, 3)), (0, 1)


@family("rotation by an unnormalized quaternion", norm="normalization of q not differentiated")
def quat_rotate(bug):
    r = Rnd(78)

    def rot(u, v):
        w, q = u[..., :1], u[..., 1:]
        t = 2 * jnp.cross(q, v)
        return v + w * t + jnp.cross(q, t)

    def primal(q, v):
        return rot(q / jnp.linalg.norm(q, axis=-1, keepdims=True), v)

    def bwd(a, y, g):
        q, v = a
        n = jnp.linalg.norm(q, axis=-1, keepdims=True)
        u = q / n
        du, dv = jax.vjp(rot, u, v)[1](g)
        if not bug:
            du = du - u * jnp.sum(u * du, -1, keepdims=True)
        return du / n, dv

    return rule(primal, bwd), (r.n(4, 4), r.n(4, 3)), (0, 1)


@family(
    "Rodrigues exp map, one zero rotation vector, double where",
    nan="zero rotation gives NaN",
    small="small-angle branch drops the first-order term",
)
def rodrigues(bug):
    r = Rnd(79)
    w = r.n(4, 3)
    w[1] = 0
    w[2] *= 1e-3

    def f(w, v):
        t2 = jnp.sum(w * w, -1, keepdims=True)
        if bug == "nan":
            t = jnp.sqrt(t2)
            z = t == 0
            A = jnp.where(z, 1.0, jnp.sin(t) / t)
            B = jnp.where(z, 0.5, (1 - jnp.cos(t)) / t2)
        else:
            sm = t2 < 1e-4
            t = jnp.sqrt(jnp.where(sm, 1, t2))
            A = jnp.where(sm, 1 - t2 / 6, jnp.sin(t) / t)
            B = jnp.where(sm, 0.5 - t2 / 24, (1 - jnp.cos(t)) / (t * t))
        c = jnp.cross(w, v)
        return v + A * c + B * jnp.cross(w, c)

    if bug == "small":
        full = f

        def bwd(a, y, g):
            dw, dv = jax.vjp(full, *a)[1](g)
            t2 = jnp.sum(a[0] ** 2, -1, keepdims=True)
            return jnp.where(t2 < 1e-12, 0, dw), dv

        return rule(full, bwd), (w, r.n(4, 3)), (0, 1)
    return f, (w, r.n(4, 3)), (0, 1)


# ---------------------------------------------------------------- ODE, interpolation, solvers
@family(
    "ODE x' = tanh(W x + b) by RK4 with the continuous adjoint (40 fine steps)",
    euler="adjoint integrated by explicit Euler (error of about 1 %)",
    theta_last="parameter quadrature leaves out the last step",
)
def ode_adjoint(bug):
    r = Rnd(100)
    n, T = 40, 1.0
    h = T / n

    def rk4(f, z):
        a = f(z)
        b = f(jax.tree.map(lambda x, k: x + h / 2 * k, z, a))
        c = f(jax.tree.map(lambda x, k: x + h / 2 * k, z, b))
        d = f(jax.tree.map(lambda x, k: x + h * k, z, c))
        return jax.tree.map(
            lambda x, a, b, c, d: x + h / 6 * (a + 2 * b + 2 * c + d), z, a, b, c, d
        )

    def vf(x, W, b):
        return jnp.tanh(W @ x + b)

    def primal(x, W, b):
        return lax.fori_loop(0, n, lambda i, x: rk4(lambda z: vf(z, W, b), x), x)

    def bwd(args, y, g):
        _, W, b = args

        def aug(s):
            x, lam, _, _ = s
            f, pull = jax.vjp(vf, x, W, b)
            dx, dW, db = pull(lam)
            return (-f, dx, dW, db)

        def step(i, s):
            if bug == "euler":
                return jax.tree.map(lambda x, k: x + h * k, s, aug(s))
            t = rk4(aug, s)
            if bug == "theta_last":
                t = (
                    t[0],
                    t[1],
                    jnp.where(i == n - 1, s[2], t[2]),
                    jnp.where(i == n - 1, s[3], t[3]),
                )
            return t

        s = lax.fori_loop(0, n, step, (y, g, jnp.zeros_like(W), jnp.zeros_like(b)))
        return s[1], s[2], s[3]

    return rule(primal, bwd), (r.n(3), r.n(3, 3), r.n(3)), (0, 1, 2)


@family(
    "leapfrog integrator reconstructed backward in time (reversible, no stored states)",
    own=True,
    force="reconstruction kicks with the force at the old position",
)
def leapfrog_reversible(bug):
    r = Rnd(101)
    h, n = 0.15, 8

    def force(q, k):
        return -k * q - 0.3 * q**3

    def primal(q, p, k):
        def st(i, s):
            q, p = s
            p = p + h / 2 * force(q, k)
            q = q + h * p
            return q, p + h / 2 * force(q, k)

        return lax.fori_loop(0, n, st, (q, p))

    def one(q, p, k):
        p = p + h / 2 * force(q, k)
        q = q + h * p
        return q, p + h / 2 * force(q, k)

    def bwd(a, y, g):
        k = a[2]

        def st(i, s):
            q, p, gq, gp, gk = s
            ph = p - h / 2 * force(q, k)
            q0 = q - h * ph
            p0 = ph - h / 2 * force(q if bug else q0, k)
            dq, dp, dk = jax.vjp(one, q0, p0, k)[1]((gq, gp))
            return q0, p0, dq, dp, gk + dk

        s = lax.fori_loop(0, n, st, (*y, *g, jnp.zeros_like(k)))
        return s[2], s[3], s[4]

    return rule(primal, bwd), (r.n(4, k=1.5), r.n(4), r.u(0.5, 3, 4)), (0, 1, 2)


@family(
    "reversible residual block (two streams), inputs rebuilt in the backward",
    own=True,
    stale="second half rebuilt with the already restored x1 in place of y1",
)
def revnet(bug):
    r = Rnd(102)

    def F(x, W):
        return jnp.tanh(x @ W)

    def primal(x1, x2, W1, W2):
        y1 = x1 + F(x2, W1)
        return y1, x2 + F(y1, W2)

    def blk(x1, x2, W1, W2):
        y1 = x1 + F(x2, W1)
        return y1, x2 + F(y1, W2)

    def fwd(x1, x2, W1, W2):
        y = primal(x1, x2, W1, W2)
        return y, (y, W1, W2, x1 if bug else None)

    def bwd(res, g):
        (y1, y2), W1, W2, x1s = res
        x2 = y2 - F(x1s if bug else y1, W2)
        x1 = y1 - F(x2, W1)
        return jax.vjp(blk, x1, x2, W1, W2)[1](g)

    f = jax.custom_vjp(primal)
    f.defvjp(fwd, bwd)
    return f, (r.n(3, 4), r.n(3, 4), r.n(4, 4, k=0.5), r.n(4, 4, k=0.5)), (0, 1, 2, 3)


@family(
    "linear interpolation on a grid, rule for query, knots and values",
    weights_swapped="cotangents of the two neighbours swapped",
    knots="knot gradient only at the left neighbour",
)
def interp_rule(bug):
    r = Rnd(103)

    def seg(x, xp):
        i = jnp.clip(jnp.searchsorted(xp, x, side="right") - 1, 0, xp.shape[0] - 2)
        return i, (x - xp[i]) / (xp[i + 1] - xp[i])

    def primal(x, xp, fp):
        i, t = seg(x, xp)
        return (1 - t) * fp[i] + t * fp[i + 1]

    def bwd(a, y, g):
        x, xp, fp = a
        i, t = seg(x, xp)
        s = g * (fp[i + 1] - fp[i]) / (xp[i + 1] - xp[i])
        z = jnp.zeros_like(xp)
        u, v = (t, 1 - t) if bug == "weights_swapped" else (1 - t, t)
        dxp = z.at[i].add(-s * (1 - t))
        if bug != "knots":
            dxp = dxp.at[i + 1].add(-s * t)
        return s, dxp, z.at[i].add(g * u).at[i + 1].add(g * v)

    return (
        rule(primal, bwd),
        (r.u(0.1, 4.9, 9), np.array([0, 0.7, 2.1, 3, 4.2, 5], np.float32), r.n(6)),
        (0, 1, 2),
    )


@family(
    "natural cubic spline, values differentiated through the second derivatives",
    moments="moments treated as constant in y (local rule)",
)
def cubic_spline(bug):
    r = Rnd(104)

    def moments(y):
        n = y.shape[0]
        A = (
            4 * jnp.eye(n - 2, dtype=y.dtype)
            + jnp.eye(n - 2, k=1, dtype=y.dtype)
            + jnp.eye(n - 2, k=-1, dtype=y.dtype)
        )
        m = jnp.linalg.solve(A, 6 * (y[2:] - 2 * y[1:-1] + y[:-2]))
        return jnp.pad(m, 1)

    def ev(x, y, m):
        i = jnp.clip(jnp.floor(x).astype(int), 0, y.shape[0] - 2)
        t = x - i
        u = 1 - t
        return u * y[i] + t * y[i + 1] + ((u**3 - u) * m[i] + (t**3 - t) * m[i + 1]) / 6

    def primal(x, y):
        return ev(x, y, moments(y))

    def bwd(a, out, g):
        x, y = a
        m, pm = jax.vjp(moments, y)
        dx, dy, dm = jax.vjp(ev, x, y, m)[1](g)
        return dx, dy if bug else dy + pm(dm)[0]

    return rule(primal, bwd), (r.u(0.1, 5.9, 7), r.n(7)), (0, 1)


@family(
    "Chebyshev series by Clenshaw with a rule",
    own=True,
    c0="coefficient 0 gets half a cotangent",
    dx_shift="derivative series lacks the factor n of its top coefficient",
)
def chebyshev(bug):
    r = Rnd(105)

    def T(x, n):
        t = [jnp.ones_like(x), x]
        for _ in range(n - 2):
            t.append(2 * x * t[-1] - t[-2])
        return jnp.stack(t)

    def primal(x, c):
        b1 = b2 = jnp.zeros_like(x)
        for k in range(c.shape[0] - 1, 0, -1):
            b1, b2 = 2 * x * b1 - b2 + c[k], b1
        return x * b1 - b2 + c[0]

    def bwd(a, y, g):
        x, c = a
        n = c.shape[0]
        dc = T(x, n) @ g
        if bug == "c0":
            dc = dc.at[0].mul(0.5)
        U = [jnp.ones_like(x), 2 * x]
        for _ in range(n - 3):
            U.append(2 * x * U[-1] - U[-2])
        k = jnp.arange(1, n, dtype=x.dtype)
        if bug == "dx_shift":
            k = k.at[-1].add(-1)
        return g * ((k * c[1:]) @ jnp.stack(U)), dc

    return rule(primal, bwd), (r.u(-1, 1, 6), r.n(7)), (0, 1)


@family(
    "Horner polynomial",
    own=True,
    off_by_one="derivative coefficient of the top power 1 % too small",
)
def horner(bug):
    r = Rnd(106)

    def primal(x, c):
        y = jnp.zeros_like(x)
        for k in range(c.shape[0]):
            y = y * x + c[k]
        return y

    def bwd(a, y, g):
        x, c = a
        n = c.shape[0]
        k = jnp.arange(n - 1, 0, -1, dtype=x.dtype)
        if bug:
            k = k.at[0].mul(0.99)
        pw = jnp.stack([x**j for j in range(n - 1, -1, -1)])
        return g * primal(x, c[:-1] * k), pw @ g

    return rule(primal, bwd), (r.n(6), r.n(5)), (0, 1)


@family(
    "trapezoidal rule on a non-uniform grid, gradient of the grid too",
    own=True,
    ends="grid gradient at the two end points dropped",
)
def trapz_grid(bug):
    r = Rnd(107)

    def primal(y, x):
        return 0.5 * jnp.sum((y[1:] + y[:-1]) * jnp.diff(x))

    def bwd(a, out, g):
        y, x = a
        d = jnp.diff(x)
        s = 0.5 * (y[1:] + y[:-1])
        dy = 0.5 * g * (jnp.pad(d, (0, 1)) + jnp.pad(d, (1, 0)))
        dx = g * (jnp.pad(s, (1, 0)) - jnp.pad(s, (0, 1)))
        if bug:
            dx = dx.at[0].set(0).at[-1].set(0)
        return dy, dx

    return rule(primal, bwd), (r.n(9), np.sort(r.u(0, 3, 9))), (0, 1)


@family(
    "deep equilibrium layer z = tanh(W z + x), implicit rule",
    jac_t="backward fixed point uses J, not J^T",
    neumann3="Neumann series of the adjoint cut after three terms",
)
def deq(bug):
    r = Rnd(108)

    def primal(W, x):
        def c(s):
            return (jnp.max(jnp.abs(s[0] - s[1])) > 1e-7) & (s[2] < 300)

        def tol_free(s):
            return (jnp.tanh(W @ s[0] + x), s[0], s[2] + 1)

        z = lax.while_loop(c, tol_free, (jnp.tanh(x), x + 9, 0))[0]
        for _ in range(60):
            z = jnp.tanh(W @ z + x)
        return z

    def bwd(a, z, g):
        W, x = a
        d = 1 - z * z
        J = d[:, None] * W
        if bug == "neumann3":
            u = g
            for _ in range(3):
                u = g + J.T @ u
        else:
            I = jnp.eye(z.shape[0], dtype=z.dtype)
            u = jnp.linalg.solve(I - (J if bug == "jac_t" else J.T), g)
        return jnp.outer(d * u, z), d * u

    W = r.n(5, 5)
    return rule(primal, bwd), (W * np.float32(0.7 / np.linalg.norm(W, 2)), r.n(5)), (0, 1)


@family(
    "vmapped Newton root of x^3 + a x = b, while_loop with per-row stops, implicit rule",
    stale="f' taken at the iterate 1e-3 away (start of the last step)",
    a_arg="a's gradient has b's formula without x",
)
def newton_root(bug):
    r = Rnd(109)

    def one(a, b):
        def body(s):
            x, _, i = s
            return x - (x**3 + a * x - b) / (3 * x * x + a), x, i + 1

        return lax.while_loop(
            lambda s: (jnp.abs(s[0] - s[1]) > 1e-6 * (1 + jnp.abs(s[0]))) & (s[2] < 60),
            body,
            (b / (1 + a), b + 10.0, 0),
        )[0]

    def bwd(args, x, g):
        a, b = args
        xx = x + 1e-3 if bug == "stale" else x
        d = 3 * xx * xx + a
        return (-g / d if bug == "a_arg" else -g * x / d), g / d

    f = rule(one, bwd)
    return jax.vmap(f), (r.u(0.2, 2, 6), r.n(6, k=3)), (0, 1)


@family(
    "bisection with the implicit rule",
    own=True,
    bracket="derivative evaluated at the starting bracket's lower end",
)
def bisect_kepler(bug):
    r = Rnd(110)

    def primal(M, e):
        def st(i, s):
            lo, hi = s
            m = 0.5 * (lo + hi)
            up = m - e * jnp.sin(m) < M
            return jnp.where(up, m, lo), jnp.where(up, hi, m)

        lo, hi = lax.fori_loop(0, 60, st, (M - 1.1, M + 1.1))
        return 0.5 * (lo + hi)

    def bwd(a, E, g):
        M, e = a
        x = M - 1.1 if bug else E
        d = 1 - e * jnp.cos(x)
        return g / d, g * jnp.sin(E) / d

    return rule(primal, bwd), (r.u(0, 6, 5), r.u(0.1, 0.7, 5)), (0, 1)


@family(
    "equality-constrained QP layer by its KKT system",
    own=True,
    dual_sign="gradient of the constraint matrix has the dual term with the wrong sign",
    b_arg="gradient of b is minus the dual adjoint's sign",
)
def qp_kkt(bug):
    r = Rnd(111)

    def kkt(Q, A):
        m = A.shape[0]
        return jnp.block([[Q, A.T], [A, jnp.zeros((m, m), Q.dtype)]])

    def sol(Q, c, A, b):
        s = jnp.linalg.solve(kkt(Q, A), jnp.concatenate([-c, b]))
        return s[: c.shape[0]], s[c.shape[0] :]

    def primal(Q, c, A, b):
        return sol(Q, c, A, b)[0]

    def bwd(a, x, g):
        Q, c, A, b = a
        n = c.shape[0]
        _, nu = sol(*a)
        d = jnp.linalg.solve(kkt(Q, A).T, jnp.concatenate([g, jnp.zeros_like(b)]))
        dx, dn = d[:n], d[n:]
        sg = 1 if bug == "dual_sign" else -1
        dA = -jnp.outer(dn, x) + sg * jnp.outer(nu, dx)
        return -jnp.outer(dx, x), -dx, dA, (-dn if bug == "b_arg" else dn)

    B = r.n(4, 4)
    return (
        rule(primal, bwd),
        (B @ B.T + np.eye(4, dtype=np.float32), r.n(4), r.n(2, 4), r.n(2)),
        (0, 1, 2, 3),
    )


@family(
    "CG solve to tolerance as a black box with the implicit rule (SPD)",
    own=True,
    loose="adjoint solve stopped after two CG steps",
)
def cg_implicit(bug):
    r = Rnd(112)

    def cg(A, b, n):
        def st(i, s):
            x, rr, p, q = s
            Ap = A @ p
            al = q / jnp.maximum(p @ Ap, 1e-300 if A.dtype == jnp.float64 else 1e-37)
            x, rr = x + al * p, rr - al * Ap
            q2 = rr @ rr
            return (
                x,
                rr,
                rr + q2 / jnp.maximum(q, 1e-300 if A.dtype == jnp.float64 else 1e-37) * p,
                q2,
            )

        return lax.fori_loop(0, n, st, (jnp.zeros_like(b), b, b, b @ b))[0]

    def bwd(a, x, g):
        A, b = a
        lam = cg(A, g, 2 if bug else 12)
        return -jnp.outer(lam, x), lam

    B = r.n(6, 6)

    def f(A, b):
        return rule(lambda A, b: cg(A, b, 12), bwd)(0.5 * (A + A.T), b)

    return f, (B @ B.T / 6 + np.eye(6, dtype=np.float32), r.n(6)), (0, 1)


@family(
    "vmapped logistic map with a data-dependent number of steps per row",
    all_rows_max="backward runs the largest step count for every row",
)
def logistic_steps(bug):
    r = Rnd(113)
    n = np.array([3, 7, 1, 0, 5], np.int32)
    M = 7

    def run(x, k, n):
        return lax.while_loop(
            lambda s: s[1] < n, lambda s: (k * s[0] * (1 - s[0]), s[1] + 1), (x, jnp.int32(0))
        )[0]

    def primal(x, k, n):
        return jax.vmap(run)(x, k, n)

    def bwd(a, y, g):
        x, k, n = a
        xs = [x]
        for i in range(M):
            xs.append(jnp.where(i < n, k * xs[-1] * (1 - xs[-1]), xs[-1]))
        dk = jnp.zeros_like(k)
        for i in range(M - 1, -1, -1):
            on = (i < n) | (bug is not None)
            x = xs[i]
            dk = dk + jnp.where(on, g * x * (1 - x), 0)
            g = jnp.where(on, g * k * (1 - 2 * x), g)
        return g, dk, None

    return rule(primal, bwd), (r.u(0.1, 0.9, 5), r.u(2, 3.2, 5), n), (0, 1)


@family(
    "unrolled inner SGD (hyper-gradient of the learning rate and the init)",
    own=True,
    truncated="backward truncated to the last three of six inner steps",
)
def unrolled_sgd(bug):
    r = Rnd(114)
    A = r.n(4, 4)
    A = A @ A.T / 4 + np.eye(4, dtype=np.float32)

    def step(w, lr):
        return w - lr * (jnp.asarray(A, w.dtype) @ w - jnp.sin(w))

    def run(w, lr, n=6):
        for _ in range(n):
            w = step(w, lr)
        return w

    def bwd(a, y, g):
        w, lr = a
        if not bug:
            return jax.vjp(run, w, lr)[1](g)
        mid = run(w, lr, 3)
        return jax.vjp(lambda w, l: run(w, l, 3), mid, lr)[1](g)

    return rule(lambda w, lr: run(w, lr), bwd), (r.n(4), np.float32(0.13)), (0, 1)


# ---------------------------------------------------------------- dynamic programming, transport
@family(
    "HMM forward log-likelihood, posterior (Baum-Welch) rule",
    first_emission="posterior of the first emission missing",
    last_transition="expected transition count of the last step missing",
)
def hmm_forward(bug):
    r = Rnd(120)
    T, S = 6, 3
    L = jax.nn.logsumexp

    def alphas(lp, lt, le):
        al = [lp + le[0]]
        for t in range(1, T):
            al.append(L(al[-1][:, None] + lt, axis=0) + le[t])
        return al

    def primal(lp, lt, le):
        return L(alphas(lp, lt, le)[-1])

    def bwd(a, y, g):
        lp, lt, le = a
        al = alphas(*a)
        be = jnp.zeros_like(lp)
        dl = jnp.zeros_like(lt)
        de = [jnp.exp(al[-1] - y)]
        for t in range(T - 1, 0, -1):
            xi = jnp.exp(al[t - 1][:, None] + lt + (le[t] + be)[None] - y)
            if not (bug == "last_transition" and t == T - 1):
                dl = dl + xi
            be = L(lt + (le[t] + be)[None], axis=1)
            de.append(jnp.exp(al[t - 1] + be - y))
        de = jnp.stack(de[::-1])
        d0 = de[0]
        if bug == "first_emission":
            de = de.at[0].set(0)
        return g * d0, g * dl, g * de

    return rule(primal, bwd), (r.n(S), r.n(S, S), r.n(T, S)), (0, 1, 2)


@family("CTC loss by the forward recursion in log space (plain AD, -inf entries kept finite)")
def ctc_forward(bug):
    r = Rnd(121)
    lab = np.array([2, 2, 1], np.int32)
    ext = np.zeros(7, np.int32)
    ext[1::2] = lab

    def f(z):
        lp = jax.nn.log_softmax(z)
        NEG = -1e5
        S = 7
        skip = np.array([s >= 2 and ext[s] != 0 and ext[s] != ext[s - 2] for s in range(S)])
        a = jnp.where(np.arange(S) < 2, lp[0, ext], NEG)
        for t in range(1, z.shape[0]):
            p1 = jnp.concatenate([jnp.full((1,), NEG, a.dtype), a[:-1]])
            p2 = jnp.where(skip, jnp.concatenate([jnp.full((2,), NEG, a.dtype), a[:-2]]), NEG)
            a = jax.nn.logsumexp(jnp.stack([a, p1, p2]), axis=0) + lp[t, ext]
        return -jnp.logaddexp(a[-1], a[-2])

    return f, (r.n(8, 4),), (0,)


@family(
    "soft-DTW with its E-matrix rule",
    own=True,
    diagonal="diagonal move left out of the backward recursion",
)
def soft_dtw(bug):
    r = Rnd(122)
    n, m, gam = 4, 5, 0.8

    def fw(D):
        R = {(-1, -1): 0.0}
        inf = 1e6
        for i in range(n):
            for j in range(m):
                p = jnp.stack(
                    [
                        jnp.asarray(R.get(k, inf), D.dtype)
                        for k in ((i - 1, j), (i, j - 1), (i - 1, j - 1))
                    ]
                )
                R[i, j] = D[i, j] - gam * jax.nn.logsumexp(-p / gam)
        return R

    def bwd(a, y, g):
        D = a[0]
        R = fw(D)
        E = {(n - 1, m - 1): g}
        for i in range(n - 1, -1, -1):
            for j in range(m - 1, -1, -1):
                if (i, j) == (n - 1, m - 1):
                    continue
                e = 0
                for k in ((i + 1, j), (i, j + 1), (i + 1, j + 1)):
                    if bug and k == (i + 1, j + 1):
                        continue
                    if k in E:
                        e = e + E[k] * jnp.exp((R[k] - D[k] - R[i, j]) / gam)
                E[i, j] = e
        return (jnp.stack([jnp.stack([E[i, j] for j in range(m)]) for i in range(n)]),)

    f = rule(lambda D: fw(D)[n - 1, m - 1], bwd)
    return jax.jit(f), (r.u(0, 2, n, m),), (0,)


@family(
    "entropic OT value with the envelope rule (potentials and plan at convergence)",
    linear_cost="value reported without the entropy, but the plan is returned as its gradient",
)
def sinkhorn_value(bug):
    r = Rnd(123)
    eps = 0.5

    def solve(C, la, lb):
        def st(i, s):
            f, g = s
            f = eps * (la - jax.nn.logsumexp((g[None] - C) / eps, axis=1))
            g = eps * (lb - jax.nn.logsumexp((f[:, None] - C) / eps, axis=0))
            return f, g

        return lax.fori_loop(0, 200, st, (jnp.zeros_like(la), jnp.zeros_like(lb)))

    def plan(C, la, lb):
        f, g = solve(C, la, lb)
        return jnp.exp((f[:, None] + g[None] - C) / eps)

    def primal(C):
        la = jnp.full((C.shape[0],), -np.log(C.shape[0]), C.dtype)
        lb = jnp.full((C.shape[1],), -np.log(C.shape[1]), C.dtype)
        P = plan(C, la, lb)
        v = jnp.sum(P * C)
        if not bug:
            v = v + eps * jnp.sum(P * (jnp.log(P) - 1))
        return v

    def bwd(a, y, g):
        C = a[0]
        la = jnp.full((C.shape[0],), -np.log(C.shape[0]), C.dtype)
        lb = jnp.full((C.shape[1],), -np.log(C.shape[1]), C.dtype)
        return (g * plan(C, la, lb),)

    return rule(primal, bwd), (r.u(0, 2, 4, 5),), (0,)


@family("sparsemax projection", own=True, support="mean over all entries, not over the support")
def sparsemax(bug):
    r = Rnd(124)

    def primal(z):
        s = jnp.sort(z, -1)[:, ::-1]
        k = jnp.arange(1, z.shape[1] + 1)
        c = jnp.cumsum(s, -1)
        K = jnp.sum(1 + k * s > c, -1, keepdims=True)
        tau = (jnp.take_along_axis(c, K - 1, 1) - 1) / K
        return jnp.maximum(z - tau, 0)

    def bwd(a, p, g):
        on = p > 0
        n = p.shape[1] if bug else on.sum(-1, keepdims=True)
        v = jnp.sum(jnp.where(on, g, 0), -1, keepdims=True) / n
        return (jnp.where(on, g - v, 0),)

    return rule(primal, bwd), (r.n(5, 6),), (0,)


@family(
    "isotonic regression (pool adjacent violators) with its block-averaging rule",
    own=True,
    block_sum="block cotangents summed, not averaged",
)
def isotonic(bug):
    r = Rnd(125)

    def primal(y):
        n = y.shape[0]
        c = jnp.concatenate([jnp.zeros(1, y.dtype), jnp.cumsum(y)])
        i = jnp.arange(n)
        lo, hi = i[:, None], i[None]
        avg = (c[hi + 1] - c[lo]) / jnp.maximum(hi - lo + 1, 1)
        avg = jnp.where(hi >= lo, avg, jnp.inf)
        inner = lax.cummin(avg, axis=1, reverse=True)
        inner = jnp.where(hi >= lo, inner, -jnp.inf)
        return jnp.max(jnp.where(lo <= hi, inner, -jnp.inf), axis=0)

    def bwd(a, x, g):
        same = jnp.abs(x[:, None] - x[None]) < 1e-5 * (1 + jnp.abs(x[:, None]))
        same = same.astype(g.dtype)
        return ((same @ g) / (1 if bug else same.sum(1)),)

    return rule(primal, bwd), (r.n(9) + np.linspace(0, 2, 9, dtype=np.float32),), (0,)


# ---------------------------------------------------------------- physics, geometry, rendering
@family(
    "Lennard-Jones energy with minimum image and shifted cutoff",
    double_count="pair force halved twice",
    thirteen="repulsive force coefficient 11.9 in place of 12",
)
def lennard_jones(bug):
    r = Rnd(130)
    L, rc = 5.0, 2.4
    base = np.stack(np.meshgrid(*[np.arange(2)] * 3), -1).reshape(-1, 3)[:7] * 1.4
    x = np.asarray(base + r.n(7, 3, k=0.08), np.float32)

    def pairs(x):
        d = x[:, None] - x[None]
        d = d - L * jnp.round(d / L)
        r2 = jnp.sum(d * d, -1) + jnp.eye(x.shape[0], dtype=x.dtype) * 100
        return d, r2, r2 < rc * rc

    def primal(x):
        _, r2, on = pairs(x)
        s = 1 / r2**3
        sc = 1 / rc**6
        return 0.5 * jnp.sum(jnp.where(on, 4 * (s * s - s) - 4 * (sc * sc - sc), 0))

    def bwd(a, y, g):
        d, r2, on = pairs(a[0])
        s = 1 / r2**3
        co = 11.9 if bug == "thirteen" else 12
        f = jnp.where(on, -4 * (co * s * s - 6 * s) / r2, 0)
        return (g * (0.5 if bug == "double_count" else 1) * jnp.sum(f[..., None] * d, 1),)

    return rule(primal, bwd), (x,), (0,)


@family(
    "reciprocal-space Ewald energy, rule for positions and charges",
    charges="charge gradient lacks the factor two",
    imag="position gradient lacks the sine sum",
)
def ewald_recip(bug):
    r = Rnd(131)
    kv = np.array(
        [
            (i, j, k)
            for i in range(-2, 3)
            for j in range(-2, 3)
            for k in range(-2, 3)
            if (i, j, k) != (0, 0, 0)
        ],
        np.float64,
    )

    def parts(x, q):
        k = jnp.asarray(kv, x.dtype)
        w = jnp.exp(-jnp.sum(k * k, 1) / 4) / jnp.sum(k * k, 1)
        ph = x @ k.T
        return k, w, jnp.cos(ph), jnp.sin(ph), q @ jnp.cos(ph), q @ jnp.sin(ph)

    def primal(x, q):
        _, w, _, _, C, S = parts(x, q)
        return 0.5 * jnp.sum(w * (C * C + S * S))

    def bwd(a, y, g):
        x, q = a
        k, w, c, s, C, S = parts(x, q)
        dq = (c * C + s * S) @ w * (0.5 if bug == "charges" else 1)
        m = -s * C + (0 if bug == "imag" else c * S)
        return g * q[:, None] * ((m * w) @ k), g * dq

    return rule(primal, bwd), (r.u(0, 6, 5, 3), r.n(5)), (0, 1)


@family(
    "front-to-back alpha compositing with a background",
    inclusive="suffix sum includes the sample itself",
    background="background transmittance left out of the alpha gradient",
)
def alpha_blend(bug):
    r = Rnd(132)

    def trans(al):
        return jnp.concatenate([jnp.ones_like(al[:, :1]), jnp.cumprod(1 - al, 1)], 1)

    def primal(al, col, bg):
        T = trans(al)
        return jnp.einsum("rs,rsc->rc", T[:, :-1] * al, col) + T[:, -1:] * bg

    def bwd(a, y, g):
        al, col, bg = a
        T = trans(al)
        w = T[:, :-1] * al
        gc = jnp.einsum("rc,rsc->rs", g, col)
        wg = w * gc
        suf = jnp.cumsum(wg[:, ::-1], 1)[:, ::-1]
        if bug != "inclusive":
            suf = suf - wg
        if bug != "background":
            suf = suf + T[:, -1:] * (g @ bg)[:, None]
        return T[:, :-1] * gc - suf / (1 - al), w[..., None] * g[:, None], (T[:, -1:] * g).sum(0)

    return rule(primal, bwd), (r.u(0.05, 0.9, 3, 6), r.u(0, 1, 3, 6, 3), r.u(0, 1, 3)), (0, 1, 2)


@family(
    "ray-sphere hit depth", own=True, discriminant="direction gradient ignores the discriminant"
)
def ray_sphere(bug):
    r = Rnd(133)

    def primal(o, d, R):
        b = jnp.sum(o * d, -1)
        c = jnp.sum(o * o, -1) - R * R
        D = b * b - c
        hit = D > 0
        return jnp.where(hit, -b - jnp.sqrt(jnp.where(hit, D, 1)), 0)

    def bwd(a, t, g):
        o, d, R = a
        b = jnp.sum(o * d, -1)
        D = b * b - jnp.sum(o * o, -1) + R * R
        hit = D > 0
        q = jnp.sqrt(jnp.where(hit, D, 1))
        g = jnp.where(hit, g, 0)
        db = g * (-1 - (0 if bug else b / q))
        do = g * (-1 - b / q)
        return (do[:, None] * d + (g / q)[:, None] * o, db[:, None] * o, jnp.sum(-g * R / q))

    o = r.n(6, 3, k=0.3)
    o[:, 2] -= 3
    d = r.n(6, 3, k=0.12)
    d[:, 2] = 1
    d[5] = [1, 0, 0]
    d = d / np.linalg.norm(d, axis=1, keepdims=True)
    return rule(primal, bwd), (o, d, np.float32(1.1)), (0, 1, 2)


@family(
    "triangle mesh area; vertices shared by triangles",
    own=True,
    overwrite="vertex gradient written, not accumulated, for the third corner",
)
def mesh_area(bug):
    r = Rnd(134)
    F = np.array([[0, 1, 2], [0, 2, 3], [3, 4, 2], [1, 4, 2]], np.int32)

    def primal(V, F):
        a, b, c = V[F[:, 0]], V[F[:, 1]], V[F[:, 2]]
        return 0.5 * jnp.linalg.norm(jnp.cross(b - a, c - a), axis=-1)

    def bwd(args, y, g):
        V, F = args
        a, b, c = V[F[:, 0]], V[F[:, 1]], V[F[:, 2]]
        n = jnp.cross(b - a, c - a)
        n = 0.5 * g[:, None] * n / jnp.linalg.norm(n, axis=-1, keepdims=True)
        d = jnp.zeros_like(V).at[F[:, 0]].add(jnp.cross(b - c, n))
        d = d.at[F[:, 1]].add(jnp.cross(c - a, n))
        t = jnp.cross(a - b, n)
        return (d.at[F[:, 2]].set(t) if bug else d.at[F[:, 2]].add(t)), None

    return rule(primal, bwd), (r.n(5, 3), F), (0,)


@family(
    "Chamfer distance of two point sets",
    own=True,
    one_side="gradient to y only from the y->x direction",
)
def chamfer(bug):
    r = Rnd(135)

    def primal(x, y):
        d = jnp.sum((x[:, None] - y[None]) ** 2, -1)
        return d.min(1).mean() + d.min(0).mean()

    def bwd(a, out, g):
        x, y = a
        d = jnp.sum((x[:, None] - y[None]) ** 2, -1)
        i, j = d.argmin(1), d.argmin(0)
        ex = 2 * g * (x - y[i]) / x.shape[0]
        ey = 2 * g * (y - x[j]) / y.shape[0]
        dx = ex + jnp.zeros_like(x).at[j].add(-ey)
        dy = ey if bug else ey + jnp.zeros_like(y).at[i].add(-ex)
        return dx, dy

    return rule(primal, bwd), (r.n(6, 2), r.n(5, 2)), (0, 1)


@family(
    "spherical to Cartesian and back through atan2",
    own=True,
    atan2_sign="atan2 x-cotangent has the wrong sign",
)
def polar_angle(bug):
    r = Rnd(136)

    def bwd(a, t, g):
        y, x = a
        n = x * x + y * y
        return g * x / n, (g if bug else -g) * y / n

    at = rule(lambda y, x: jnp.arctan2(y, x), bwd)

    def f(p):
        return jnp.hypot(p[:, 0], p[:, 1]) * at(p[:, 1], p[:, 0]) ** 2

    return f, (r.n(6, 2),), (0,)


# ---------------------------------------------------------------- indexing, reductions, scans
@family(
    "segment mean with an empty segment",
    count="cotangent not divided by the segment count",
    empty="last segment's rows get the gradient of segment 0 (clipped id off by one at the end)",
)
def segment_mean(bug):
    r = Rnd(140)
    seg = np.array([0, 0, 1, 3, 3, 3, 4, 4], np.int32)

    def cnt(s, dt):
        return jnp.maximum(jax.ops.segment_sum(jnp.ones(s.shape, dt), s, 5), 1)

    def primal(x, s):
        return jax.ops.segment_sum(x, s, 5) / cnt(s, x.dtype)[:, None]

    def bwd(a, y, g):
        s = a[1]
        if bug != "count":
            g = g / cnt(s, g.dtype)[:, None]
        return g[s % 4 if bug == "empty" else s], None

    return rule(primal, bwd), (r.n(8, 3), seg), (0,)


@family("segment max by scatter (plain AD)")
def segment_max(bug):
    r = Rnd(141)
    return (lambda x, s: jax.ops.segment_max(x, s, 4)), (r.n(11, 2), np.sort(r.i(0, 4, 11))), (0,)


@family(
    "sort with an explicit permutation",
    perm="cotangent gathered with the forward order instead of its inverse",
)
def sort_rule(bug):
    r = Rnd(142)

    def bwd(a, y, g):
        o = jnp.argsort(a[0], -1)
        if not bug:
            o = jnp.argsort(o, -1)
        return (jnp.take_along_axis(g, o, -1),)

    return rule(lambda x: jnp.sort(x, -1), bwd), (r.n(3, 7),), (0,)


@family(
    "compare-exchange (min, max) at exact ties; the later use a+b, a*b is smooth there",
    own=True,
    tie_twice="both outputs send the full cotangent to both inputs at ties (>= and <=)",
)
def compare_exchange_tie(bug):
    r = Rnd(143)
    a = r.n(6)
    b = r.n(6)
    b[[1, 4]] = a[[1, 4]]

    def bwd(args, y, g):
        a, b = args
        gl, gh = g
        if bug:
            return gl * (a <= b) + gh * (a >= b), gl * (b <= a) + gh * (b >= a)
        w = jnp.where(a == b, 0.5, (a < b).astype(a.dtype))
        return gl * w + gh * (1 - w), gl * (1 - w) + gh * w

    cx = rule(lambda a, b: (jnp.minimum(a, b), jnp.maximum(a, b)), bwd)

    def f(a, b):
        lo, hi = cx(a, b)
        return lo * hi, lo + hi

    return f, (a, b), (0, 1)


@family(
    "cumulative product with zeros inside", own=True, divide="rule divides by x: NaN at the zeros"
)
def cumprod_zero(bug):
    r = Rnd(144)
    x = r.n(8)
    x[3] = 0

    def bwd(a, y, g):
        x = a[0]
        if bug:
            return (jnp.cumsum((g * y)[::-1])[::-1] / x,)
        n = x.shape[0]
        M = jnp.where(jnp.eye(n, dtype=bool), 1, x[None])
        P = jnp.cumprod(M, 1)
        return (jnp.where(jnp.arange(n)[None] >= jnp.arange(n)[:, None], P, 0) @ g,)

    return rule(lambda x: jnp.cumprod(x), bwd), (x,), (0,)


@family(
    "log-cumsum-exp", own=True, direction="cotangent accumulated from the left (prefix, not suffix)"
)
def logcumsumexp(bug):
    r = Rnd(145)

    def bwd(a, y, g):
        x = a[0]
        w = jnp.exp(x[:, None] - y[None])
        n = x.shape[0]
        keep = (
            jnp.arange(n)[:, None] >= jnp.arange(n)[None]
            if bug
            else jnp.arange(n)[:, None] <= jnp.arange(n)[None]
        )
        return (jnp.where(keep, w, 0) @ g,)

    return rule(lambda x: lax.cumlogsumexp(x), bwd), (r.n(8),), (0,)


@family(
    "exclusive prefix sum in Pallas (interpret)",
    own=True,
    inclusive="backward is the inclusive suffix sum",
)
def exclusive_cumsum_pallas(bug):
    r = Rnd(146)

    def k(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jnp.cumsum(x, 1) - x

    def kb(g_ref, o_ref):
        g = g_ref[...]
        s = jnp.flip(jnp.cumsum(jnp.flip(g, 1), 1), 1)
        o_ref[...] = s if bug else s - g

    def call(k, x):
        return pl.pallas_call(k, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
            x
        )

    return rule(lambda x: call(k, x), lambda a, y, g: (call(kb, g),)), (r.n(3, 9),), (0,)


@family(
    "Pallas swish on 5000 elements, blocks of 512",
    tail="the last partial block uses the derivative without the x*s*(1-s) term",
)
def swish_pallas_5000(bug):
    r = Rnd(147)
    N, B = 5000, 512
    nb = -(-N // B)
    P = nb * B

    def fk(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x / (1 + jnp.exp(-x))

    def bk(x_ref, g_ref, o_ref):
        x = x_ref[...]
        s = 1 / (1 + jnp.exp(-x))
        d = s + x * s * (1 - s)
        if bug:
            d = jnp.where(pl.program_id(0) == nb - 1, s, d)
        o_ref[...] = g_ref[...] * d

    def call(k, *xs):
        sp = pl.BlockSpec((B,), lambda i: (i,))
        xs = [jnp.pad(x, (0, P - N)) for x in xs]
        return pl.pallas_call(
            k,
            grid=(nb,),
            in_specs=[sp] * len(xs),
            out_specs=sp,
            out_shape=jax.ShapeDtypeStruct((P,), xs[0].dtype),
            interpret=True,
        )(*xs)[:N]

    return rule(lambda x: call(fk, x), lambda a, y, g: (call(bk, a[0], g),)), (r.n(N, k=2),), (0,)


@family(
    "tiled Pallas matmul, K accumulated over the grid",
    k_block="dA misses the last N tile",
    one_row="row 0 of dB is scaled by 1.01",
)
def matmul_pallas(bug):
    r = Rnd(148)
    t = 4

    def mm(a, b):
        M, K = a.shape
        N = b.shape[1]

        def k(a_ref, b_ref, o_ref):
            @pl.when(pl.program_id(2) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

            o_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=o_ref.dtype)

        return pl.pallas_call(
            k,
            grid=(M // t, N // t, K // t),
            in_specs=[
                pl.BlockSpec((t, t), lambda i, j, k: (i, k)),
                pl.BlockSpec((t, t), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((t, t), lambda i, j, k: (i, j)),
            out_shape=jax.ShapeDtypeStruct((M, N), a.dtype),
            interpret=True,
        )(a, b)

    def bwd(args, y, g):
        a, b = args
        da = mm(g[:, :-t], b[:, :-t].T) if bug == "k_block" else mm(g, b.T)
        db = mm(a.T, g)
        return da, db.at[0].mul(1.01) if bug == "one_row" else db

    return rule(mm, bwd), (r.n(8, 12), r.n(12, 8)), (0, 1)


@family(
    "masked mean over valid tokens",
    total="backward divides by the padded length",
    pad_leak="padding positions receive gradient",
)
def masked_mean(bug):
    r = Rnd(149)
    ln = np.array([4, 1, 6], np.int32)

    def m(x, ln):
        return (jnp.arange(x.shape[1])[None] < ln[:, None]).astype(x.dtype)[..., None]

    def primal(x, ln):
        k = m(x, ln)
        return (x * k).sum(1) / k.sum(1)

    def bwd(a, y, g):
        x, ln = a
        k = m(x, ln)
        d = g[:, None] / (x.shape[1] if bug == "total" else k.sum(1)[:, None])
        return jnp.broadcast_to(d, x.shape) * (1 if bug == "pad_leak" else k), None

    return rule(primal, bwd), (r.n(3, 6, 2), ln), (0,)


@family(
    "masked softmax with one fully masked row set to zero, made safe",
    nan="fully masked row: NaN gradient though the output is constant zero",
)
def masked_softmax(bug):
    r = Rnd(150)
    mask = r.r.random((4, 6)) < 0.6
    mask[2] = False

    def f(x, mask):
        if bug:
            p = jax.nn.softmax(x + jnp.where(mask, 0, -jnp.inf).astype(x.dtype), -1)
            return jnp.where(mask.any(-1, keepdims=True), p, 0)
        any_ = mask.any(-1, keepdims=True)
        m = mask | ~any_
        return jnp.where(any_, jax.nn.softmax(jnp.where(m, x, -jnp.inf), -1), 0)

    return f, (r.n(4, 6), mask), (0,)


@family(
    "sqrt ramp: where(x>0, sqrt(x), 0) with a double where",
    nan="single where: NaN for the negative inputs",
)
def sqrt_where(bug):
    r = Rnd(151)

    def f(x):
        if bug:
            return jnp.where(x > 0, jnp.sqrt(x), 0)
        p = x > 0
        return jnp.where(p, jnp.sqrt(jnp.where(p, x, 1)), 0)

    return f, (r.n(8),), (0,)


@family(
    "squared norm through hypot-like safe sqrt at a zero row",
    own=True,
    nan="norm(x)**2 at a zero row: the derivative is 0, AD gives NaN",
)
def norm_squared_zero(bug):
    r = Rnd(152)
    x = r.n(4, 3)
    x[2] = 0

    def f(x):
        if bug:
            return jnp.linalg.norm(x, axis=-1) ** 2
        s = jnp.sum(x * x, -1)
        z = s == 0
        return jnp.where(z, s, jnp.sqrt(jnp.where(z, 1, s)) ** 2)

    return f, (x,), (0,)


@family(
    "dense layer with a (1,n) bias",
    broadcast_mean="bias gradient averaged over the batch",
    axis0="scalar gain's gradient summed over the features of row 0 only",
)
def dense_bias(bug):
    r = Rnd(153)

    def primal(x, w, b, s):
        return s * (x @ w) + b

    def bwd(a, y, g):
        x, w, b, s = a
        xw = x @ w
        db = g.mean(0, keepdims=True) if bug == "broadcast_mean" else g.sum(0, keepdims=True)
        ds = jnp.sum((g * xw)[0]) if bug == "axis0" else jnp.sum(g * xw)
        return s * g @ w.T, s * x.T @ g, db, ds

    return rule(primal, bwd), (r.n(6, 3), r.n(3, 4), r.n(1, 4), np.float32(0.8)), (0, 1, 2, 3)


@family(
    "two-layer net with a parameter dict (same-shaped leaves)",
    own=True,
    leaf_swap="gradients of params['key'] and params['query'] exchanged",
)
def dict_params(bug):
    r = Rnd(154)

    def primal(P, x):
        return jnp.tanh(x @ P["query"]) * (x @ P["key"]) + P["bias"]["b"], None

    def bwd(a, y, g):
        P, x = a
        g = g[0]
        t = jnp.tanh(x @ P["query"])
        k = x @ P["key"]
        gq, gk = g * k * (1 - t * t), g * t
        d = {"query": x.T @ gq, "key": x.T @ gk, "bias": {"b": g.sum(0), "unused": None}}
        if bug:
            d["query"], d["key"] = d["key"], d["query"]
        return d, gq @ P["query"].T + gk @ P["key"].T

    P = {"query": r.n(4, 3), "key": r.n(4, 3), "bias": {"b": r.n(3), "unused": None}}
    return rule(primal, bwd), (P, r.n(5, 4)), (0, 1)


@family(
    "Gram-matrix style loss",
    own=True,
    half="symmetric product: only one of the two uses of F differentiated",
)
def gram_loss(bug):
    r = Rnd(155)

    def primal(F, G):
        return jnp.mean((F @ F.T - G) ** 2)

    def bwd(a, y, g):
        F, G = a
        E = 2 * (F @ F.T - G) / G.size * g
        return (E @ F if bug else (E + E.T) @ F), -E

    return rule(primal, bwd), (r.n(4, 6), r.n(4, 4)), (0, 1)


@family(
    "streaming unbiased variance (Welford)",
    own=True,
    ddof="backward divides by n, forward by n-1 (3 % error)",
)
def welford(bug):
    r = Rnd(156)

    def primal(x):
        def st(c, v):
            n, m, s = c
            d = v - m
            m = m + d / (n + 1)
            return (n + 1, m, s + d * (v - m)), None

        z = jnp.zeros(x.shape[1:], x.dtype)
        return lax.scan(st, (jnp.zeros((), x.dtype), z, z), x)[0][2] / (x.shape[0] - 1)

    def bwd(a, y, g):
        x = a[0]
        n = x.shape[0]
        return (2 * g * (x - x.mean(0)) / (n if bug else n - 1),)

    return rule(primal, bwd), (r.n(33, 3, m=5),), (0,)


@family(
    "generalized advantage estimation scan with done flags",
    own=True,
    done="done mask forgotten in the backward accumulation",
)
def gae(bug):
    r = Rnd(157)
    ga, la = 0.97, 0.9
    done = np.array([0, 0, 1, 0, 0, 0, 1, 0], bool)

    def deltas(rw, v, nd):
        return rw + ga * v[1:] * nd - v[:-1]

    def primal(rw, v, done):
        nd = 1 - done.astype(rw.dtype)

        def st(A, t):
            A = t[0] + ga * la * t[1] * A
            return A, A

        return lax.scan(st, jnp.zeros((), rw.dtype), (deltas(rw, v, nd), nd), reverse=True)[1]

    def bwd(a, y, g):
        rw, v, done = a
        nd = 1 - done.astype(rw.dtype)

        def st(c, t):
            c = t[0] + c
            return ga * la * (1 if bug else t[1]) * c, c

        dd = lax.scan(st, jnp.zeros((), g.dtype), (g, nd))[1]
        return dd, jnp.pad(ga * nd * dd, (1, 0)) - jnp.pad(dd, (0, 1)), None

    return rule(primal, bwd), (r.n(8), r.n(9), done), (0, 1)


@family(
    "affine coupling flow with log-determinant",
    own=True,
    logdet="log-determinant's cotangent reaches x1 but not the scale network's output bias",
)
def coupling_flow(bug):
    r = Rnd(158)

    def primal(x, W, b):
        x1, x2 = jnp.split(x, 2, -1)
        s = jnp.tanh(x1 @ W + b)
        return jnp.concatenate([x1, x2 * jnp.exp(s)], -1), s.sum(-1)

    def bwd(a, y, g):
        x, W, b = a
        gy, gl = g
        x1, x2 = jnp.split(x, 2, -1)
        s = jnp.tanh(x1 @ W + b)
        g1, g2 = jnp.split(gy, 2, -1)
        e = jnp.exp(s)
        pd = g2 * x2 * e * (1 - s * s)
        full = pd + gl[:, None] * (1 - s * s)
        return (
            jnp.concatenate([g1 + full @ W.T, g2 * e], -1),
            x1.T @ full,
            (pd if bug else full).sum(0),
        )

    return rule(primal, bwd), (r.n(5, 6), r.n(3, 3), r.n(3)), (0, 1, 2)


@family(
    "spectral normalization W/sigma by converged power iteration",
    own=True,
    sigma_const="sigma treated as constant",
    unconverged="u v^T from two power steps used as dsigma",
)
def spectral_norm(bug):
    r = Rnd(159)
    W = r.n(5, 4)

    def pw(W, n):
        v = jnp.ones(W.shape[1], W.dtype) / 2

        def st(i, v):
            u = W @ v
            v = W.T @ (u / jnp.linalg.norm(u))
            return v / jnp.linalg.norm(v)

        v = lax.fori_loop(0, n, st, v)
        u = W @ v
        return u / jnp.linalg.norm(u), v

    def primal(W):
        u, v = pw(W, 300)
        return W / (u @ W @ v)

    def bwd(a, Y, g):
        W = a[0]
        u, v = pw(W, 300)
        s = u @ W @ v
        if bug == "unconverged":
            u, v = pw(W, 2)
        d = 0 if bug == "sigma_const" else jnp.sum(g * Y) / s * jnp.outer(u, v)
        return (g / s - d,)

    return rule(primal, bwd), (W,), (0,)


# ---------------------------------------------------------------- scalar / special functions
@family(
    "exponentially scaled Bessel I0 via custom_jvp", scaled="derivative i1e without -i0e*sign(x)"
)
def i0e_rule(bug):
    r = Rnd(170)
    f = jax.custom_jvp(lambda x: jax.scipy.special.i0e(x))

    @f.defjvp
    def _(p, t):
        (x,), (dx,) = p, t
        y = f(x)
        d = jax.scipy.special.i1e(x) - (0 if bug else jnp.sign(x) * y)
        return y, d * dx

    return f, (r.n(7, k=2),), (0,)


@family(
    "Lambert W by Halley in a while_loop, derivative exp(-W)/(1+W)",
    zero_nan="W/(x(1+W)): NaN at x=0 where the derivative is 1",
)
def lambertw(bug):
    x = np.array([0, 0.1, 1, 7, -0.2, 30], np.float32)

    def solve(x):
        def body(s):
            w, _, i = s
            e = jnp.exp(w)
            q = w * e - x
            return w - q / (e * (w + 1) - (w + 2) * q / (2 * w + 2)), w, i + 1

        return lax.while_loop(
            lambda s: jnp.any(jnp.abs(s[0] - s[1]) > 1e-6) & (s[2] < 50),
            body,
            (jnp.log1p(x), x + 9, 0),
        )[0]

    f = jax.custom_jvp(lambda x: solve(x))

    @f.defjvp
    def _(p, t):
        (x,), (dx,) = p, t
        w = f(x)
        return w, dx * (w / (x * (1 + w)) if bug else jnp.exp(-w) / (1 + w))

    return f, (x,), (0,)


@family(
    "log(1-exp(-x)) with two branches",
    own=True,
    branch="derivative formula of the wrong branch sign for x < log 2",
)
def log1mexp(bug):
    r = Rnd(172)
    f = jax.custom_jvp(
        lambda x: jnp.where(
            x < 0.6931472, jnp.log(-jnp.expm1(-x)), jnp.log1p(-jnp.exp(-jnp.maximum(x, 0.1)))
        )
    )

    @f.defjvp
    def _(p, t):
        (x,), (dx,) = p, t
        d = 1 / jnp.expm1(x)
        if bug:
            d = jnp.where(x < 0.6931472, -1 / jnp.expm1(-x), d)
        return f(x), d * dx

    return f, (np.concatenate([r.u(0.01, 0.6, 4), r.u(0.8, 5, 4)]),), (0,)


@family(
    "phi1(x) = expm1(x)/x with a Taylor branch near 0",
    own=True,
    taylor="Taylor branch of the derivative: x/6 in place of x/3 (small inputs only)",
)
def phi1(bug):
    x = np.array([-2, 0.7, 3, 0.02, -0.015, 0.009, -1e-3, 1.2], np.float32)

    def prim(x):
        s = jnp.abs(x) < 0.05
        z = jnp.where(s, 1, x)
        return jnp.where(
            s, 1 + x / 2 + x * x / 6 + x**3 / 24 + x**4 / 120 + x**5 / 720, jnp.expm1(z) / z
        )

    f = jax.custom_jvp(prim)

    @f.defjvp
    def _(p, t):
        (x,), (dx,) = p, t
        s = jnp.abs(x) < 0.05
        z = jnp.where(s, 1, x)
        ser = 0.5 + x / (6 if bug else 3) + x * x / 8 + x**3 / 30 + x**4 / 144
        return f(x), dx * jnp.where(s, ser, (z * jnp.exp(z) - jnp.expm1(z)) / z**2)

    return f, (x,), (0,)


@family("x mod y with both gradients", own=True, second="gradient of the divisor returned as zero")
def mod_rule(bug):
    r = Rnd(174)

    def bwd(a, out, g):
        x, y = a
        return g, (jnp.zeros_like(y) if bug else -g * jnp.floor(x / y))

    return rule(lambda x, y: jnp.mod(x, y), bwd), (r.u(-6, 6, 8), r.u(0.7, 2, 8)), (0, 1)


@family("p-norm with gradient of p", own=True, p_grad="dp lacks the -log(norm)/p term")
def pnorm(bug):
    r = Rnd(175)

    def primal(x, p):
        return jnp.sum(jnp.abs(x) ** p) ** (1 / p)

    def bwd(a, y, g):
        x, p = a
        s = jnp.abs(x)
        S = jnp.sum(s**p)
        dx = g * jnp.sign(x) * s ** (p - 1) * y ** (1 - p)
        dp = y * jnp.sum(s**p * jnp.log(s)) / (p * S)
        if not bug:
            dp = dp - y * jnp.log(S) / p**2
        return dx, g * dp

    return rule(primal, bwd), (r.n(6), np.float32(2.6)), (0, 1)


@family(
    "signed power sign(x)|x|^1.5", negative="sign applied twice: wrong sign for negative inputs"
)
def signed_power(bug):
    r = Rnd(176)

    def bwd(a, y, g):
        x = a[0]
        d = 1.5 * jnp.sqrt(jnp.abs(x))
        return (g * (d * jnp.sign(x) if bug else d),)

    return rule(lambda x: jnp.sign(x) * jnp.abs(x) ** 1.5, bwd), (r.n(8),), (0,)


@family(
    "PReLU with a per-channel slope", negative_slope="slope gradient counts the positive inputs too"
)
def prelu(bug):
    r = Rnd(177)

    def bwd(a, y, g):
        x, s = a
        ds = g * (x if bug else jnp.where(x < 0, x, 0))
        return g * jnp.where(x < 0, s, 1), ds.sum(0)

    return rule(lambda x, s: jnp.where(x < 0, s * x, x), bwd), (r.n(7, 3), r.u(0.1, 0.4, 3)), (0, 1)


@family(
    "softplus with beta and linear threshold",
    own=True,
    beta="gradient lacks beta inside the sigmoid",
)
def softplus_beta(bug):
    r = Rnd(178)
    be = 1.3

    def bwd(a, y, g):
        x = a[0]
        return (g * jax.nn.sigmoid(x if bug else be * x),)

    return (
        rule(
            lambda x: jnp.where(be * x > 20, x, jnp.log1p(jnp.exp(jnp.minimum(be * x, 20))) / be),
            bwd,
        ),
        (r.n(8, k=2),),
        (0,),
    )


@family(
    "SiLU, exact rule",
    own=True,
    per_mille="backward with a fitted sigmoid, about 0.1 % off everywhere",
    one_element="element of largest input gets 1.02 times its gradient",
)
def silu_precise(bug):
    r = Rnd(179)

    def bwd(a, y, g):
        x = a[0]
        s = jax.nn.sigmoid(x)
        d = s + x * s * (1 - s)
        if bug == "per_mille":
            d = d * 1.0012
        if bug == "one_element":
            d = jnp.where(jnp.arange(x.size).reshape(x.shape) == jnp.argmax(x), 1.02 * d, d)
        return (g * d,)

    return rule(lambda x: jax.nn.silu(x), bwd), (r.n(10, 12),), (0,)


@family(
    "Schraudolph-like exp by a cubic for 2^frac, exact backward of the cubic (tiny jumps at integer log2)",
    own=True,
    as_exp="backward assumes the exact exponential (p itself) for a 3rd-order polynomial exp2",
)
def poly_exp(bug):
    r = Rnd(180)
    c = np.array([1, 0.6951, 0.2276, 0.0780])

    def prim(x):
        t = x * 1.4426950408889634
        i = jnp.floor(t)
        f = t - i
        return (c[0] + f * (c[1] + f * (c[2] + f * c[3]))).astype(x.dtype) * 2.0**i

    def bwd(a, y, g):
        x = a[0]
        if bug:
            return (g * y,)
        t = x * 1.4426950408889634
        i = jnp.floor(t)
        f = t - i
        return (
            (g * 1.4426950408889634 * (c[1] + f * (2 * c[2] + f * 3 * c[3])) * 2.0**i).astype(
                x.dtype
            ),
        )

    return rule(prim, bwd), (r.n(9),), (0,)


@family(
    "clip by global norm over a dict, active",
    norm_const="norm treated as constant while clipping is active",
)
def clip_global_norm(bug):
    r = Rnd(181)
    c = 1.5

    def nrm(t):
        return jnp.sqrt(sum(jnp.sum(l * l) for l in jax.tree.leaves(t)))

    def primal(t):
        s = jnp.minimum(1, c / nrm(t))
        return jax.tree.map(lambda l: l * s, t)

    def bwd(a, y, g):
        t = a[0]
        n = nrm(t)
        s = jnp.minimum(1, c / n)
        d = sum(
            jnp.sum(u * v) for u, v in zip(jax.tree.leaves(t), jax.tree.leaves(g), strict=False)
        )
        k = jnp.where((n > c) & (bug is None), c * d / n**3, 0)
        return (jax.tree.map(lambda l, q: q * s - k * l, t, g),)

    return rule(primal, bwd), ({"w": r.n(3, 2), "b": r.n(4)},), (0,)


@family(
    "MLP block, backward in the working precision",
    bf16_grad="cotangent matmuls done in bfloat16 (0.4 % error)",
    bf16_residual="activation saved as bfloat16 for dW",
)
def mlp_precision(bug):
    r = Rnd(182)

    def primal(x, W):
        return jnp.tanh(x @ W)

    def bwd(a, y, g):
        x, W = a
        d = g * (1 - y * y)

        def lo(z):
            return z.astype(jnp.bfloat16)

        if bug == "bf16_grad":
            return (lo(d) @ lo(W).T).astype(x.dtype), (lo(x).T @ lo(d)).astype(x.dtype)
        xs = lo(x).astype(x.dtype) if bug else x
        return d @ W.T, xs.T @ d

    return rule(primal, bwd), (r.n(5, 6), r.n(6, 4)), (0, 1)


@family("logit temperature 1/T", own=True, temp_sign="temperature gradient not divided by T twice")
def temperature(bug):
    r = Rnd(183)

    def bwd(a, y, g):
        z, T = a
        d = g - jnp.exp(y) * g.sum(-1, keepdims=True)
        return d / T, -jnp.sum(d * z) / (T if bug else T * T)

    return rule(lambda z, T: jax.nn.log_softmax(z / T), bwd), (r.n(4, 5), np.float32(1.7)), (0, 1)


@family(
    "truncated normal by inverse CDF, reparametrized in mu, sigma and the bounds",
    bounds="bounds get no gradient",
)
def truncnorm_sampler(bug):
    r = Rnd(184)
    ndtr, ndtri = jax.scipy.special.ndtr, jax.scipy.special.ndtri

    def samp(mu, sg, lo, hi, u):
        A, B = ndtr((lo - mu) / sg), ndtr((hi - mu) / sg)
        return mu + sg * ndtri(A + u * (B - A))

    def bwd(a, y, g):
        mu, sg, lo, hi, u = a
        x = (y - mu) / sg

        def ph(z):
            return jnp.exp(-0.5 * z * z)

        al, be = (lo - mu) / sg, (hi - mu) / sg
        wl, wh = (1 - u) * ph(al) / ph(x), u * ph(be) / ph(x)
        dlo, dhi = (g * wl).sum(), (g * wh).sum()
        dmu = (g * (1 - wl - wh)).sum()
        dsg = (g * (x - wl * al - wh * be)).sum()
        z = jnp.zeros_like(lo)
        du = g * sg * (ndtr(be) - ndtr(al)) * np.sqrt(2 * np.pi).astype(g.dtype) / ph(x)
        return dmu, dsg, (z if bug else dlo), (z if bug else dhi), du

    return (
        rule(samp, bwd),
        (np.float32(0.3), np.float32(1.2), np.float32(-1), np.float32(2.0), r.u(0.05, 0.95, 8)),
        (0, 1, 2, 3, 4),
    )


@family(
    "Gumbel softmax with a typed key argument", temp="temperature gradient ignores the Gumbel noise"
)
def gumbel_softmax(bug):
    r = Rnd(185)

    def noise(key, z):
        return jax.random.gumbel(key, z.shape, jnp.float32).astype(z.dtype)

    def primal(z, T, key):
        return jax.nn.softmax((z + noise(key, z)) / T)

    def bwd(a, y, g):
        z, T, key = a
        d = y * (g - jnp.sum(g * y, -1, keepdims=True))
        s = z if bug else z + noise(key, z)
        return d / T, -jnp.sum(d * s) / T**2, None

    return rule(primal, bwd), (r.n(3, 5), np.float32(0.7), jax.random.key(7)), (0, 1)


# ---------------------------------------------------------------- second order
@family(
    "gelu by custom_jvp, rule itself differentiable",
    order=2,
    frozen="rule stops the gradient of its coefficient: zero second derivative part",
)
def gelu_second(bug):
    r = Rnd(190)
    f = jax.custom_jvp(lambda x: x * jax.scipy.special.ndtr(x))

    @f.defjvp
    def _(p, t):
        (x,), (dx,) = p, t
        pdf = jnp.exp(-0.5 * x * x) * 0.3989422804014327
        if bug:
            pdf = lax.stop_gradient(pdf)
        return f(x), (jax.scipy.special.ndtr(x) + x * pdf) * dx

    return f, (r.n(7),), (0,)


@family(
    "logsumexp custom_vjp whose backward is differentiable",
    order=2,
    saved_p="softmax computed in the backward under stop_gradient",
)
def lse_second(bug):
    r = Rnd(191)

    def bwd(a, y, g):
        p = jax.nn.softmax(a[0], -1)
        if bug:
            p = lax.stop_gradient(p)
        return (g[:, None] * p,)

    return rule(lambda x: jax.nn.logsumexp(x, -1), bwd), (r.n(3, 5),), (0,)


@family(
    "sinc by a chain of custom_jvp functions (f, f')",
    order=2,
    own=True,
    second_sign="f' is right, its own rule lacks the 2/x^2 term's factor 2",
)
def sinc_chain(bug):
    r = Rnd(192)
    f0 = jax.custom_jvp(lambda x: jnp.sin(x) / x)
    f1 = jax.custom_jvp(lambda x: jnp.cos(x) / x - jnp.sin(x) / x**2)

    @f0.defjvp
    def _(p, t):
        return f0(p[0]), f1(p[0]) * t[0]

    @f1.defjvp
    def _(p, t):
        x = p[0]
        d = -jnp.sin(x) / x - 2 * jnp.cos(x) / x**2 + (1 if bug else 2) * jnp.sin(x) / x**3
        return f1(x), d * t[0]

    return f0, (r.u(0.5, 6, 6),), (0,)


@family(
    "quadratic form 0.5 x^T A x with a symmetric-by-use A",
    order=2,
    own=True,
    mixed="mixed second derivative in (x, A) cut: dA uses a stopped x",
)
def quad_second(bug):
    r = Rnd(193)

    def bwd(a, y, g):
        x, A = a
        s = lax.stop_gradient(x) if bug else x
        return g * 0.5 * (A + A.T) @ x, g * 0.5 * jnp.outer(s, s)

    return rule(lambda x, A: 0.5 * x @ A @ x, bwd), (r.n(4), r.n(4, 4)), (0, 1)


@family(
    "bilinear pairing energy with force as an output of jax.grad: custom_vjp energy used twice",
    order=2,
    own=True,
    stale_cotangent="backward ignores that the cotangent may depend on x (stop_gradient on g)",
)
def energy_force(bug):
    r = Rnd(194)

    def bwd(a, y, g):
        x = a[0]
        g = lax.stop_gradient(g) if bug else g
        return (g * (jnp.sinh(x) / jnp.cosh(x)),)

    e = rule(lambda x: jnp.sum(jnp.log(jnp.cosh(x))), bwd)
    return (lambda x: e(x) ** 2), (r.n(5),), (0,)


# ---------------------------------------------------------------- right and hard to check
def right(note, own=False, order=1, special=None):
    """RIGHT program without a twin; fn() -> (fun, args, argnums)."""

    def deco(fn):
        def build():
            fun, args, argnums = fn()
            return Case(
                fn.__name__, False, fun, args, argnums, order, ("own; " if own else "") + note
            )

        build.__name__ = fn.__name__
        case(build)
        if special:
            SPECIAL[fn.__name__] = special
        return fn

    return deco


@right("SURROGATE by design: x + stop_gradient(round(x) - x)", special="surrogate")
def ste_round():
    r = Rnd(200)
    return (lambda x: x + lax.stop_gradient(jnp.round(x) - x)), (r.n(8, k=3),), (0,)


@right(
    "SURROGATE by design: fake quantization, clipped range, learned step through the STE",
    special="surrogate",
)
def ste_fake_quant():
    r = Rnd(201)

    def f(x, s):
        v = jnp.clip(x / s, -8, 7)
        return (v + lax.stop_gradient(jnp.round(v) - v)) * s

    return f, (r.n(12), np.float32(0.21)), (0, 1)


@right("SURROGATE by design: hard one-hot forward, soft gradient", special="surrogate")
def ste_hard_softmax():
    r = Rnd(202)

    def f(z):
        p = jax.nn.softmax(z)
        h = jax.nn.one_hot(jnp.argmax(z, -1), z.shape[-1], dtype=z.dtype)
        return p + lax.stop_gradient(h - p)

    return f, (r.n(4, 5),), (0,)


@right("bfloat16 inside, float32 in and out, gradient is the AD of it", special="bf16")
def bf16_mlp():
    r = Rnd(203)

    def f(x, w):
        h = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return h.astype(x.dtype).sum(0)

    return f, (r.n(6, 8), r.n(8, 4, k=0.3)), (0, 1)


@right("relu with some inputs exactly 0 (AD gives 0, inside [0, 1])", special="kink")
def relu_at_zero():
    r = Rnd(204)
    x = r.n(9)
    x[[2, 5]] = 0
    return (lambda x: jax.nn.relu(x) * 1.7), (x,), (0,)


@right("custom |x| rule with sign(0)=0 exactly at 0", special="kink")
def abs_at_zero():
    r = Rnd(205)
    x = r.n(7)
    x[3] = 0
    return rule(lambda x: jnp.abs(x), lambda a, y, g: (g * jnp.sign(a[0]),)), (x,), (0,)


@right("jnp.max over a row with an exact tie: cotangent shared", special="kink")
def max_tie():
    x = np.array([[0.3, 1.25, 1.25, -2], [1, 2, 3, 4]], np.float32)
    return (lambda x: x.max(1)), (x,), (0,)


@right("hinge loss with one margin exactly at the kink", special="kink")
def hinge_at_kink():
    r = Rnd(207)
    s = r.n(6)
    y = np.array([1, -1, 1, 1, -1, 1], np.float32)
    s[2] = 1
    return (lambda s, y: jnp.maximum(0, 1 - y * s)), (s, y), (0,)


@right("clip with inputs exactly on both bounds, own rule with a closed interval", special="kink")
def clip_at_bounds():
    x = np.array([-1, 1, 0.2, -3, 4, 0.9], np.float32)
    return (
        rule(lambda x: jnp.clip(x, -1, 1), lambda a, y, g: (g * (jnp.abs(a[0]) <= 1),)),
        (x,),
        (0,),
    )


@right("kinks 1e-3 away from generic points: relu(x) near 0", own=True)
def relu_near_kink():
    r = Rnd(209)
    x = r.n(8)
    x[[1, 4]] = [1e-3, -1e-3]
    return (lambda x: jax.nn.relu(x) ** 1.0 * 3), (x,), (0,)


@right("sorted L1 (OWL) norm: piecewise linear with close values", own=True)
def owl_norm():
    r = Rnd(210)
    return (
        (lambda x, w: jnp.sum(jnp.sort(jnp.abs(x))[::-1] * w)),
        (r.n(8), np.sort(r.u(0, 1, 8))[::-1].copy()),
        (0, 1),
    )


@right("saturated tanh and sigmoid: gradient underflows to about zero")
def saturated():
    x = np.array([40, -60, 25, 0.3, -200], np.float32)
    return (lambda x: jnp.tanh(x) + jax.nn.sigmoid(3 * x)), (x,), (0,)


@right("gradient exactly zero: softmax rows sum to one")
def softmax_row_sum():
    r = Rnd(212)

    def bwd(a, y, g):
        return (jnp.zeros_like(a[0]),)

    return rule(lambda x: jax.nn.softmax(x, -1).sum(-1), bwd), (r.n(4, 6),), (0,)


@right("argument not used for one branch of data: zero gradient leaf, floor elsewhere")
def floor_and_unused():
    r = Rnd(213)
    return (lambda x, u: jnp.floor(x) + x * 0 + jnp.sin(x)), (r.n(6, k=3), r.n(3)), (0, 1)


@right("two leaves with scales 1e4 and 1e-4")
def scale_mix():
    r = Rnd(214)
    return (
        (lambda p: jnp.tanh(p["big"] * 1e-4) * jnp.cos(p["small"] * 1e4)),
        ({"big": r.n(5, k=1e4), "small": r.n(5, k=1e-4)},),
        (0,),
    )


@right("elements of one leaf from 1e-4 to 1e3: sum of 1/x", own=True)
def reciprocal_scales():
    return (
        (lambda x: jnp.log(x) + 1e-3 / x),
        (np.array([1e-4, 3e-3, 0.1, 2, 60, 1e3], np.float32),),
        (0,),
    )


@right("variance as E[x^2]-E[x]^2 with mean 300 (cancels in float32), stable centred backward")
def variance_cancel():
    r = Rnd(216)

    def bwd(a, y, g):
        x = a[0]
        return (2 * g * (x - x.mean(0)) / x.shape[0],)

    return rule(lambda x: (x * x).mean(0) - x.mean(0) ** 2, bwd), (r.n(12, 3, m=300),), (0,)


@right("log(1+x)-x for tiny x: forward cancels, backward -x/(1+x)", own=True)
def log1p_minus():
    r = Rnd(217)
    return (
        rule(lambda x: jnp.log(1 + x) - x, lambda a, y, g: (-g * a[0] / (1 + a[0]),)),
        (r.u(0.01, 0.1, 8),),
        (0,),
    )


@right("outputs of order 1e-25", own=True)
def tiny_outputs():
    r = Rnd(218)
    return (lambda x: 1e-25 * jnp.sin(x) * x), (r.n(6),), (0,)


@right("outputs of order 1e15 next to outputs of order 1", own=True)
def huge_outputs():
    r = Rnd(219)
    return (lambda x: (1e15 * x**2, jnp.cos(x))), (r.n(6),), (0,)


@right("sin(500 x): strong curvature on the scale of usual finite-difference steps", own=True)
def fast_oscillation():
    r = Rnd(220)
    return (lambda x: jnp.sin(500 * x)), (r.n(7, k=0.1),), (0,)


@right("chaotic map iterated 12 times: gradients of about 1e3 and strong curvature", own=True)
def chaotic():
    r = Rnd(221)

    def f(x):
        return lax.fori_loop(0, 12, lambda i, x: 3.9 * x * (1 - x), x)

    return f, (r.u(0.2, 0.8, 5),), (0,)


@right("logsumexp over 5000 elements, custom rule")
def lse_5000():
    r = Rnd(222)
    return (
        rule(lambda x: jax.nn.logsumexp(x), lambda a, y, g: (g * jnp.exp(a[0] - y),)),
        (r.n(5000, k=3),),
        (0,),
    )


@right("empty array among the leaves, zero-size batch")
def empty_leaf():
    r = Rnd(223)

    def f(t):
        return t["e"].sum() + jnp.sum(t["x"] ** 2), t["e"] * 2

    return f, ({"e": np.zeros((0, 3), np.float32), "x": r.n(4)},), (0,)


@right("plain scalars in and out, 0-d")
def scalar_black_scholes():
    def f(S, K, v, t, rr):
        d1 = (jnp.log(S / K) + (rr + v * v / 2) * t) / (v * jnp.sqrt(t))
        N = jax.scipy.special.ndtr
        return S * N(d1) - K * jnp.exp(-rr * t) * N(d1 - v * jnp.sqrt(t))

    return f, tuple(np.float32(q) for q in (101, 95, 0.23, 0.8, 0.03)), (0, 1, 2, 3, 4)


@right("integer and boolean outputs beside float ones, None in pytrees")
def mixed_outputs():
    r = Rnd(225)

    def f(x, opt):
        assert opt["flag"] is None
        return {"i": jnp.argmax(x, -1), "v": jnp.max(x, -1), "b": x > 0, "n": None}

    return f, (r.n(4, 5), {"flag": None, "k": np.int32(3)}), (0,)


@right("lax.switch selected by an integer argument")
def switch_int():
    r = Rnd(226)

    def f(i, x):
        return lax.switch(i, [jnp.sin, lambda x: x**3, jnp.exp], x)

    return f, (np.int32(1), r.n(5)), (1,)


@right("an inner jit donates an intermediate buffer (the callers' arrays are not donated)")
def donated_jit():
    r = Rnd(227)
    g = jax.jit(lambda x, y: x + jnp.cosh(y), donate_argnums=(0,))
    return (lambda x, y: g(x * 1.0, y)), (r.n(6), r.n(6)), (0, 1)


@right("scan with jax.checkpoint, tanh RNN")
def checkpoint_rnn():
    r = Rnd(228)

    def f(W, U, x):
        @jax.checkpoint
        def st(h, t):
            h = jnp.tanh(W @ h + U @ t)
            return h, h

        return lax.scan(st, jnp.zeros(W.shape[0], x.dtype), x)[1]

    return f, (r.n(3, 3), r.n(3, 2), r.n(7, 2)), (0, 1, 2)


@right("custom_vjp with nondiff_argnums and a static exponent")
def nondiff_power():
    r = Rnd(229)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def pw(n, x):
        return x**n

    pw.defvjp(lambda n, x: (x**n, x), lambda n, x, g: (n * x ** (n - 1) * g,))
    return (lambda x: pw(3, x) + pw(2, x)), (r.n(6),), (0,)


@right("lax.custom_root, vmapped (implicit layer)")
def custom_root():
    r = Rnd(230)

    def one(a):
        def F(x):
            return x + 0.5 * jnp.sin(x) - a

        def solve(F, x0):
            return lax.fori_loop(0, 60, lambda i, x: x - F(x) / (1 + 0.5 * jnp.cos(x)), x0)

        def tsolve(g, y):
            return y / g(jnp.ones_like(y))

        return lax.custom_root(F, a, solve, tsolve)

    return jax.vmap(one), (r.n(6, k=2),), (0,)


@right("lax.custom_linear_solve of a convolution operator, unsymmetric")
def custom_linear_solve():
    r = Rnd(231)

    def f(k, b):
        n = b.shape[0]

        def mv(x):
            return 4 * x + k[0] * jnp.roll(x, 1) + k[1] * jnp.roll(x, -1)

        def dense(op, b):
            return jnp.linalg.solve(jax.vmap(op, out_axes=1)(jnp.eye(n, dtype=b.dtype)), b)

        return lax.custom_linear_solve(mv, b, dense, dense)

    return f, (r.n(2), r.n(6)), (0, 1)


@right("associative_scan of 2x2 matrix products")
def assoc_scan_matrices():
    r = Rnd(232)
    return (lambda M: lax.associative_scan(jnp.matmul, M)), (r.n(6, 2, 2),), (0,)


@right("symmetric function of degenerate eigenvalues through eigvalsh", own=True)
def eigvals_degenerate():
    A = np.diag(np.array([2, 2, 3, 5], np.float32))
    return (lambda A: jnp.sum(jnp.linalg.eigvalsh(0.5 * (A + A.T)) ** 2)), (A,), (0,)


@right("log-density of a Gaussian from its covariance (symmetrized argument)")
def gaussian_logpdf():
    r = Rnd(234)
    B = r.n(4, 4)

    def f(S, x):
        L = jnp.linalg.cholesky(0.5 * (S + S.T))
        z = jax.scipy.linalg.solve_triangular(L, x, lower=True)
        return -0.5 * z @ z - jnp.log(jnp.diag(L)).sum()

    return f, (B @ B.T + np.eye(4, dtype=np.float32), r.n(4)), (0, 1)


@right("Kalman filter log-likelihood by a scan", own=True)
def kalman():
    r = Rnd(235)

    def f(a, q, rr, y):
        def st(c, y):
            m, P = c
            m, P = a * m, a * a * P + jnp.exp(q)
            S = P + jnp.exp(rr)
            e = y - m
            K = P / S
            return (m + K * e, (1 - K) * P), -0.5 * (jnp.log(S) + e * e / S)

        z = jnp.zeros((), y.dtype)
        return lax.scan(st, (z, z + 1), y)[1].sum()

    return f, (np.float32(0.8), np.float32(-1), np.float32(-0.3), r.n(12)), (0, 1, 2, 3)


@right("greedy hard NMS: scores of the kept boxes, selection constant around the point")
def nms_hard():
    r = Rnd(236)
    c, s = r.u(0, 4, 7, 2), r.u(1, 2, 7, 2)

    def f(c, s, score):
        lo, hi = c - s / 2, c + s / 2
        inter = jnp.prod(
            jnp.maximum(jnp.minimum(hi[:, None], hi) - jnp.maximum(lo[:, None], lo), 0), -1
        )
        area = jnp.prod(s, -1)
        iou = inter / (area[:, None] + area - inter)
        o = jnp.argsort(-score)
        keep = jnp.ones(7, bool)
        for i in range(7):
            sup = (iou[o[i]] > 0.3) & keep[o[i]] & (jnp.arange(7) != o[i]) & (score < score[o[i]])
            keep = keep & ~sup
        return jnp.where(keep, score**2 * jnp.log(area), 0)

    return f, (c, s, r.u(0, 1, 7)), (0, 1, 2)


@right("top-k pooling, gradient scattered to the picked entries (custom rule)")
def topk_pool():
    r = Rnd(237)

    def bwd(a, y, g):
        x = a[0]
        i = lax.top_k(x, 3)[1]
        return (jnp.zeros_like(x).at[jnp.arange(x.shape[0])[:, None], i].add(g[:, None] / 3),)

    return rule(lambda x: lax.top_k(x, 3)[0].mean(-1), bwd), (r.n(4, 9),), (0,)


@right("extrapolating jnp.interp and quantile (plain AD)", own=True)
def interp_quantile():
    r = Rnd(238)

    def f(x, fp):
        return jnp.interp(
            x, jnp.arange(5, dtype=x.dtype), fp, left="extrapolate", right="extrapolate"
        ), jnp.quantile(x, 0.3)

    return f, (r.u(-1, 6, 9), r.n(5)), (0, 1)


@right("sum over a padded batch with garbage (1e30) in the padding", own=True)
def garbage_padding():
    r = Rnd(239)
    x = r.n(4, 6)
    ln = np.array([6, 2, 4, 1], np.int32)
    for i, n in enumerate(ln):
        x[i, n:] = 1e30

    def f(x, ln):
        m = jnp.arange(6)[None] < ln[:, None]
        return jnp.sum(jnp.where(m, jnp.exp(jnp.where(m, x, 0)), 0), 1)

    return f, (x, ln), (0,)


@right("forty small leaves in nested tuples", own=True)
def many_leaves():
    r = Rnd(240)
    t = tuple(tuple(r.n(2) for _ in range(8)) for _ in range(5))

    def f(t):
        z = 0
        for i, u in enumerate(t):
            for j, v in enumerate(u):
                z = jnp.sin(z + v * (1 + 0.1 * i)) + 0.5 * v * (j % 3)
        return z

    return f, (t,), (0,)


@right("multi-head softmax over -1e9 mask (finite mask value)", own=True)
def finite_mask_attention():
    r = Rnd(241)

    def f(q, k, v):
        s = q @ k.T + jnp.where(jnp.tri(5, dtype=bool), 0, -1e9)
        return jax.nn.softmax(s) @ v

    return f, (r.n(5, 3), r.n(5, 3), r.n(5, 3)), (0, 1, 2)


@right("while_loop square root with a custom_jvp that is right at second order too", order=2)
def newton_sqrt():
    r = Rnd(242)
    f = jax.custom_jvp(
        lambda a: lax.while_loop(
            lambda s: jnp.any(jnp.abs(s[0] - s[1]) > 1e-6 * s[0]) & (s[2] < 60),
            lambda s: (0.5 * (s[0] + a / s[0]), s[0], s[2] + 1),
            (a + 1, a + 9, 0),
        )[0]
    )

    @f.defjvp
    def _(p, t):
        y = f(p[0])
        return y, 0.5 * t[0] / y

    return f, (r.u(0.2, 9, 6),), (0,)


@right("key as a raw uint32 array: reparametrized VAE loss")
def vae_elbo():
    r = Rnd(243)

    def f(mu, lv, W, key, x):
        e = jax.random.normal(key, mu.shape, jnp.float32).astype(mu.dtype)
        z = mu + jnp.exp(0.5 * lv) * e
        return jnp.sum((z @ W - x) ** 2) - 0.5 * jnp.sum(1 + lv - mu**2 - jnp.exp(lv))

    return f, (r.n(3, 2), r.n(3, 2), r.n(2, 4), np.array([0, 5], np.uint32), r.n(3, 4)), (0, 1, 2)


# ---------------------------------------------------------------- wrong without a twin
@family(
    right=None,
    own=True,
    one_pass="exp-sum of x - max without adding the max back: the rule treats the max as constant, which does not cancel here",
)
def centered_pool(bug):
    r = Rnd(260)

    def primal(x):
        return x - x.max(-1, keepdims=True)

    def bwd(a, y, g):
        return (g,)

    f = rule(primal, bwd)
    return (lambda x: jnp.sum(jnp.exp(f(x)), -1)), (r.n(4, 5),), (0,)


@family(
    right=None,
    own=True,
    abs_scale="per-row absmax int8-like scaling: scale's own gradient left out (smooth rescaling, no rounding)",
)
def absmax_scale(bug):
    r = Rnd(261)

    def sc(x):
        return jnp.abs(x).max(-1, keepdims=True)

    f = rule(lambda x: x / sc(x), lambda a, y, g: (g / sc(a[0]),))
    return f, (r.n(3, 6),), (0,)


@family(
    right=None,
    own=True,
    accumulate="gradient accumulation over four microbatches: the first one is overwritten by the second",
)
def microbatches(bug):
    r = Rnd(262)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def bwd(a, y, g):
        w, x = a
        acc = jnp.zeros_like(w)
        for i, c in enumerate(jnp.split(x, 4)):
            d = jax.grad(loss)(w, c)
            acc = d if i == 1 else acc + d
        return g * acc, g * jax.grad(loss, 1)(w, x)

    return rule(loss, bwd), (r.n(4), r.n(8, 4)), (0, 1)


@family(
    right=None,
    own=True,
    window="sliding-window attention core: keys left of the window by one kept in the backward",
)
def sliding_window(bug):
    r = Rnd(263)
    T, W = 8, 3

    def m(w):
        i = jnp.arange(T)
        return (i[:, None] >= i[None]) & (i[:, None] - i[None] < w)

    def core(q, k, v, w=W):
        return jax.nn.softmax(jnp.where(m(w), q @ k.T, -jnp.inf)) @ v

    def bwd(a, y, g):
        return jax.vjp(lambda *t: core(*t, w=W + 1), *a)[1](g)

    return rule(lambda q, k, v: core(q, k, v), bwd), (r.n(T, 3), r.n(T, 3), r.n(T, 3)), (0, 1, 2)


@family(
    right=None,
    own=True,
    momentum="EMA filter: initial-value share (1-a)^t of the first sample left out",
)
def ema_filter(bug):
    r = Rnd(264)
    al = 0.3

    def primal(x):
        def st(c, v):
            c = (1 - al) * c + al * v
            return c, c

        return jnp.concatenate([x[:1], lax.scan(st, x[0], x[1:])[1]])

    def bwd(a, y, g):
        def st(c, v):
            c = c + v
            return (1 - al) * c, al * c

        c, d = lax.scan(st, jnp.zeros((), g.dtype), g[1:], reverse=True)
        return (jnp.concatenate([g[:1], d]),)

    return rule(primal, bwd), (r.n(10),), (0,)


@family(
    right=None,
    own=True,
    eps_outside="Adam-like update: sqrt(v)+eps forward, sqrt(v+eps) in the rule of v (small v only)",
)
def adam_update(bug):
    r = Rnd(265)
    eps = 1e-3
    v = r.u(0.1, 1, 8)
    v[[2, 6]] = [2e-5, 8e-6]

    def bwd(a, y, g):
        m, v = a
        s = jnp.sqrt(v + eps)
        return g / (jnp.sqrt(v) + eps), -g * m / (2 * s**3)

    return rule(lambda m, v: m / (jnp.sqrt(v) + eps), bwd), (r.n(8), v), (0, 1)


@family(
    right=None,
    own=True,
    label_smoothing="label smoothing in the forward only: backward uses the hard one-hot target (0.05 of mass)",
)
def label_smoothing(bug):
    r = Rnd(266)
    lab = r.i(0, 6, 5)

    def primal(z, lab):
        t = 0.95 * jax.nn.one_hot(lab, 6, dtype=z.dtype) + 0.05 / 6
        return -jnp.mean(jnp.sum(t * jax.nn.log_softmax(z), -1))

    def bwd(a, y, g):
        z, lab = a
        return g * (jax.nn.softmax(z) - jax.nn.one_hot(lab, 6, dtype=z.dtype)) / z.shape[0], None

    return rule(primal, bwd), (r.n(5, 6), lab), (0,)


@family(
    right=None,
    own=True,
    vmap_shared="shared weight inside a vmapped custom_vjp: gradient taken from batch element 0 only",
)
def shared_weight(bug):
    r = Rnd(267)

    def bwd(a, y, g):
        x, w = a
        d = g * (1 - y * y)
        return d @ w.T, x[:1].T @ d[:1] * x.shape[0]

    return rule(lambda x, w: jnp.tanh(x @ w), bwd), (r.n(5, 3), r.n(3, 4)), (0, 1)
