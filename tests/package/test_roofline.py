"""The estimate of a program's time on an H200, of programs whose time is known."""

import pytest

from benchmarks.roofline import BANDWIDTH, LAUNCH, LEADING, RARE, RATES, WAIT, Estimate

GIGA = "f32[1024,262144]{1,0}"  # 2 ** 30 bytes
PARAMETER = f"  %x = {GIGA} parameter(0)\n"


def program(body, *computations):
    return "\n".join([*computations, "ENTRY %main (x: f32[]) -> f32[] {", PARAMETER + body, "}\n"])


def copy_in(name):
    body = f"  %p.{name} = {GIGA} parameter(0)\n  %c.{name} = {GIGA} copy(%p.{name})"
    return f"%{name} (p: f32[]) -> f32[] {{\n{body}\n}}\n"


def branch(rest=""):
    return program(
        f"  ROOT %w = {GIGA} conditional(%x, %x), branch_computations={{%none, %one}}{rest}",
        "%none (p: f32[]) -> f32[] {\n  %p.0 = f32[] parameter(0)\n}\n",
        copy_in("one"),
    )


COPY = 2 * 2**30 / BANDWIDTH + LAUNCH
READ = 2**30 / BANDWIDTH


def fused_sum(axis, stacked=1):
    kept = "f32[1024]" if axis else "f32[262144]"
    if stacked > 1:
        made = f"f32[{stacked},1024,262144]{{2,1,0}}"
        kept, axis = kept.replace("[", f"[{stacked},"), axis + 1
        lines = f"  %s = {made} concatenate({', '.join(['%p'] * stacked)})\n"
    else:
        made, lines = GIGA, f"  %s = {GIGA} negate(%p)\n"
    lines += f"  ROOT %r = {kept}{{0}} reduce(%s, %zero), dimensions={{{axis}}}, to_apply=%add"
    called = f"%called (p: f32[]) -> f32[] {{\n  %p = {GIGA} parameter(0)\n{lines}\n}}\n"
    return program(f"  ROOT %f = {kept}{{0}} fusion(%x), kind=kInput, calls=%called", called)


def product(kind, options=""):
    left, right = f"{kind}[4096,8192]{{1,0}}", f"{kind}[8192,4096]{{1,0}}"
    return program(
        f"  %a = {left} parameter(1)\n  %b = {right} parameter(2)\n"
        "  ROOT %d = f32[4096,4096]{1,0} "
        f"dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{options}"
    )


PARTS = fused_sum(1).replace(
    f"%s = {GIGA} negate(%p)", f"%s = {GIGA} reduce(%p, %zero), dimensions={{0}}, to_apply=%add"
)
WORK = 2 * 4096 * 4096 * 8192
KNOWN = {
    "a copy": (program(f"  ROOT %c = {GIGA} copy(%x)"), COPY),
    "a view": (program(f"  ROOT %c = {GIGA} bitcast(%x)"), 0),
    "a loop": (
        program(
            f"  ROOT %w = {GIGA} while(%x), condition=%end, body=%body, "
            'backend_config={"known_trip_count":{"n":"12"}}',
            copy_in("body"),
        ),
        12 * COPY,
    ),
    "a branch": (branch(), WAIT + COPY),
    "a branch that is rare": (branch(f', metadata={{op_name="jit(f)/{RARE}/cond"}}'), WAIT),
    "a branch that is rare by its frame": (
        f'FunctionNames\n7 "{RARE}"\nFileLocations\n3 {{file_name_id=1 function_name_id=7}}\n'
        "StackFrames\n5 {file_location_id=3 parent_frame_id=5}\n"
        + branch(', metadata={op_name="cond" stack_frame_id=5}'),
        WAIT,
    ),
    "a sum over the last axis": (fused_sum(1), READ + LAUNCH),
    "a sum of a product's parts, then one over rows": (PARTS, READ + 2**12 / BANDWIDTH + LAUNCH),
    "a sum over the first axis": (fused_sum(0), LEADING * (READ + 2**20 / BANDWIDTH) + LAUNCH),
    "three stacked sums": (fused_sum(1, 3), 3 * READ + LAUNCH),
    "a product in bfloat16": (product("bf16"), WORK / RATES["bf16"] + LAUNCH),
    "a product in TF32": (product("f32"), WORK / RATES["tf32"] + LAUNCH),
    "a product in float32": (
        product("f32", ", operand_precision={highest,highest}"),
        WORK / RATES["f32"] + LAUNCH,
    ),
    "a product in three parts": (
        product("f32", ", algorithm=dot_bf16_bf16_f32_x3"),
        3 * WORK / RATES["bf16"] + LAUNCH,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_program_takes_the_time_that_is_known(name):
    text, seconds = KNOWN[name]
    estimate = Estimate(text)
    assert estimate.seconds == pytest.approx(seconds, rel=1e-4)
    assert sum(estimate.kernels.values()) == pytest.approx(estimate.seconds)
