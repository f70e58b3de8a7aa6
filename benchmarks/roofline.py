"""Estimates how long a program compiled for an H200 takes there, without one.

    python -m benchmarks.roofline PROGRAM.txt ...            # texts of `compiled.as_text()`

A kernel takes the longer of its bytes divided by the bandwidth and its operations divided by the
rate of their type, and a launch. The body of a loop counts as often as its trip count says, and of
a conditional the dearest branch. Rates were measured on an H200 (2026-11-26, JAX 0.11.2): the
estimate of a program that ran there is within 8 %. For programs that are compiled here, whose
kernels are chosen without trying them, ratios come out 5 to 15 % low. How well a kernel is tuned,
what runs at the same time, and the host are not in it.
"""

import collections
import math
import pathlib
import re
import sys
from typing import NamedTuple

BANDWIDTH, LAUNCH = 3.9e12, 2.0e-6
# The host reads the condition of a branch: an assumption, not measured.
WAIT = 15e-6
# In the name of a branch that chooses the cheap side in a healthy step.
RARE = "out_of_range"
# A sum over leading axes runs at a quarter of the bandwidth.
LEADING = 4
RATES = {"bf16": 620e12, "f16": 620e12, "tf32": 300e12, "f32": 50e12, "f64": 50e12}
RATES |= {"f8": 1000e12, "s8": 1000e12}
BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
ARRAY = re.compile(r"\b(pred|bf16|f8\w*|[sufc]\d+)\[([\d,]*)\]")
OPERATION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
FREE = set(
    "parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all domain "
    "opt-barrier iota".split()
)
SLICES = {"dynamic-slice", "slice", "gather"}


class Operation(NamedTuple):
    """One line of a program."""

    name: str
    type: str
    code: str
    inside: str  # of the parentheses
    rest: str

    @property
    def operands(self):
        """Their names."""
        return re.findall(r"%([\w.-]+)", self.inside)

    def attribute(self, key):
        """The name of a computation, such as that of a loop's body."""
        found = re.search(rf"\b{key}=%?([\w.-]+)", self.rest)
        return found and found.group(1)


def arrays(text):
    """Types and shapes in the text of a type."""
    return [(kind, [int(n) for n in sizes.split(",") if n]) for kind, sizes in ARRAY.findall(text)]


def size_in_bytes(text):
    return sum(bits_of(kind) * math.prod(shape) / 8 for kind, shape in arrays(text))


def bits_of(kind):
    return BITS.get(kind) or int(re.search(r"\d+", kind).group())


def with_scopes(text):
    """The text with the scopes of each operation, which may stand in tables at its top."""
    names = dict(re.findall(r'^(\d+) "(.*)"$', text.partition("FunctionNames")[2], re.MULTILINE))
    places = dict(re.findall(r"^(\d+) \{.*function_name_id=(\d+)", text, re.MULTILINE))
    frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.MULTILINE))
    return re.sub(
        r"stack_frame_id=(\d+)",
        lambda found: f'scope="{names.get(places.get(frames.get(found[1])))}"',
        text,
    )


def parsed(text):
    """The computations of a program by name, and the name of the first one."""
    found, entry, current = {}, None, {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if head := COMPUTATION.match(line):
            current = found.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif match := OPERATION.match(line):
            name, kind, code, rest = match.groups()
            end = closing(rest)
            current[name] = Operation(name, kind, code, rest[:end], rest[end:])
    return found, entry


def closing(text):
    """The place of the parenthesis that closes one opened before the text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i
    return len(text)


def rate(operation, kind):
    """Operations a second of a product whose first factor has this type."""
    if kind in RATES and kind != "f32":
        return RATES[kind]
    if kind.startswith("f8") or kind == "u8":
        return RATES["f8"]
    parts = re.search(r"(tf32|bf16)_\1_f32(?:_x(\d))?", operation.rest.lower())
    if parts:
        return RATES[parts.group(1)] / int(parts.group(2) or 1)
    return RATES["f32" if re.search(r"operand_precision\W+highest", operation.rest) else "tf32"]


def product_seconds(operation, computation):
    """What a matrix product takes by its operations: two for each product of two numbers."""
    first = computation.get(operation.operands[0])
    if first is None:
        return 0.0
    kind, shape = arrays(first.type)[0]
    axes = re.search(r"lhs_contracting_dim(?:ension)?s\W+([\d,]+)", operation.rest)
    length = math.prod(shape[int(d)] for d in re.findall(r"\d+", axes.group(1))) if axes else 1
    return 2 * math.prod(arrays(operation.type)[0][1]) * length / rate(operation, kind)


def bytes_of_fusion(called, operation, computation):
    """What a fused kernel reads and writes: of an operand that is only sliced, the slices."""
    users = collections.defaultdict(list)
    for one in called.values():
        for name in one.operands:
            users[name].append(one)
    parameters = {int(x.inside): x.name for x in called.values() if x.code == "parameter"}
    read = 0.0
    for i, name in enumerate(operation.operands):
        whole = size_in_bytes(computation[name].type) if name in computation else 0.0
        read += min(whole, bytes_read(parameters[i], users, whole) if i in parameters else whole)
    return read + bytes_written(called)


def bytes_read(name, users, whole):
    """Of an operand of a fused kernel; what is written into it is not read."""
    if not users[name]:
        return whole
    total = 0.0
    for user in users[name]:
        if user.code == "bitcast":
            total += bytes_read(user.name, users, whole)
        elif user.code in SLICES:
            total += size_in_bytes(user.type)
        elif user.code != "dynamic-update-slice" or user.operands[0] != name:
            return whole
    return total


def bytes_written(called):
    """By a fused kernel; of an array that is updated in place, the update."""
    result = size_in_bytes(list(called.values())[-1].type)
    for one in called.values():
        in_place = one.code == "dynamic-update-slice" and size_in_bytes(one.type) >= 0.9 * result
        if in_place and one.operands[1] in called:
            return size_in_bytes(called[one.operands[1]].type)
    return result


def reads(called):
    """How often a kernel reads: a sum of k stacked arrays k times, by leading axes slowly.

    Of several sums the last one counts: those before it add up the parts of a product.
    """
    stacked = [len(one.operands) for one in called.values() if one.code == "concatenate"]
    for one in reversed(called.values()):
        if one.code == "reduce" and one.operands[0] in called:
            axes = re.search(r"dimensions=\{([\d,]*)\}", one.rest)
            rank = len(arrays(called[one.operands[0]].type)[0][1])
            is_last = not rank or str(rank - 1) in axes.group(1).split(",")
            return max(stacked, default=1) * (1 if is_last else LEADING)
    return 1


class Estimate:
    """The seconds of a program, and the kernels that take them, a `Counter` of seconds."""

    def __init__(self, text):
        self.computations, entry = parsed(with_scopes(text))
        self.kernels = collections.Counter()
        self.seconds = self._run(entry, 1.0, self.kernels)

    def _run(self, name, times, kernels):
        computation = self.computations[name]
        return sum(self._one(x, computation, times, kernels) for x in computation.values())

    def _one(self, operation, computation, times, kernels):
        code = operation.code
        if code in FREE or code.endswith(("-done", "-update")):
            return 0.0
        if code == "while":
            found = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.rest)
            count = int(found.group(1)) if found else 1
            return count * self._run(operation.attribute("body"), times * count, kernels)
        if code == "conditional":
            kernels["wait"] += WAIT * times
            return WAIT + self._dearest(operation, times, kernels)
        if code == "call" and operation.attribute("to_apply") in self.computations:
            return self._run(operation.attribute("to_apply"), times, kernels)
        seconds = self._kernel(operation, computation) + LAUNCH
        place = re.search(r'op_name="([^"]*)"', operation.rest)
        label = f"{code} {operation.type[:40]} {place.group(1)[-70:] if place else ''}"
        kernels[label] += seconds * times
        return seconds

    def _dearest(self, operation, times, kernels):
        listed = re.search(
            r"branch_computations=\{([^}]*)\}|(true_computation=.*false_computation=%[\w.-]+)",
            operation.rest,
        )
        branches = re.findall(r"%([\w.-]+)", listed.group(0))
        found = [(self._run(b, times, own := collections.Counter()), b, own) for b in branches]
        chosen = min if RARE in operation.rest else max
        seconds, _, own = chosen(found, key=lambda each: each[0])
        kernels.update(own)
        return seconds

    def _kernel(self, operation, computation):
        """The seconds of one kernel without its launch."""
        if operation.code in ("fusion", "fusion-start", "async-start"):
            called = self.computations[operation.attribute("calls")]
            moved = bytes_of_fusion(called, operation, computation) * reads(called)
            work = sum(product_seconds(x, called) for x in called.values() if x.code == "dot")
            return max(moved / BANDWIDTH, work)
        moved = sum(
            size_in_bytes(computation[x].type) for x in operation.operands if x in computation
        )
        moved += size_in_bytes(operation.type)
        library = operation.code == "custom-call" and re.search("gemm|matmul", operation.rest)
        is_product = operation.code == "dot" or library
        return max(moved / BANDWIDTH, product_seconds(operation, computation) if is_product else 0)


def main(paths):
    for path in paths:
        found = Estimate(pathlib.Path(path).read_text())
        print(f"{path}: {found.seconds * 1e3:.3f} ms")
        for label, seconds in found.kernels.most_common(12):
            print(f"    {seconds * 1e3:8.3f} ms  {label}")


if __name__ == "__main__":
    main(sys.argv[1:])
