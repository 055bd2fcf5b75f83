"""Ask which attention kernel would run on a machine that is not here.

    python examples/explain_from_python.py

Needs no GPU and no torch. The question is the one that sent people here first: head dimensions 192 for q and
k and 128 for v (multi-head latent attention), in bf16, for training, on an H100 with cuDNN 9.1.0.

1. Describe the machine. What is not stated is taken from the PyTorch release that goes with what was, and
   marked as assumed.
2. Ask. The answer ranks the candidates and holds every reason against the others, as values.
3. Read the reasons: code, field, what it is, what it would need to be, how we know.
4. Look at the ways out. Each was put to the engine again before it was listed.
5. Try one: change the machine, or the call, and ask again.
6. Compare machines. Asking takes tens of microseconds, so sweeps are free.
"""

from __future__ import annotations

import argparse
import signal

try:
    from attnsel import AttentionParams, Environment, Policy, select
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()


def heading(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 74 - len(text)))


# ---- 1. the machine and the call --------------------------------------------------------------------

machine = Environment.describe(gpu="H100", cudnn="9.1.0")
call = AttentionParams(
    dtype="bf16",
    qkv_layout="bshd",
    batch_size=2,
    num_heads=16,
    max_seqlen_q=4096,
    head_dim_qk=192,
    head_dim_v=128,
    attn_mask_type="causal",
    is_training=True,
)

heading("the machine")
print(f"{machine.device.name}, cuDNN {machine.cudnn}")
print(f"assumed with it: torch {machine.torch}, CUDA {machine.cuda}")

# ---- 2. the answer ----------------------------------------------------------------------------------

answer = select(call, machine)

heading("the whole answer, as ATTNSEL_DEBUG=2 prints it")
print(answer.report())

# ---- 3. the reasons, as values ----------------------------------------------------------------------

heading("why not cuDNN")
cudnn = answer["cudnn"]
print(f"answer['cudnn'].verdict is {cudnn.verdict!r}")
for reason in cudnn.reasons:
    print(f"{reason.code}: {reason.field} is {reason.observed}, needs {reason.required}  [{reason.evidence}]")

# ---- 4. the ways out --------------------------------------------------------------------------------

heading("ways out")
for unlock in answer.unlocks:
    print(f"{unlock.candidate}: {unlock.change}  [{unlock.effect}]  would rank {unlock.rank}")
    print(f"    {unlock.paste}")

# ---- 5. try them ------------------------------------------------------------------------------------

heading("with the cuDNN that unlocks it")
upgrade = next(u for u in answer.unlocks if u.candidate == "cudnn" and u.effect == "install")
newer = select(call, machine.replace(**dict(upgrade.changes)))
print(f"{upgrade.change}: {answer.backend} → {newer.backend}")

heading("without the changes that attnsel makes for a kernel")
for adaptation in answer[answer.backend].adaptations if answer.backend else ():
    print(f"{answer.backend} {adaptation.text}: {adaptation.bytes >> 20} MiB on every call")
plain = select(call, machine, policy=Policy(adapt="never"))
print(f"adapt='never': {answer.backend} → {plain.backend}")

heading("only flash-type kernels allowed")
strict = select(call, machine, policy=Policy(allow=("sdpa.flash", "triton")))
print(f"backend: {strict.backend}")
for candidate in strict.ranked:
    print(f"  {candidate.name}" + (f"  ({candidate.plan_only})" if candidate.plan_only else ""))

# ---- 6. other machines ------------------------------------------------------------------------------

heading("the same call elsewhere")
print(f"{'machine':<24}{'training':<18}{'inference':<18}why not cuDNN (training)")
for gpu, versions in (
    ("A100", {"cudnn": "8.9.7"}),
    ("A100", {}),
    ("H100", {"cudnn": "9.1.0"}),
    ("H100", {}),
    ("B200", {}),
    ("RTX 4090", {}),
):
    where = Environment.describe(gpu=gpu, **versions)
    training, inference = select(call, where), select(call.replace(is_training=False), where)
    codes = ", ".join(reason.code for reason in training["cudnn"].reasons) or "it runs"
    name = f"{gpu}, cuDNN {where.cudnn}"
    print(f"{name:<24}{training.backend or '–':<18}{inference.backend or '–':<18}{codes}")

print("\nWhat a code means: attnsel rule CUDNN204")
