"""The loops of a kernel's machine code, as nvdisasm prints it, and what their instructions are.

Where a loop's time goes is seen without a GPU: how many instructions of which kind surround each
multiplication of matrices, and how often the warps wait for one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^\s*([.$\w]+):\s*$")
_TARGET = re.compile(r"\.L_x_\d+")
_MATRIX = re.compile(r"(?:H|I|HG|QG|UTCH|UTCQ|O|Q|D)MMA\b")
_ASYNCHRONOUS = re.compile(r"(?:HGMMA|QGMMA|UTC\w*MMA)\b")
# Rows, columns and depth of one instruction: HGMMA.64x128x16 is of four warps, HMMA.16816 of one.
_WARPGROUP_SHAPE = re.compile(r"GMMA\.(\d+)x(\d+)x(\d+)")
_WARP_SHAPES = {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "884": 8 * 8 * 4}

# Instructions by what they occupy; the first row that matches. What is left is integer arithmetic and moves.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("matrix", _MATRIX),
    ("waits", re.compile(r"WARPGROUP\.DEPBAR")),
    ("mufu", re.compile(r"MUFU|F2F\b|F2I|I2F\b|FRND")),  # the unit for exp2, sixteen lanes a cycle
    ("local", re.compile(r"LDL|STL")),
    ("shared", re.compile(r"LDS|STS|ATOMS|LDTM|STTM")),
    ("memory", re.compile(r"LDG(?!DEPBAR)|STG|LD\b|ST\b|RED\b|ATOM|UTMA|UBLK|LDC")),
    ("barriers", re.compile(r"BAR|DEPBAR|LDGDEPBAR|MEMBAR|FENCE|WARPSYNC|WARPGROUP|SYNCS|UTCBAR|ELECT")),
    ("shuffles", re.compile(r"SHFL|VOTE|REDUX|MATCH")),
    ("control", re.compile(r"BRA|BRX|JMP|CALL|RET|EXIT|BSSY|BSYNC|BREAK|NOP|BPT|NANOSLEEP|YIELD")),
    ("uniform", re.compile(r"U[A-Z]|R2UR|S2UR|LDCU")),
    ("fp", re.compile(r"F(?!LO)|H(?:ADD|MUL|FMA|SET|MNMX)|MUFU")),
    ("integer", re.compile(r"")),
)


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str  # with its modifiers
    predicate: str  # of the guard; empty: none
    operands: str

    @property
    def targets(self) -> list[str]:
        """Labels it names."""
        return _TARGET.findall(self.operands)

    @property
    def kind(self) -> str:
        """A key of ``LoopMix``; what never executes is padding for the sequencer."""
        if self.predicate in ("!PT", "!UPT"):
            return "control"
        return next(name for name, pattern in _KINDS if pattern.match(self.opcode))


@dataclass(frozen=True, slots=True)
class LoopMix:
    """Instructions of one pass through a loop, per warp; the kinds add up to ``instructions``.

    Both sides of a branch count, and a loop inside counts once; what tries a barrier again does not.
    """

    instructions: int
    matrix: int
    waits: int  # for products that were started: WARPGROUP.DEPBAR, or on sm100 a barrier's phase
    mufu: int  # exp2, conversions
    local: int  # registers that were spilled
    shared: int  # shared and tensor memory
    memory: int  # global memory, copies from there, and constants
    barriers: int
    shuffles: int
    control: int
    uniform: int  # integers that are the same for all lanes
    fp: int  # floating point, packing to 16 bits included
    integer: int  # moves and selections included
    multiply_adds: int  # of a warp's matrix instructions; 0: their shape is not in the code
    matrix_per_wait: float | None  # None where nothing waits, as with the products of single warps

    @property
    def serialised(self) -> bool:
        """Whether every product of the asynchronous kind is waited for before the next one starts."""
        return self.matrix_per_wait is not None and self.matrix_per_wait < LEAST_PER_WAIT


# Matrix instructions that a loop must start for each wait. A tile's product is several, at least two in our
# tiles, and one wait; where ptxas serialises, a wait stands behind each.
LEAST_PER_WAIT = 2.0


@dataclass(slots=True)
class _Block:
    """Instructions that run one after the other, and the blocks that may follow."""

    code: list[Instruction] = field(default_factory=list)
    after: set[int] = field(default_factory=set)


def loops_of(text: str) -> list[LoopMix]:
    """Of every innermost loop that multiplies matrices, in the order of the code."""
    blocks = _blocks(text)
    found = _innermost(blocks, set(range(len(blocks))), {at: block.after for at, block in enumerate(blocks)})
    return [_mix([(at, blocks[at]) for at in sorted(loop)]) for loop in sorted(found, key=min)]


def hottest(loops: list[LoopMix]) -> LoopMix | None:
    """The one with the fewest instructions for its products: over tiles without a mask, the most of them."""
    return min(loops, key=lambda loop: loop.instructions / (loop.multiply_adds or loop.matrix), default=None)


def _mix(blocks: list[tuple[int, _Block]]) -> LoopMix:
    every = [i for at, block in blocks if not _tries_again(at, block) for i in block.code]
    kinds = Counter(instruction.kind for instruction in every)
    matrix = [i.opcode for i in every if i.kind == "matrix"]
    if any(opcode.startswith("UTC") for opcode in matrix):
        # Tensor memory's products end in a barrier's phase. Where data arrives through one, it counts too.
        phases = sum(i.opcode.startswith("SYNCS.PHASECHK") for i in every)
        kinds.update(waits=phases, barriers=-phases)
    waits = kinds["waits"] if any(map(_ASYNCHRONOUS.match, matrix)) else 0
    shapes = [_multiply_adds(opcode) for opcode in matrix]
    return LoopMix(
        len(every),
        **{name: kinds[name] for name, _ in _KINDS},
        multiply_adds=sum(shapes) if all(shapes) else 0,
        matrix_per_wait=round(len(matrix) / waits, 2) if waits else None,
    )


def _tries_again(at: int, block: _Block) -> bool:
    """Whether it spins on a barrier whose first test failed."""
    return at in block.after and any(i.opcode.startswith("SYNCS.PHASECHK") for i in block.code)


def _multiply_adds(opcode: str) -> int:
    """Of one warp in one instruction."""
    shape = _WARPGROUP_SHAPE.search(opcode)
    if shape is not None:
        return int(shape[1]) * int(shape[2]) * int(shape[3]) // 4
    return _WARP_SHAPES.get(opcode.split(".")[1] if "." in opcode else "", 0)


def _blocks(text: str) -> list[_Block]:
    """The code's basic blocks, and which may follow which."""
    blocks, starts, joins = [_Block()], {}, {}
    named: list[tuple[int, Instruction]] = []  # branches, to labels that may come later
    for line in text.splitlines():
        label, found = _LABEL.match(line), _LINE.search(line)
        if label is not None:
            if blocks[-1].code:
                _follow(blocks)
            starts[label[1]] = len(blocks) - 1
        elif found is not None:
            made = Instruction(found[2], found[1] or "", found[3])
            blocks[-1].code.append(made)
            if made.opcode.startswith("BSSY"):
                joins[made.operands.split(",")[0].strip()] = made
            elif made.opcode.startswith("BSYNC"):
                join = joins.get(made.operands.strip())
                if join is not None:
                    named.append((len(blocks) - 1, join))
                _follow(blocks)
            elif _leaves(made):
                named.append((len(blocks) - 1, made))
                _follow(blocks, falls_through=_falls_through(made))
    for at, branch in named:
        blocks[at].after.update(starts[target] for target in branch.targets if target in starts)
    return blocks


def _follow(blocks: list[_Block], falls_through: bool = True) -> None:
    """Open the next block."""
    if falls_through:
        blocks[-1].after.add(len(blocks))
    blocks.append(_Block())


def _leaves(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] in ("BRA", "BRX", "JMP", "CALL", "RET", "EXIT")


def _falls_through(branch: Instruction) -> bool:
    """Whether the next instruction may follow: it has a guard, tests an operand, or returns here."""
    tests = "," in branch.operands and not branch.opcode.startswith("BRX")
    return bool(branch.predicate) or tests or branch.opcode.startswith("CALL")


def _innermost(blocks: list[_Block], within: set[int], after: dict[int, set[int]]) -> list[set[int]]:
    """The loops among ``within`` that multiply matrices, without those around another such loop."""
    found = []
    for loop in _cycles(within, after):
        if not any(i.kind == "matrix" for at in loop for i in blocks[at].code):
            continue
        entered = {to for at in after for to in after[at] if at not in loop and to in loop}
        header = min(entered or loop)
        # Without the edges back to its first block, only loops inside of it are left.
        inside = {at: (after[at] & loop) - {header} for at in loop}
        found += _innermost(blocks, loop, inside) or [loop]
    return found


def _cycles(within: set[int], after: dict[int, set[int]]) -> list[set[int]]:
    """Strongly connected components that hold a cycle (Kosaraju)."""
    finished: list[int] = []
    seen: set[int] = set()
    for root in sorted(within):
        stack = [(root, iter(sorted(after[root] & within)))] if root not in seen else []
        seen.add(root)
        while stack:
            at, rest = stack[-1]
            following = next((to for to in rest if to not in seen), None)
            if following is None:
                finished.append(stack.pop()[0])
            else:
                seen.add(following)
                stack.append((following, iter(sorted(after[following] & within))))
    before: dict[int, set[int]] = {at: set() for at in within}
    for at in within:
        for to in after[at] & within:
            before[to].add(at)
    found, taken = [], set()
    for root in reversed(finished):
        component, waiting = set(), [root]
        while waiting:
            at = waiting.pop()
            if at not in taken:
                taken.add(at)
                component.add(at)
                waiting += before[at] - taken
        if len(component) > 1 or component & {to for at in component for to in after[at]}:
            found.append(component)
    return found
