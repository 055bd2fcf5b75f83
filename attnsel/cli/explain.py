"""``attnsel explain``: which candidate runs, and every reason why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from attnsel.cli.flags import THE_CALL, THE_MACHINE, CudnnLib
from attnsel.cli.form import OUTPUT, TEXT_AND_PAGE, PageForm, yes_or_no
from attnsel.cli.output import FOUND, NO_BACKEND, complain
from attnsel.cli.question import As, Question, SwitchFlag, asked_of, asks
from attnsel.errors import InvalidInput
from attnsel.report.document import Document
from attnsel.report.short import report_document, short_document
from attnsel.rules import REGISTRY

if TYPE_CHECKING:
    from attnsel.context_parallel.plan import Plan
    from attnsel.decision import Selection
    from attnsel.params import AttentionParams


_OF_MEASURING = ("short", "sources", "measure", "budget", "out")
"""What says something with --measure."""


_OF_A_MODEL = ("model", "tp-size", "image-size", "as", "switch")
"""What says something with --model, of the flags that are this command's own."""


Model = Annotated[
    str | None,
    Parameter(
        name="--model",
        group=THE_CALL,
        help="a whole model: its config.json, the folder with it, or a preset (llama-3-8b, gemma-3-4b, "
        "deepseek-v3, gpt-oss-120b, qwen3-next-80b-a3b and more)",
    ),
]

FromLog = Annotated[
    Path | None,
    Parameter(
        name="--from-log",
        group=THE_CALL,
        allow_leading_hyphen=True,
        help="a log or an error to explain; - reads standard input; flags state what it does not, and win "
        "over it",
    ),
]


@asks
def explain(
    question: Question,
    *,
    from_log: FromLog = None,
    model: Model = None,
    tp_size: Annotated[
        int | None, Parameter(group=THE_CALL, help="with --model: ranks that share its heads")
    ] = None,
    image_size: Annotated[
        int | None, Parameter(group=THE_CALL, help="with --model of a picture: pixels on each side of it")
    ] = None,
    ask_library: Annotated[bool, yes_or_no("ask the real libcudnn too", group=OUTPUT)] = False,
    sources: Annotated[bool, yes_or_no("below each reason where it is written", group=OUTPUT)] = False,
    cudnn_lib: CudnnLib = None,
    as_: As = None,
    switch: SwitchFlag = None,
    gpus_per_node: Annotated[
        int | None, Parameter(group=THE_MACHINE, help="with --cp-size: GPUs that share the fast links")
    ] = None,
    link_gbs: Annotated[
        float | None,
        Parameter(group=THE_MACHINE, help="with --cp-size: GB/s per GPU and direction within a node"),
    ] = None,
    network_gbs: Annotated[
        float | None,
        Parameter(group=THE_MACHINE, help="with --cp-size: GB/s per GPU and direction between nodes"),
    ] = None,
    measure: Annotated[
        bool, yes_or_no("time every candidate that runs the call on this machine", group=OUTPUT)
    ] = False,
    budget: Annotated[
        float | None, Parameter(group=OUTPUT, help="with --measure: seconds in all; 30 if left out")
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            help="with --measure: rows are appended to it; ~/.cache/attnsel/figures.csv if left out",
        ),
    ] = None,
    short: Annotated[bool, yes_or_no("one screen; of a log the verdicts", group=OUTPUT)] = False,
    form: PageForm = TEXT_AND_PAGE,
) -> int:
    """Which attention kernel runs this call, why each of the others cannot, and how to get it.

    Without --gpu and --env it answers for this machine. ATTNSEL_BACKENDS and the other variables of a
    policy hold here too.

    --ask-library adds what the real libcudnn says of the same call on the same GPU, which need not be here:
    for each of its graphs whether it is supported, the engines, the workspace; and whether the rules for
    that version agree. It takes libcudnn 9.8 or newer, NVRTC and cudnn-frontend, downloads nothing, and
    remembers answers in ~/.cache/attnsel. For older cuDNN only the frontend's own checks can be heard.

    --cp-size spreads one sequence over ranks and adds a plan: what each rank runs and sends, which
    --cp-comm-type is open and why the others are not, and an estimate that ranks them.

    --as torch, te or transformers tells first what that library would choose by itself: its kernels in its
    order, every reason against each (it gives the first, or none), the --switch NAME=VALUE that hold, and
    in one sentence how attnsel's choice differs.

    --json prints one object: backend (the choice, or null), params, environment (with warnings), unread (what
    is newer than anything that was read, and what it is answered as), policy, candidates (best first: name,
    verdict, eligible, executable, plan_only, unproven, executed_off_gpu, placed_by, adaptations, reasons),
    hints (remarks on the question: code, title, message, instead, first, source) and unlocks (smallest sets
    of changes that make a refused candidate eligible, as text, as lines to paste and as fields with their new
    values); with --as also dispatched (dispatcher, release, call, offers, chosen, difference), with
    --ask-library also library (judge, cudnn, cudnn_frontend, supported, rules, agree, answers, notes; or
    missing and message), with --cp-size also context_parallel (planned_for, exchanges, estimated_on).

    --from-log FILE explains what a log or a pasted error of TransformerEngine, PyTorch, flash-attn, vLLM or
    others says of attention instead (docs/how-to/logs.md): for each call in it what happened, why, and what
    helps. --json then has calls and machine.

    --model NAME|FILE|FOLDER answers for every kind of attention in a model, in training, prefill and decode
    (docs/how-to/models.md), at --batch and --seqlen. --json then has calls, other, kv_cache_bytes and fixes.

    --measure runs the call here, on random tensors, with every candidate that can: each is compared with the
    reference, then all are timed in turn, forward and in training backward, and the times are appended to
    --out, which ATTNSEL_FIGURES=FILE or --figures FILE makes the choice follow (docs/how-to/measure.md).
    --json then has measured (candidates, rows, published, file). Ctrl-C keeps what was measured.

    Exit code: 0 a backend was found, 2 bad input, 3 no backend, or a log with nothing known in it, 130
    interrupted.
    """
    form.require_one(short=short)
    own = {
        "ask-library": ask_library or cudnn_lib,
        "sources": sources,
        "gpus-per-node": gpus_per_node,
        "link-gbs": link_gbs,
        "network-gbs": network_gbs,
        "short": short,
        "as": as_,
        "switch": switch,
        "model": model,
        "tp-size": tp_size,
        "image-size": image_size,
        "measure": measure,
        "budget": budget,
        "out": out,
    }
    if from_log is not None:
        _say_nothing(own | {"short": None}, "with --from-log")
        from attnsel.cli.explain_more import explain_log  # whose patterns take longest of all to load

        return explain_log(from_log, question, short, form)
    if model is not None:
        _say_nothing({name: value for name, value in own.items() if name not in _OF_A_MODEL}, "with --model")
        from attnsel.cli.many import explain_model  # for --model alone

        ranks = 1 if tp_size is None else tp_size
        return explain_model(model, question, ranks, image_size, asked_of(as_, switch), form)
    _say_nothing({"tp-size": tp_size, "image-size": image_size}, "without --model")
    if measure:
        _say_nothing(
            {name: value for name, value in own.items() if name not in _OF_MEASURING}, "with --measure"
        )
        from attnsel.cli.explain_measure import explain_measured  # with torch: for this flag alone

        return explain_measured(question, 30.0 if budget is None else budget, out, short, sources, form)
    _say_nothing({"budget": budget, "out": out}, "without --measure")
    for name in ("sources",) if sources and (short or form.json) else ():
        raise InvalidInput(f"--{name}", None, f"says nothing with --{'short' if short else 'json'}")
    asked = asked_of(as_, switch)
    params, env = question.put(question.ask(), question.where())
    selection = asked.select(params, env, question.policy)
    for flag, why in idle(params, question.flags):
        complain(f"{flag} changes nothing {why}")
    library = None
    if ask_library or cudnn_lib is not None:
        from attnsel.cli.explain_more import ask  # for this flag alone

        library = ask(selection.params, selection.environment, cudnn_lib)
    shared = _plan(selection, gpus_per_node, link_gbs, network_gbs)
    more = (*(() if shared is None else shared.blocks()), *(() if library is None else (library.told(),)))

    def document() -> Document:
        answer = short_document(selection) if short else report_document(selection, sources)
        return Document((*answer.blocks, *more))

    def page() -> Any:
        from attnsel.pages.pictures import drawn  # for --html alone
        from attnsel.report.html import Page

        pictures = drawn(selection, lambda p, env: asked.select(p, env, question.policy))
        return Page("call", {"selection": selection, "drawn": pictures, "more": more})

    def record() -> dict[str, Any]:
        told = {"library": library, "context_parallel": shared}
        return selection.as_dict() | {name: part.as_dict() for name, part in told.items() if part is not None}

    form.print(document, record, page=page)
    return NO_BACKEND if selection.backend is None else FOUND


def _say_nothing(flags: Mapping[str, Any], where: str) -> None:
    """Raises InvalidInput for the first of these that is given."""
    for name, value in flags.items():
        if value is not None and value is not False:
            raise InvalidInput(f"--{name}", None, f"says nothing {where}")


def idle(p: AttentionParams, stated: Set[str]) -> Iterator[tuple[str, str]]:
    """The flags among those ``stated`` that say nothing of this call, and why."""
    if "cp_comm_type" in stated and not p.context_parallel:
        yield "--cp-comm-type", "without a --cp-size above 1"
    if "bottom_right_diagonal" in stated:
        if p.causal:
            yield "--bottom-right-diagonal", f"beside --attn-mask-type {p.attn_mask_type}, which decides it"
        elif not p.windowed and p.core_attention_bias_type != "alibi":
            yield "--bottom-right-diagonal", "without a window or ALiBi"
    if "attention_dropout" in stated and p.attention_dropout and not p.is_training:
        yield "--attention-dropout", "with --inference"
    if "preview" in stated and all(page.status != "preview" for page in REGISTRY.pages.values()):
        yield "--preview", "in this release: none of its rules is tried out"


def _plan(
    selection: Selection, gpus_per_node: int | None, link_gbs: float | None, network_gbs: float | None
) -> Plan | None:
    """The plan of a question about several ranks. Raises InvalidInput for figures that nothing would read."""
    if not selection.params.context_parallel:
        for flag, value in (
            ("--gpus-per-node", gpus_per_node),
            ("--link-gbs", link_gbs),
            ("--network-gbs", network_gbs),
        ):
            if value is not None:
                raise InvalidInput(flag, value, "says nothing without a --cp-size above 1")
        return None
    from attnsel.context_parallel.plan import plan  # for --cp-size alone

    return plan(
        selection.params,
        selection.environment,
        selection.policy,
        gpus_per_node=gpus_per_node,
        link=link_gbs,
        network=network_gbs,
    )
