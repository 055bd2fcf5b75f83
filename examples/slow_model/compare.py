"""How much faster is the model once attention is not written by hand? Measured here, step against step.

    python examples/slow_model/compare.py

1. ``attnsel watch`` on a step of ``before.py``: the line, what it stores, what to write instead.
2. The same on a step of ``after.py``, where that was done.
3. Both, in turns, so that what else the machine does meets both: losses, medians, their ratio.
"""

from __future__ import annotations

import argparse
from statistics import median

try:
    import after
    import before

    import attnsel
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None


def heading(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 74 - len(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, in turns")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    options = parser.parse_args()
    if options.rounds < 1 or options.length < 4:
        parser.error("--rounds must be at least 1 and --length at least 4")

    for program in (before, after):
        with attnsel.watch() as seen:
            program.train(1, options.length)
        heading(f"what attnsel watch says of {program.__name__}.py")
        print(seen.report())

    heading("before and after")
    ratios, slow, fast = [], [], []
    for _ in range(options.rounds):
        losses, (_, took) = before.train(2, options.length)  # the first step warms up
        fixed, (_, takes) = after.train(2, options.length)
        slow.append(took)
        fast.append(takes)
        ratios.append(took / takes)
    print(f"loss after a step: {losses[1]:.4f} and {fixed[1]:.4f}")
    print(f"a training step, the whole model: {1000 * median(slow):.0f} ms and {1000 * median(fast):.0f} ms")
    print(f"{median(ratios):.1f} times faster (median of {options.rounds} pairs at {options.length} tokens)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
