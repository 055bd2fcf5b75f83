"""What the user allowed or forbade, what does not fit the machine, and what this process saw refuse."""

from __future__ import annotations

from attnsel.policy import Policy
from attnsel.rules.api import policy_rule
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.record import Memory
from attnsel.verdicts.requirements import AtLeastBytes, FreeText, OneOf, size


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
    the call's tensors, results and gradients: scores that are stored, cuDNN's workspace, folded masks,
    copies, repeated heads and tiled's tiles. Rows of statistics, which grow with s alone, are not counted.
    Fix: raise the limit, or use a kernel that stores no scores and a call that needs no adaptation.
    Source: your policy; MEMORY001 says what each figure rests on.
    """
    need = sum(amount for _, amount in parts)
    if policy.memory_limit is None or need <= policy.memory_limit:
        return None
    return Violation("policy.memory_limit", size(policy.memory_limit), AtLeastBytes(need), _each(parts))


@policy_rule("MEMORY001", evidence="measured", fires_on=("sdpa.math", {}))
def over_the_memory_there_is(
    name: str, policy: Policy, parts: tuple[Memory, ...] = (), there: int | None = None, tensors: int = 0
) -> Violation | None:
    """This call takes more memory than the GPU has

    Why: what a candidate allocates while it runs comes on top of the call's own tensors and their gradients,
    and would fail as "out of memory". Calls whose tensors alone do not fit are not refused here: no other
    kernel would help.
    What each figure rests on. cuDNN's workspace: a formula, compared with plans that libcudnn 9.19 and 9.28
    build for described GPUs (attnsel/backends/cudnn/candidate.py says how well it agrees); attnsel explain
    --ask-library gives the library's own figure. For other releases the same formula is used. Scores and
    tiles: peaks of PyTorch's allocator. Masks, copies, repeated heads: their sizes.
    A deterministic backward on Hopper holds 2 bytes for each score: 256 GiB for 128 heads of 32768 tokens.
    From cuDNN 9.25 with cudnn-frontend 1.27 attnsel asks for the one that grows with the length alone where
    that would be more than 4 GiB.
    Fix: those releases; without determinism; a kernel that stores nothing; or a GPU with more memory.
    Source: attnsel/selection/evaluate.py; NVIDIA/cudnn-frontend#398.
    """
    need = sum(amount for _, amount in parts) + tensors
    if there is None or need <= there:
        return None
    named = _each((*parts, ("tensors", tensors)))
    return Violation("device.memory", size(there), AtLeastBytes(need), named)


def _each(parts: tuple[Memory, ...]) -> str:
    return ", ".join(f"{size(amount)} {what}" for what, amount in parts)


@policy_rule("RUNTIME001", evidence="runtime", fires_on=("cudnn", {}))
def refused_when_it_ran(name: str, policy: Policy) -> Violation | None:
    """The kernel itself refused this very call earlier in this process.

    Why: a plan did not build or a launch ran out of resources; it is remembered, so that the next call
    goes straight to the candidate that works.
    Fix: read the kernel's own words beside the code; attnsel.clear_cache() forgets what was remembered.
    Source: this process.
    """
    return None  # recorded refusals come from the evidence, see attnsel.verdicts.reasons


@policy_rule("RUNTIME002", evidence="runtime", fires_on=("triton", {}))
def gave_wrong_numbers(name: str, policy: Policy) -> Violation | None:
    """Its numbers were not those of tiled when this very call was first made

    Why: the first call of an unproven kernel is compared with plain PyTorch operations in float32; what
    rounding explains is allowed, with a margin. The figures stand beside the code.
    Fix: report them; ATTNSEL_SELFCHECK=0 uses the kernel as it is; attnsel.clear_cache() forgets.
    Source: this process; attnsel/runtime/selfcheck.py.
    """
    return None  # as above
