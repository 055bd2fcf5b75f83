"""Which releases have a name that programs import of attention's packages: ``environment/data/names.csv``.

    python tests/proof/api_names.py --wheels FOLDER --mirrors FOLDER > attnsel/environment/data/names.csv

``--wheels``: of transformers, diffusers, sageattention, torch and vllm, the last wheel of each minor release
(pip download --no-deps; their .py files are enough). ``--mirrors``: git directories OWNER+NAME/repo of
flash-attention, xformers, flashinfer, SageAttention and TransformerEngine, with their tags. A name is a row
where some of the releases that are read have it and others, before or after, do not; one that went and came
again is none, nor one that came and went with its module.
Names are read from the sources: what a module defines and what it imports by name, arguments of functions as
``function(argument)``, functions of a class that others write code against with the class as their module.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import subprocess
import sys
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ABOUT = re.compile(
    r"flash|sdpa|flex_att|xformers|sage_?att|[Aa]tt(?:entio)?n|ATTENTION|ATTN|causal_mask|expand_mask|4d_"
    r"|create_masks|repeat_kv|[Rr]otary|pad_input|unpad|index_first_axis|[a-z]Cache$|top_left"
)
OF_HELPERS = re.compile(r"rope|ROPE|prun\w+|Kwargs")  # of modules that no model has
PUBLIC = re.compile(r"^(?!__)(?:[A-Za-z]|_flash|_attention|_sage|_wrapped)")
KERNELS = re.compile(r"^(?!_).*(?:Wrapper|[Aa]ttention|[Pp]refill|[Dd]ecode|merge_state|page|kv_?cache|rope)")
MEMBERS = {"PreTrainedModel"}
OF_MEMBERS = re.compile(
    r"(?:[gs]et_\w*attn_implementation|_autoset_attn\w+|_check_and_enable\w+|\w+can_dispatch)"
)
CACHES = "transformers.cache_utils"
FUNCTIONS = ("flash_attn", "_flash_attn", "sage")  # whose arguments are rows
COPIES = {"vllm", "transformer-engine"}  # which have functions of these names of their own
PACKAGES = {"transformers", "diffusers", "flash_attn", "xformers", "flashinfer", "sageattention"}
MODELS = (
    "llama mistral qwen2 qwen2_vl qwen2_5_vl qwen3 gemma gemma2 phi phi3 mixtral falcon opt gpt2 gpt_neox"
)
MODELS += " bert bart whisper clip siglip cohere starcoder2 stablelm olmo deepseek_v3 gpt_bigcode persimmon"
MODELS += " idefics2 chameleon"
TRANSFORMERS = re.compile(
    r"transformers/(?:modeling_flash_attention_utils|modeling_attn_mask_utils|masking_utils|cache_utils"
    r"|modeling_utils|modeling_rope_utils|pytorch_utils|processing_utils|__init__"
    r"|utils/(?:import_utils|generic|__init__)"
    r"|integrations/(?:sdpa_attention|flash_attention|flex_attention|flash_paged|sdpa_paged|eager_paged|npu_flash_attention|hub_kernels|__init__)"
    rf"|models/(?:{MODELS.replace(' ', '|')})/modeling_\w+)\.py"
)
DIFFUSERS = re.compile(
    r"diffusers/(?:models/(?:attention|attention_processor|cross_attention|attention_dispatch|attention_flax"
    r"|embeddings|transformers/transformer_(?:flux|wan|qwenimage|hunyuan_video|ltx|sd3))|utils/import_utils"
    r"|utils/__init__|__init__)\.py"
)
FLASH_ATTN = re.compile(
    r"flash_attn/(?!cute/|models/|utils/benchmark)[\w/]+\.py"
)  # 3 and 4 have other releases
XFORMERS = re.compile(r"xformers/(?:ops/(?:__init__|fmha/\w+|\w+)|components/attention/\w+|__init__)\.py")
FLASHINFER = re.compile(
    r"(?:python/)?flashinfer/(?:__init__|decode|prefill|cascade|page|rope|sparse|mla|utils|attention|pod)\.py"
)
SAGEATTENTION = re.compile(r"sageattention/(?:__init__|core)\.py")
TORCH = re.compile(
    r"torch/(?:nn/attention/\w+|backends/cuda/__init__|distributed/tensor/experimental/(?:__init__|_attention)"
    r"|distributed/(?:device_mesh|(?:_tensor|tensor|tensor/parallel|_composable/fsdp)/__init__))\.py"
)
SDPA = re.compile(
    rf"(?!_)(?:{ABOUT.pattern}|SDPBackend|sdp_\w+|SDPAParams|can_use_\w+|\w+_(?:sdp|mask)|causal_\w+|CausalBias"
    r"|context_parallel\w*|\w*[Mm]esh|fully_shard|(?:Sequence|Context)Parallel\w*"
    r"|BlockMask|\w*[Aa]ux\w*|FlexKernelOptions|and_masks|or_masks|noop_mask)"
)
VLLM = re.compile(
    r"vllm/(?:attention/.+|v1/attention/.+|platforms/(?:__init__|interface)|vllm_flash_attn/\w+"
    r"|model_executor/models/vision)\.py"
)
BACKENDS = re.compile(rf"{ABOUT.pattern}|Backend|Metadata|SLOT_ID|MLA|merge_state|(?:paged|Paged)\w+")
TRANSFORMER_ENGINE = re.compile(
    r"transformer_engine/pytorch/(?:__init__|attention(?:/\w+)*|softmax|constants)\.py"
)
INSTEAD = {
    r"flash_attn_(?:varlen_)?func|flash_attn_with_kvcache": "that of flash_attn itself",
    r"index_first_axis|(?:un)?pad_input": "that of flash_attn.bert_padding",
    r"is_flash_attn_available": "is_flash_attn_2_available of transformers.utils",
    r"is_flash_attn_greater_or_equal_2_10": 'is_flash_attn_greater_or_equal("2.1.0")',
    r"\w+FlashAttention2|\w+SdpaAttention\w*|\w+_ATTENTION_CLASSES": (
        "the model's one attention class and attn_implementation"
    ),
    r"_prepare_4d_attention_mask(?:_for_sdpa)?|_expand_mask": (
        "create_bidirectional_mask of transformers.masking_utils"
    ),
    r"_prepare_4d_\w+|AttentionMaskConverter|_(?:make_causal|prepare_decoder_attention)_mask": (
        "create_causal_mask of transformers.masking_utils"
    ),
    r"(?:SlidingWindow|Hybrid|HybridChunked|OffloadedHybrid)Cache": "StaticCache or DynamicCache",
    r"_autoset_attn_implementation|_check_and_enable_\w+": "attn_implementation",
    r"sageattn\(attn_mask\)": "F.sdpa for what has a mask",
    r"sageattn\(scale\)": "its argument sm_scale",
    r"flash_attn_unpadded_(?P<rest>\w+)": "flash_attn_varlen_…, with the same arguments",
    r"CrossAttention": "Attention of diffusers.models.attention_processor",
}
COMMITS = {"thu-ml+SageAttention": {(2, 0, 0): "d847a8f", (2, 1, 0): "dcc405e", (2, 1, 1): "4b0824d"}}
READ = "2026-11-29"
HEAD = """\
# In which releases of a package a module has a name: from `since` on, before `until`; no name: whether the
# module is there. Made by tests/proof/api_names.py, which reads the sources of every release in `source`. An
# argument stands in brackets behind its function; a class is the module of its functions. instead: its heir.
package,module,name,since,until,instead,source,read"""
_TAG = re.compile(r"v\d+(?:\.(?:0|[1-9]\d*)){1,2}(?:\.post\d+)?")
Release = tuple[int, ...]
Names = dict[tuple[str, str], set[Release]]


def names(source: str, own: str = "") -> Iterator[str]:
    """What a module of the package ``own`` has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    for node in _outside(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] in {own, *PACKAGES}
        ):
            yield from (one.asname or one.name for one in node.names)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.FunctionDef):
            args = node.args
            yield from (f"{node.name}({a.arg})" for a in (*args.posonlyargs, *args.args, *args.kwonlyargs))
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for one in targets if isinstance(one, ast.Name))
        if isinstance(node, ast.ClassDef) and node.name in MEMBERS:
            yield from (f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef))


def _outside(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module outside of functions and classes, those under if and try too."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            yield from _outside(node)


def _placed(path: str, name: str) -> tuple[str, str]:
    """A name with its module, or its class."""
    module = path.removeprefix("python/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    cls, _, member = name.rpartition(".")
    return (f"{module}.{cls}" if cls else module), member


def from_wheels(folder: Path, package: str, files: re.Pattern[str]) -> tuple[Names, list[Release]]:
    found: Names = defaultdict(set)
    releases = []
    for wheel in folder.glob(f"{package}-*.whl"):
        release = tuple(map(int, wheel.name.split("-")[1].split(".")))
        release = release if package == "sageattention" else release[:2]
        releases.append(release)
        with zipfile.ZipFile(wheel) as archive:
            for path in filter(files.fullmatch, archive.namelist()):
                for name in {"", *names(archive.read(path).decode(), package)}:
                    found[_placed(path, name)].add(release)
    return found, sorted(releases)


def from_tags(git_dir: Path, files: re.Pattern[str]) -> tuple[Names, list[Release]]:
    def git(*args: str) -> str:
        command = ["git", f"--git-dir={git_dir}", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    found: Names = defaultdict(set)
    known: dict[str, set[str]] = {}  # by blob
    releases = dict(COMMITS.get(git_dir.parent.name, {}))
    for tag in filter(_TAG.fullmatch, git("tag").split()):
        releases[tuple(map(int, tag[1:].partition(".post")[0].split(".")))] = tag  # of posts the last
    for release, tag in releases.items():
        for line in git("ls-tree", "-r", tag).splitlines():
            blob, path = line.split()[2], line.split("\t")[1]
            if files.fullmatch(path):
                if blob not in known:
                    with suppress(SyntaxError):
                        known[blob] = {"", *names(git("cat-file", "blob", blob))}
                for name in known.get(blob, {""}):
                    found[_placed(path, name)].add(release)
    return found, sorted(releases)


def both(one: tuple[Names, list[Release]], other: tuple[Names, list[Release]]) -> tuple[Names, list[Release]]:
    found = {key: one[0].get(key, set()) | other[0].get(key, set()) for key in {*one[0], *other[0]}}
    return found, sorted({*one[1], *other[1]})


def rows(package: str, found: Names, releases: list[Release], about: re.Pattern[str]) -> Iterator[list[str]]:
    texts = [".".join(map(str, one)) for one in releases]
    newest: dict[str, list[str]] = defaultdict(list)  # modules that have a name today
    for (module, name), there in found.items():
        if max(there) == releases[-1]:
            newest[name].append(module)
    for (module, name), there in sorted(found.items()):
        first, last = releases.index(min(there)), releases.index(max(there))
        wanted = OF_MEMBERS if module.endswith("PreTrainedModel") else about
        whole = found.get((module, name.partition("(")[0] if "(" in name else ""), set(releases))
        with_it = bool(name) and (min(whole), max(whole)) == (min(there), max(there))
        always = len(there) == len(releases)
        asked = not name or wanted.search(name) or (".models." not in module and OF_HELPERS.search(name))
        if always or with_it or last - first + 1 != len(there) or not asked:
            continue
        if "(" in name and (not name.startswith(FUNCTIONS) or package in COPIES):
            continue
        if (
            module == "transformers"
            and last + 1 < len(texts)
            and max(found.get((CACHES, name), [()])) != max(there)
        ):
            continue  # the classes of models are in no module that is read here
        since, until = texts[first] if first else "", texts[last + 1] if last + 1 < len(texts) else ""
        instead = next((to for pattern, to in INSTEAD.items() if until and re.fullmatch(pattern, name)), "")
        moved = min(newest.get(name, ()), key=lambda one: (".models." in one, len(one), one), default="")
        if until and moved and name and not instead and "(" not in name:
            instead = f"{name} of {moved}"
        yield [package, module, name, since, until, instead, f"{package} {texts[0]} to {texts[-1]}", READ]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--wheels", type=Path, required=True)
    arguments.add_argument("--mirrors", type=Path, required=True)
    given = arguments.parse_args()
    wheels, mirrors = given.wheels, given.mirrors
    sage = from_tags(mirrors / "thu-ml+SageAttention/repo", SAGEATTENTION)
    table = [  # of a name without its module the last row counts
        ("torch", from_wheels(wheels, "torch", TORCH), SDPA),
        ("vllm", from_wheels(wheels, "vllm", VLLM), BACKENDS),
        (
            "transformer-engine",
            from_tags(mirrors / "NVIDIA+TransformerEngine/repo", TRANSFORMER_ENGINE),
            PUBLIC,
        ),
        ("transformers", from_wheels(wheels, "transformers", TRANSFORMERS), ABOUT),
        ("diffusers", from_wheels(wheels, "diffusers", DIFFUSERS), ABOUT),
        ("sageattention", both(from_wheels(wheels, "sageattention", SAGEATTENTION), sage), PUBLIC),
        ("flash-attn", from_tags(mirrors / "Dao-AILab+flash-attention/repo", FLASH_ATTN), PUBLIC),
        ("xformers", from_tags(mirrors / "facebookresearch+xformers/repo", XFORMERS), PUBLIC),
        ("flashinfer-python", from_tags(mirrors / "flashinfer-ai+flashinfer/repo", FLASHINFER), KERNELS),
    ]
    print(HEAD)
    write = csv.writer(sys.stdout, lineterminator="\n")
    for package, (found, releases), about in table:
        write.writerows(rows(package, found, releases, about))


if __name__ == "__main__":
    main()
