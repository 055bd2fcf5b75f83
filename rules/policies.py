"""What the user allowed or forbade, and what this process saw refuse."""

from __future__ import annotations

from attnsel.candidates.record import Memory
from attnsel.policy import Policy
from attnsel.rules.api import policy_rule
from attnsel.selection.requirements import AtLeastBytes, FreeText, OneOf, size
from attnsel.selection.verdict import Violation


@policy_rule("POLICY001", fires_on=("triton", {"backend": "cudnn"}))
def another_is_forced(name: str, policy: Policy) -> Violation | None:
    """Another candidate is forced.

    Why: a forced backend runs or raises; it is never swapped for another.
    Fix: drop backend=… (or ATTNSEL_BACKENDS with a single name).
    Source: your policy.
    """
    if policy.backend is not None and name != policy.backend:
        return Violation("policy.backend", policy.backend, OneOf(name))
    return None


@policy_rule("POLICY002", fires_on=("cudnn", {"allow": ("triton", "tiled")}))
def not_on_the_list(name: str, policy: Policy) -> Violation | None:
    """Only listed candidates are allowed, and this is not among them.

    Why: ATTNSEL_BACKENDS or Policy.allow lists what may run, in order of preference.
    Fix: add it to ATTNSEL_BACKENDS, or unset that.
    Source: your policy.
    """
    if policy.allow and name not in policy.allow:
        return Violation("policy.allow", ",".join(policy.allow), FreeText(f"a list with {name}"))
    return None


@policy_rule("POLICY003", fires_on=("sdpa.math", {"deny": ("sdpa.math",)}))
def denied(name: str, policy: Policy) -> Violation | None:
    """This candidate is switched off.

    Why: ATTNSEL_DISABLE or Policy.deny names it.
    Fix: take it out of ATTNSEL_DISABLE.
    Source: your policy.
    """
    if name in policy.deny:
        return Violation("policy.deny", ",".join(policy.deny), FreeText(f"a list without {name}"))
    return None


@policy_rule("POLICY004", fires_on=("sdpa.math", {"memory_limit": "1MiB"}))
def over_the_memory_limit(name: str, policy: Policy, parts: tuple[Memory, ...] = ()) -> Violation | None:
    """This call would take more memory than the policy allows

    Why: Policy.memory_limit (ATTNSEL_MEMORY_LIMIT) bounds what a candidate allocates while it runs, beyond
    the call's tensors, results and gradients: scores that are stored, folded masks, copies, repeated heads
    and tiled's tiles. cuDNN's workspace is not known before a plan is built and is not counted, neither for
    cudnn nor for sdpa.cudnn; nor are rows of statistics, which grow with s alone.
    Fix: raise the limit, or use a kernel that stores no scores and a call that needs no adaptation.
    Source: your policy; attnsel/selection/memory.py says how each figure is made.
    """
    need = sum(amount for _, amount in parts)
    if policy.memory_limit is None or need <= policy.memory_limit:
        return None
    made = ", ".join(f"{size(amount)} {what}" for what, amount in parts)
    return Violation("policy.memory_limit", size(policy.memory_limit), AtLeastBytes(need), made)


@policy_rule("RUNTIME001", evidence="runtime", fires_on=("cudnn", {}))
def refused_when_it_ran(name: str, policy: Policy) -> Violation | None:
    """The kernel itself refused this very call earlier in this process.

    Why: a plan did not build or a launch ran out of resources; it is remembered, so that the next call
    goes straight to the candidate that works.
    Fix: read the kernel's own words beside the code; attnsel.clear_cache() forgets what was remembered.
    Source: this process.
    """
    return None  # recorded refusals come from the evidence, see attnsel.selection.evidence


@policy_rule("RUNTIME002", evidence="runtime", fires_on=("triton", {}))
def gave_wrong_numbers(name: str, policy: Policy) -> Violation | None:
    """Its numbers were not those of tiled when this very call was first made

    Why: the first call of an unproven kernel is compared with plain PyTorch operations in float32; what
    rounding explains is allowed, with a margin. The figures stand beside the code.
    Fix: report them; ATTNSEL_SELFCHECK=0 uses the kernel as it is; attnsel.clear_cache() forgets.
    Source: this process; attnsel/runtime/selfcheck.py.
    """
    return None  # as above
