"""Writes the tables of docs/reference/flash-attention-checks.md from FlashAttention's repository:

    python tests/proof/flash_attention_table.py --git CLONE

CLONE is a git folder with the tags below. The words are ours; only line numbers are taken over.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[1:1] = [
        str(Path(__file__).resolve().parents[2]),
        str(Path(__file__).resolve().parents[1] / "support"),
    ]

from cpp_checks import Check, checks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/flash-attention-checks.md"
TWO = {"2.5.9.post1": "v2.5.9.post1", "2.6.3": "v2.6.3", "2.7.4.post1": "v2.7.4.post1", "2.8.3": "v2.8.3"}
THREE = {"3.0.0b1": "v2.8.3", "3.0.0": "0251105a2fb19d2957484b7f023cd8c115286ced"}
API_TWO, API_THREE = "csrc/flash_attn/flash_api.cpp", "hopper/flash_api.cpp"
STABLE = "hopper/flash_api_stable.cpp"

_TYPES = {
    "torch::kInt32": "int32",
    "torch::kFloat32": "float32",
    "at::ScalarType::Float": "float32",
    "q_dtype": "of q's dtype",
    "q_type": "of q's dtype",
    "out_type": "of the output's dtype",
}
_NAMES = {
    "head_size_og": "head_dim",
    "head_size": "head_dim",
    "head_size_v": "head_dim_v",
    "head_size_rounded": "head_dim rounded up",
    "kcache": "k_cache",
    "vcache": "v_cache",
    "params.num_splits": "num_splits",
    "params.rotary_dim": "rotary_dim",
    "page_block_size": "page size",
    "seqlen_ro": "rows of cos and sin",
    "max_headdim": "256",
    "alignment": "8 (16 for FP8)",
    "q_v": "qv",
    "p_dropout": "dropout",
    "batch_size_c": "batch of the cache",
    "batch_size_k": "batch of k",
    "params.arch": "arch",
    "out_partial_type": "out_partial",
    "q_type": "q",
    "qkv_dtype": "q",
    "out_type": "out",
    "num_heads": "heads",
    "num_heads_k": "heads of k",
}
_WORDS = {
    "is_sm90 || is_sm8x": "compute capability 8.x or 9.0",
    "is_sm8x_min": "compute capability 8.0 or above",
    "is_sm8x": "compute capability 8.0 or above",
    "is_sm80 || is_sm90": "compute capability 8.0 or 9.0",
    "dprops->major < 9": "below 9.0",
    "dprops->major == 9": "compute capability 9.x",
    "q_dtype == torch::kBFloat16": "bfloat16",
    "q_dtype == torch::kFloat16 || q_dtype == torch::kBFloat16": "q is float16 or bfloat16",
    "q_type == torch::kFloat16 || q_type == torch::kBFloat16": "q is float16 or bfloat16",
    "return_softmax": "with return_softmax",
    "paged_KV": "paged",
    "!paged_KV": "not paged",
    "!(!paged_KV)": "paged",
    "!paged_KV || page_block_size % 256 == 0": "page size a multiple of 256",
    "is_varlen_q": "cu_seqlens_q",
    "is_varlen_k": "cu_seqlens_k",
    "is_varlen_k_new": "cu_seqlens_k_new",
    "!is_varlen_q": "no cu_seqlens_q",
    "!is_varlen_k": "no cu_seqlens_k",
    "!is_varlen_k_new": "no cu_seqlens_k_new",
    "!(!is_varlen_q)": "cu_seqlens_q",
    "!(!is_varlen_k)": "cu_seqlens_k",
    "!(!is_varlen_k_new)": "cu_seqlens_k_new",
    "head_size_v != head_size": "head_dim_v differs",
    "head_size == round_multiple(head_size_og, 8)": "head_dim is dout's, rounded up to 8",
    "head_size > 192 && (head_size <= 224 || is_dropout)": "head_dim 193 to 224, or above 192 with dropout",
    "head_size > 192 && is_dropout": "head_dim above 192 with dropout",
    "!deterministic || head_size_rounded < 256": "not deterministic where a head_dim is above 192",
    "std::max(head_size, head_size_v) <= max_headdim": "head_dim and head_dim_v at most 256",
    "scheduler_needs_semaphore || use_dynamic_split": "a scheduler with metadata",
    "scheduler_needs_semaphore || use_prepare_varlen": "a scheduler with metadata",
    "out_partial_type == at::ScalarType::Float": "out_partial is float32",
    "q_type == at::ScalarType::Float8_e4m3fn": "FP8",
    "batch_size > 0": "batch above 0",
    "p_dropout < 1.f": "dropout below 1",
    "p_dropout == 0.f": "no dropout",
    "p_dropout == 0.0f": "no dropout",
    "p_dropout > 0.0f": "dropout above 0",
    "softcap > 0.f": "softcap",
    "params.arch == 90": "compute capability 9.0",
    "seqlen_q <= seqlen_k": "queries at most the keys the cache has room for",
    "seqlen_ro >= seqlen_k": "rows of cos and sin at least the keys the cache has room for",
    "lse_partial.stride(-2) == 1": "lse_partial contiguous along the sequence",
    "batch_size == batch_size_k": "batch of k is q's",
    "seqused_k_.is_cuda()": "seqused_k on the GPU",
    "seqused_k_.is_contiguous()": "seqused_k contiguous",
}
_FP8 = "at::ScalarType::Float8_e4m3fn"
_PATTERNS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"(\w+?)_?\.(?:dtype|scalar_type)\(\) == ([\w:]+)", lambda m: f"{_name(m[1])} is {_TYPES[m[2]]}"),
    (r"(\w+?)_?\.stride\(-1\) == 1", lambda m: f"{_name(m[1])}: last dimension contiguous"),
    (r"(\w+?)_?\.has_value\(\)", lambda m: f"{_name(m[1])} given"),
    (r"!(\w+?)_?\.has_value\(\)", lambda m: f"{_name(m[1])} not given"),
    (r"([\w.]+) % ([\w.]+) == 0", lambda m: f"{_name(m[1])} a multiple of {_name(m[2])}"),
    (r"([\w.]+) <= ([\w.]+)", lambda m: f"{_name(m[1])} at most {_name(m[2])}"),
    (r"([\w.]+) >= ([\w.]+)", lambda m: f"{_name(m[1])} at least {_name(m[2])}"),
    (r"([\w.]+) > ([\w.]+)", lambda m: f"{_name(m[1])} above {_name(m[2])}"),
)


def _name(code: str) -> str:
    return _NAMES.get(code, code)


def _say(code: str) -> str:
    """A condition in our words. Raises KeyError for one that nobody has translated."""
    code = code.replace("torch::headeronly::", "at::").replace("at::ScalarType::Int", "torch::kInt32")
    if code in _WORDS:
        return _WORDS[code]
    if _FP8 in code or code.count("ScalarType::") > 1:
        subject = _name(code.split(" ")[0])
        types = [
            kind for kind in ("Half", "BFloat16", "Float8_e4m3fn", "Float") if f"::{kind} " in f"{code} "
        ]
        names = {
            "Half": "float16",
            "BFloat16": "bfloat16",
            "Float8_e4m3fn": "float8_e4m3fn",
            "Float": "float32",
        }
        return f"{subject} is {' or '.join(names[kind] for kind in types)}"
    if code.startswith("(head_size > 128"):
        return "head_dim 129 to 192 with head_dim_v 97 to 128, or head_dim to 64 with head_dim_v to 512"
    if code.startswith("alibi_slopes.sizes()"):
        return "alibi_slopes is [heads] or [batch, heads]"
    for pattern, words in _PATTERNS:
        if found := re.fullmatch(pattern, code):
            return words(found)
    raise KeyError(code)


def _sentence(check: Check) -> str:
    first = _name(check.arguments[0].rstrip("_"))
    if check.macro == "CHECK_DEVICE":
        return f"{first} on the GPU"
    if check.macro == "CHECK_CONTIGUOUS":
        return f"{first} contiguous"
    if check.macro == "CHECK_SHAPE":
        return f"{first} is [{', '.join(map(_dimension, check.arguments[1:]))}]"
    return _say(check.arguments[0])


_DIMENSIONS = {
    "sizes[0]": "q's first",
    "sizes[1]": "q's second",
    "sizes[2]": "q's third",
    "batch_size": "batch",
    "batch_size + 1": "batch + 1",
    "num_heads": "heads",
    "num_heads_k": "heads of k",
    "num_blocks": "pages",
    "num_pages": "pages",
    "page_size": "page size",
    "seqlen_q": "queries",
    "seqlen_k": "keys",
    "seqlen_knew": "new keys",
    "seqlen_k_new": "new keys",
    "max_num_blocks_per_seq": "pages of a sequence",
    "max_num_pages_per_seq": "pages of a sequence",
    "params.rotary_dim / 2": "rotary_dim / 2",
}


def _dimension(code: str) -> str:
    return _DIMENSIONS.get(code, _name(code))


class Row(NamedTuple):
    function: str
    when: str
    words: str
    lines: dict[str, list[int]]


def rows(files: dict[str, str]) -> list[Row]:
    """One for each check of any of the files, in their order; ``files``: text by the column it is about."""
    found: dict[tuple[str, str, str], Row] = {}
    for column, text in files.items():
        for check in checks(text):
            if not check.function:
                continue  # of the device's properties, in flash_api_stable.cpp
            # An if within the same if, on what it was assigned: said once.
            when = ", ".join(dict.fromkeys(_say(condition) for condition in check.when))
            key = (check.function, when, _sentence(check))
            found.setdefault(key, Row(*key, {})).lines.setdefault(column, []).append(check.line)
    return list(found.values())


def _joined(all_rows: Sequence[Row]) -> Iterator[Row]:
    """Rows that say the same of several tensors become one."""
    endings = (" on the GPU", ": last dimension contiguous", " contiguous", " is of q's dtype", " is int32")
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in all_rows:
        ending = next((end for end in endings if row.words.endswith(end)), row.words)
        groups.setdefault((row.function, row.when, ending), []).append(row)
    for (function, when, ending), members in groups.items():
        if len(members) == 1:
            yield members[0]
            continue
        names = [row.words.removesuffix(ending) for row in members]
        lines: dict[str, list[int]] = {}
        for row in members:
            for column, numbers in row.lines.items():
                lines.setdefault(column, []).extend(numbers)
        yield Row(function, when, ", ".join(names) + ending, lines)


def table(files: dict[str, str]) -> str:
    """Markdown: a heading for each function, a row for each check, a column for each file."""
    parts: list[str] = []
    ordered = list(_joined(rows(files)))
    for name in dict.fromkeys(row.function for row in ordered):
        parts += [f"\n### {name}\n", f"| must hold | where | {' | '.join(files)} |"]
        parts.append("|---|---|" + "---|" * len(files))
        for row in ordered:
            if row.function == name:
                numbers = [_numbers(row.lines.get(column, ())) for column in files]
                parts.append(f"| {row.words} | {row.when} | {' | '.join(numbers)} |")
    return "\n".join(parts) + "\n"


class Branch(NamedTuple):
    """A place that picks a kernel, or does nothing: ``line`` is found in ``file`` (a regular expression)."""

    words: str
    file: str
    line: str
    after: str = ""  # the search begins behind this


_FORWARD = "csrc/flash_attn/src/flash_fwd_launch_template.h"
_BACKWARD = "csrc/flash_attn/src/flash_bwd_launch_template.h"
BRANCHES_TWO = (
    Branch("one query without ALiBi: causal is dropped", API_TWO, r"seqlen_q == 1 && !alibi_slopes_"),
    Branch(
        "one query, fewer heads of k, no window, dropout or ALiBi, head_dim a multiple of 8: the heads of a "
        "group become queries",
        API_TWO,
        r"int seqlenq_ngroups_swapped = seqlen_q == 1",
    ),
    Branch("a window as long as the keys is open", API_TWO, r"window_size_left >= seqlen_k\b"),
    Branch("causal is: no bound on the left, 0 on the right", API_TWO, r"params\.is_causal = "),
    Branch(
        "split keys: how many, from batch, heads, queries / 64, keys / 256 (head_dim to 64), 128 (to 128) or "
        "64, and twice the SMs; never with dropout",
        API_TWO,
        r"params\.num_splits = num_splits_heuristic",
    ),
    Branch(
        "more than one split, or forced: the kernel for split keys", API_TWO, r"params\.num_splits <= 1 &&"
    ),
    Branch("varlen: forced where paged", API_TWO, r"run_mha_fwd\(params, stream, paged_KV"),
    Branch("cache: forced with new keys, cache_batch_idx or pages", API_TWO, r"force_split_kernel=\*/k_"),
    Branch("varlen: split only where heads became queries", API_TWO, r"Only apply split-k for decoding"),
    Branch("no keys: no kernel, out is 0 and lse +inf", API_TWO, r"softmax_lse\.fill_\(std"),
    Branch("backward without queries: no kernel, dk and dv are 0", API_TWO, r"dk_expanded\.zero_"),
    Branch(
        "head_dim in steps: 32, 64, 96, 128, (160), 192, (224), 256; a head_dim above takes none",
        "csrc/flash_attn/src/static_switch.h",
        r"define (HEADDIM|FWD_HEADDIM)_SWITCH",
    ),
    Branch("160 is a step", "csrc/flash_attn/src/static_switch.h", r"HEADDIM <= 160"),
    Branch("224 is a step", "csrc/flash_attn/src/static_switch.h", r"HEADDIM <= 224"),
    Branch("forward 96: other tiles on 8.6 to 8.9, by causal", _FORWARD, r"is_sm8x = ", "run_mha_fwd_hdim96"),
    Branch(
        "forward 128: other tiles on 8.6 to 8.9, by causal", _FORWARD, r"is_sm8x = ", "run_mha_fwd_hdim128"
    ),
    Branch(
        "forward 256: 128 by 64 where a block may have 128 KB and an SM has less than 192 KB, else 64 by 64",
        _FORWARD,
        r"max_smem_per_block >= 2 \* Headdim",
        "run_mha_fwd_hdim256",
    ),
    Branch(
        "forward 224: the same for 112 KB and 168 KB",
        _FORWARD,
        r"max_smem_per_block >= 2",
        "run_mha_fwd_hdim224",
    ),
    Branch("split keys: 64 queries by 256, 128 or 64 keys", _FORWARD, r"kBlockN = Headdim <= 64"),
    Branch("splits are combined for up to 128", _FORWARD, r"params\.num_splits <= 128"),
    Branch(
        "grid of the forward: blocks, batch, heads", _FORWARD, r"dim3 grid\(num_m_block, params\.b, params\.h"
    ),
    Branch(
        "grid with splits: blocks, splits, batch x heads", _FORWARD, r"params\.b \* params\.h : params\.h"
    ),
    Branch(
        "softcap with dropout: the kernel would leave dropout out", _FORWARD, r"Is_dropout && !Is_softcap"
    ),
    Branch("grid of the backward: blocks, batch, heads", _BACKWARD, r"dim3 grid_n\(gridDimx"),
    Branch(
        "deterministic: one block for each SM over batch x heads", _BACKWARD, r"gridDimx = \(.*params\.b \*"
    ),
    Branch("backward 32: by 104 KB", _BACKWARD, r"max_smem_per_block >= 2 \*", "run_mha_bwd_hdim32"),
    Branch("backward 64: by 144 KB", _BACKWARD, r"max_smem_per_block >= 144", "run_mha_bwd_hdim64"),
    Branch("backward 96: by 116 KB", _BACKWARD, r"max_smem_per_block >= 116", "run_mha_bwd_hdim96"),
    Branch("backward 128: by 144 KB", _BACKWARD, r"max_smem_per_block >= 144", "run_mha_bwd_hdim128"),
    Branch("backward 160: by 116 KB", _BACKWARD, r"max_smem_per_block >= 116", "run_mha_bwd_hdim160"),
    Branch("backward 192: by 136 KB", _BACKWARD, r"max_smem_per_block >= 136", "run_mha_bwd_hdim192"),
    Branch("backward 224: one kernel, 112 KB and more", _BACKWARD, r"run_flash_bwd<", "run_mha_bwd_hdim224"),
    Branch("backward 256: by 176 KB", _BACKWARD, r"max_smem_per_block >= 176", "run_mha_bwd_hdim256"),
    Branch("backward 256: by 144 KB", _BACKWARD, r"max_smem_per_block >= 144", "run_mha_bwd_hdim256"),
    Branch(
        "backward 256 below 144 KB: with dropout no kernel is launched, and nothing is said",
        _BACKWARD,
        r"if constexpr ?\(!Is_dropout\)",
        "run_mha_bwd_hdim256",
    ),
)
_H = "hopper/"
BRANCHES_THREE = (
    Branch(
        "the GPU's kernels: 8.6 and 8.9; other 8.x; all others those of 9.0",
        f"{_H}static_switch.h",
        r"ARCH == 86",
    ),
    Branch(
        "head_dim to 64: head_dim_v to 64, to 256, to 512, on 9.0",
        API_THREE,
        r"bfloat16_t, 64, 512",
    ),
    Branch("head_dim 129 to 192: head_dim_v to 128, or as head_dim", API_THREE, r"bfloat16_t, 192, 128"),
    Branch(
        "FP8, head_dim to 64: always head_dim_v 64, also where head_dim_v is 65 to 256",
        API_THREE,
        r"float_e4m3_t, 64, 64",
    ),
    Branch(
        "pages by TMA: 9.0, page size a multiple of the tile, many queries",
        API_THREE,
        r"bool get_pagedkv_tma",
    ),
    Branch(
        "heads of a group are packed: always on 8.x, with pages or splits", API_THREE, r"bool get_pack_gqa"
    ),
    Branch(
        "num_splits below 1: as many as a heuristic says, to 128",
        API_THREE,
        r"params\.num_splits = num_splits <= 0",
    ),
    Branch("a window to the first or last position is open", API_THREE, r"window_size_left >= seqlen_k - 1"),
    Branch(
        "one query without a window: causal is dropped, but not paged at head_dim 65 to 128",
        API_THREE,
        r"head_size <= 64 \|\| head_size > 128",
    ),
    Branch("varlen up to 992 sequences: splits by sequence", API_THREE, r"params\.b <= 992"),
    Branch("no keys: no kernel, out is 0 and lse +inf", API_THREE, r"softmax_lse\.fill_\(std"),
    Branch(
        "backward: head_dim as the larger of both, in steps 64, 96, 128, 192, 256",
        API_THREE,
        r"head_size_rounded = round_up_headdim\(std::max",
    ),
    Branch(
        "qv is used on 9.0 with head_dim_v of 256 and more, and otherwise left out",
        f"{_H}flash_fwd_launch_template.h",
        r"HasQv = ",
    ),
    Branch(
        "backward: deterministic is not passed on, so it is never so",
        f"{_H}flash_bwd_launch_template.h",
        r"^ +run_flash_bwd<.*false /\*Deterministic",
    ),
    Branch(
        "backward: deterministic up to head_dim 192",
        f"{_H}flash_bwd_launch_template.h",
        r"Deterministic = Deterministic_ &&",
    ),
    Branch("a failed launch ends the process", f"{_H}cuda_check.h", r"exit\(1\)"),
    Branch(
        "compiled for 9.0 alone (sm_90a); files of 8.x for 8.0",
        f"{_H}setup.py",
        r'^    cc_flag\.append\("arch=compute_90a',
    ),
)


def branches(all_branches: Sequence[Branch], texts: dict[str, Callable[[str], str]]) -> str:
    """Markdown: a row for each branch, a column for each release. Raises ValueError for one in none."""
    parts = [f"| what | file | {' | '.join(texts)} |", "|---|---|" + "---|" * len(texts)]
    for branch in all_branches:
        found = [_line_of(branch, text(branch.file)) for text in texts.values()]
        if not any(found):
            raise ValueError(branch.words)
        name = branch.file.rpartition("/")[2]
        parts.append(f"| {branch.words} | {name} | {' | '.join(str(line or '-') for line in found)} |")
    return "\n".join(parts) + "\n"


def _line_of(branch: Branch, text: str) -> int | None:
    """The first that matches behind ``after``; within that function, where ``after`` is one."""
    start = text.find(f"{branch.after}(") if branch.after else 0
    if start < 0:
        return None
    end = text.find("\n}\n", start) if branch.after else len(text)
    found = re.compile(branch.line, re.MULTILINE).search(text, start, end)
    return text.count("\n", 0, found.start()) + 1 if found else None


def _numbers(lines: Sequence[int]) -> str:
    """12, 14-16; a dash where there is no such check."""
    runs: list[list[int]] = []
    for line in sorted(set(lines)):
        if runs and line == runs[-1][-1] + 1:
            runs[-1].append(line)
        else:
            runs.append([line])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "-"


def replaced(page: str, name: str, text: str) -> str:
    """The page with what stands between the marks of ``name`` written anew."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(start)
    _, _, behind = rest.partition(end)
    if not rest or not behind:
        raise ValueError(f"the page has no marks {start.strip()} and {end}")
    return f"{before}{start}{text}\n{end}{behind}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--git", required=True, metavar="CLONE")
    clone = parser.parse_args().git

    def show(tag: str, path: str) -> str:
        command = ["git", "-C", clone, "show", f"{tag}:{path}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    two = {version: show(tag, API_TWO) for version, tag in TWO.items()}
    three = {version: show(tag, API_THREE) for version, tag in THREE.items()}
    three["3.0.0 stable"] = show(THREE["3.0.0"], STABLE)
    page = PAGE.read_text(encoding="utf-8")
    page = replaced(page, "checks of FlashAttention 2", table(two))
    page = replaced(page, "checks of FlashAttention 3", table(three))
    for name, tags, found in (("2", TWO, BRANCHES_TWO), ("3", THREE, BRANCHES_THREE)):
        texts = {version: partial(show, tag) for version, tag in tags.items()}
        page = replaced(page, f"branches of FlashAttention {name}", branches(found, texts))
    Path(PAGE).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
