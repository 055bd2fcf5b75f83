"""The texts that source code can print: Python read with ``ast``, C++ and CUDA by their macros.

A text has holes, ``⟨head_dim⟩``, where a value is put in; what stands in one is what the source writes there.
``python_texts`` finds raise, assert, warnings, loggers' calls, print, and reasons that a function collects or
returns; ``cpp_texts`` finds TORCH_CHECK and its like, NVTE_CHECK, cudnn-frontend's, exceptions and streams.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

HOLE = "⟨{}⟩"
_LONGEST_HOLE = 30


class Printed(NamedTuple):
    """One text. ``how``: what prints it ("raise ValueError", "TORCH_CHECK"). ``function``: with its class."""

    file: str
    function: str
    how: str
    text: str


def hole(source: str) -> str:
    """A hole, named after the last word of an expression's source."""
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[[^\]]*\]|\"[^\"]*\"|'[^']*'", "", source))
    plain = [
        word for word in words if word not in ("str", "self", "format", "join", "size", "to_string", "std")
    ]
    return HOLE.format((plain or words or ["value"])[-1][:_LONGEST_HOLE])


# ---- Python --------------------------------------------------------------------------------------------

_LOGS = re.compile(
    r"(?:warn|warning|info|debug|error|exception|critical|log)(?:_once|_rank_?0?|_advice)?|"
    r"(?:rank_zero_|_?warn_once|_?log_once|_?print_once|print_\w*|info_on\w*|warning_on\w*)\w*|raise_\w+"
)
_LOGGERS = re.compile(r"(?i)log|warn|\b_?L\b|self\.fa_logger|attention_log|rank_?0")
_COLLECTS = re.compile(r"(?i)reason|error|message|msg|problem|invalid|unsupported|why|issues")
_REFUSES = ("fail", "skip", "_fail", "reject", "_reject", "refuse", "unimplemented", "unimplemented_v2")
_RETURNS = re.compile(
    r"(?i)reason|\bcan_|_can_|valid|support|check|why|error|message|usable|available|mismatch|describe"
)


def python_texts(file: str, source: str, functions: str = "") -> Iterator[Printed]:
    """The texts of a module; ``functions``: a pattern of the functions that are read, all without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    module = _Module(tree)
    wanted = re.compile(functions) if functions else None
    for name, node in module.functions():
        if wanted is None or wanted.search(name):
            for how, text in _of_function(module, name, node):
                if re.search(r"[A-Za-z]{3}.*\s|\s.*[A-Za-z]{3}", re.sub("⟨[^⟩]*⟩", " ", text), re.DOTALL):
                    yield Printed(file, name, how, text)


class _Module:
    """A module's functions by name, and what its names are assigned."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.returns: dict[str, list[ast.expr]] = {}
        self.constants = _assigned(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
                self.returns[node.name] = given

    def functions(self) -> list[tuple[str, ast.AST]]:
        found: list[tuple[str, ast.AST]] = [("module", self.tree)]

        def visit(node: ast.AST, prefix: str) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    name = f"{prefix}{child.name}"
                    found.append((name, child))
                    visit(child, f"{name}.")
                else:
                    visit(child, prefix)

        visit(self.tree, "")
        return found


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _own(child)


def _assigned(nodes: list[ast.stmt] | Iterator[ast.AST]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        target = getattr(node, "target", None)
        if isinstance(node, ast.Assign):
            for one in node.targets:
                if isinstance(one, ast.Name):
                    found.setdefault(one.id, []).append(node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value and isinstance(target, ast.Name):
            found.setdefault(target.id, []).append(node.value)
    return found


def _of_function(module: _Module, name: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    local = {**module.constants, **_assigned(_own(node))}

    def texts(value: ast.expr) -> list[str]:
        return _texts(value, local, module, 0)

    for one in _own(node):
        if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call):
            kind = ast.unparse(one.exc.func).rpartition(".")[2]
            for value in [*one.exc.args, *(key.value for key in one.exc.keywords)]:
                for text in texts(value):
                    yield f"raise {kind}", text
        elif isinstance(one, ast.Assert) and one.msg is not None:
            for text in texts(one.msg):
                yield "raise AssertionError", text
        elif isinstance(one, ast.Call):
            yield from _of_call(one, texts)
        elif isinstance(one, ast.Return) and one.value is not None and _RETURNS.search(name):
            values = one.value.elts if isinstance(one.value, (ast.Tuple, ast.List)) else [one.value]
            for value in values:
                if isinstance(value, (ast.JoinedStr, ast.Constant, ast.BinOp)):
                    for text in texts(value):
                        if len(text.split()) > 2:
                            yield "reason", text


def _of_call(call: ast.Call, texts: Callable[[ast.expr], list[str]]) -> Iterator[tuple[str, str]]:
    if not call.args:
        return
    whole = ast.unparse(call.func)
    owner, _, name = whole.rpartition(".")
    how, values = "", call.args[:1]
    if name == "print":
        how, values = "print", call.args
    elif name == "warn" or name.startswith("warn_") or name == "_warn_once":
        how = "warn"
    elif _LOGS.fullmatch(name) and (_LOGGERS.search(owner) or not owner):
        how = "log"
        if name == "log" and len(call.args) > 1:
            values = call.args[1:2]
    elif name in ("_check", "_check_value", "_check_not_implemented", "_check_type") and len(call.args) > 1:
        how, values = "raise RuntimeError", call.args[1:2]
    elif name in _REFUSES or (name in ("append", "add", "extend") and _COLLECTS.search(owner)):
        how = "reason"
    if how:
        given = values[0].body if isinstance(values[0], ast.Lambda) else values[0]
        parts = [texts(given)] if len(values) == 1 else [texts(value) for value in values]
        for text in parts[0] if len(parts) == 1 else [" ".join(part[0] for part in parts if part)]:
            logged = re.sub(r"%[\d.]*[sdrfxi]", HOLE.format("value"), text) if len(call.args) > 1 else text
            yield how, logged if how == "log" else text


def _texts(value: ast.expr, local: dict[str, list[ast.expr]], module: _Module, depth: int) -> list[str]:
    """What an expression can print, each way once: its names looked up, its calls of the module's own."""
    if depth > 4:
        return [hole(ast.unparse(value))]

    def of(one: ast.expr) -> list[str]:
        return _texts(one, local, module, depth + 1)

    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else [str(value.value)]
    if isinstance(value, ast.JoinedStr):
        made = ""
        for part in value.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            known = local.get(inner.id, []) if isinstance(inner, ast.Name) else [inner]
            fixed = known[0] if len(known) == 1 and isinstance(known[0], ast.Constant) else None
            if isinstance(inner, ast.Attribute) and re.fullmatch(r"[A-Z]\w+\.__name__", ast.unparse(inner)):
                fixed = ast.Constant(ast.unparse(inner.value))  # a class that is named in the source
            made += hole(ast.unparse(inner)) if fixed is None else str(fixed.value)
        return [made]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        left, right = of(value.left), of(value.right)
        return [one + other for one in left[:3] for other in right[:3]]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod):
        return [re.sub(r"%[\d.]*[a-z]", HOLE.format("value"), text) for text in of(value.left)]
    if isinstance(value, ast.IfExp):
        return [*of(value.body), *of(value.orelse)]
    if isinstance(value, ast.Name) and value.id in local:
        known = [text for one in local[value.id] if not _is(one, value.id) for text in of(one)]
        return list(dict.fromkeys(known)) or [hole(value.id)]
    if isinstance(value, ast.Call):
        owner, _, name = ast.unparse(value.func).rpartition(".")
        if name == "format" and isinstance(value.func, ast.Attribute):
            return [
                re.sub(r"\{([\w.]*)[^}]*\}", lambda at: hole(at[1] or "value"), text)
                for text in of(value.func.value)
            ]
        if name in ("dedent", "cleandoc", "strip", "replace", "lstrip", "rstrip"):
            inner = value.args[0] if name in ("dedent", "cleandoc") else value.func.value  # type: ignore[attr-defined]
            return of(inner)
        if (not owner or owner in ("self", "cls")) and name in module.returns and depth < 3:
            found = [text for one in module.returns[name] for text in of(one)]
            return list(dict.fromkeys(found)) or [hole(name)]
    return [hole(ast.unparse(value))]


def _is(value: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(value))


# ---- C++ and CUDA --------------------------------------------------------------------------------------

_MACROS = {  # which of its arguments is the first of the message
    "TORCH_CHECK": 1,
    "STD_TORCH_CHECK": 1,
    "TORCH_CHECK_NOT_IMPLEMENTED": 1,
    "TORCH_CHECK_VALUE": 1,
    "TORCH_CHECK_TYPE": 1,
    "TORCH_CHECK_WITH": 2,
    "TORCH_WARN": 0,
    "TORCH_WARN_ONCE": 0,
    "AT_ERROR": 0,
    "NVTE_CHECK": 1,
    "NVTE_ERROR": 0,
    "NVTE_WARN": 0,
    "PADDLE_ENFORCE": 1,
    "RETURN_CUDNN_FRONTEND_ERROR_IF": 2,
    "FLASHINFER_CHECK": 1,
    "FLASHINFER_ERROR": 0,
    "XFORMERS_CHECK": 1,
    "TVM_FFI_ICHECK": 1,
    "runtime_error": 0,
    "invalid_argument": 0,
    "logic_error": 0,
    "printf": 0,
    "fprintf": 1,
    "static_assert": 1,
    "CUDNN_FE_LOG_LABEL": 0,
    "CUDNN_FE_LOG": 0,
}
_CALL = re.compile(r"(?<![\w#])(" + "|".join(map(re.escape, _MACROS)) + r")\s*\(")
_STREAM = re.compile(r"std::cerr\s*<<|std::cout\s*<<|(?<![\w.])(?:ss|oss|reason|msg)\s*<<")
_RETURNED = re.compile(r"return\s*\{\s*error_code_t::\w+\s*,")
_LITERAL = re.compile(r'(?:u8|L)?"((?:\\.|[^"\\\n])*)"')
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\])\'|//[^\n]*|/\*.*?\*/|[()\[\]{},;]|[^"\'/()\[\]{},;]+|/', re.DOTALL
)
_HEAD = re.compile(
    r"^[ ]{0,8}(?:#define\s+(?P<macro>\w+)\(|"
    r"(?!(?:return|else|if|for|while|switch|using|typedef|namespace|throw)\b)"
    r"(?:template\s*<[^;{}]*>\s*)?(?:[A-Za-z_][\w:<>,&*\s]*[\s&*>]|)(?P<name>~?[A-Za-z_][\w:~]*)\s*\((?P<rest>[^;]*)$)",
    re.MULTILINE,
)
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_NO_NAME = {"TORCH_CHECK", "if", "for", "while", "switch", "return", "defined", "catch", "else", *_MACROS}


def cpp_texts(file: str, source: str, functions: str = "") -> Iterator[Printed]:
    """The texts of a file of C++ or CUDA."""
    source = _COMMENT.sub(lambda at: at[1] or " ", re.sub(r"\\\n", "\n", source))
    wanted = re.compile(functions) if functions else None
    heads = [
        (match.start(), match["macro"] or match["name"])
        for match in _HEAD.finditer(source)
        if (match["macro"] or match["name"]) not in _NO_NAME
        and (match["macro"] or "{" in _until_open(source, match))
    ]
    calls = [(match.start(), match[1], _arguments(source, match.end())) for match in _CALL.finditer(source)]
    calls += [
        (match.start(), "stream", [_until(source, match.end(), ";")]) for match in _STREAM.finditer(source)
    ]
    calls += [
        (match.start(), "RETURN_CUDNN_FRONTEND_ERROR_IF", ["", "", _until(source, match.end(), "}")])
        for match in _RETURNED.finditer(source)
    ]
    for start, macro, arguments in sorted(calls):
        line = source.rfind("\n", 0, start) + 1
        before = source[line:start].lstrip()
        if before.startswith(("//", "#define " + macro, "*")) or macro == "static_assert":
            continue
        function = next((name for at, name in reversed(heads) if at <= start), "")
        if wanted is not None and not wanted.search(function):
            continue
        first = _MACROS.get(macro, 0)
        text = _joined(arguments[first:])
        if not text and arguments and macro in ("TORCH_CHECK", "STD_TORCH_CHECK"):
            condition = " ".join(arguments[0].split())
            text = f"Expected {condition} to be true, but got false."
        if macro in ("NVTE_CHECK",):
            text = f"Assertion failed: {' '.join(arguments[0].split())}. {text}"
        if re.search(r"[A-Za-z]{3}", re.sub("⟨[^⟩]*⟩", "", text)):
            yield Printed(file, function, macro, text)


def _until_open(source: str, match: re.Match[str]) -> str:
    """From a head to its first brace or semicolon: with a brace it is a definition."""
    end = re.search(r"[;{]", source[match.start("rest") :])
    return "" if end is None else end[0]


def _until(source: str, start: int, end: str) -> str:
    depth, made = 0, ""
    for token in _TOKEN.finditer(source, start):
        text = token[0]
        if text in "([{" and text:
            depth += 1
        elif text == end and depth <= 0:
            break
        elif text in (")", "]", "}"):
            depth -= 1
        if not text.startswith(("//", "/*")):
            made += text
    return made


def _arguments(source: str, start: int) -> list[str]:
    """The arguments of a call whose bracket is open, without comments."""
    found, depth = [""], 0
    for token in _TOKEN.finditer(source, start):
        text = token[0]
        if text.startswith(("//", "/*")):
            continue
        if text in ("(", "[", "{"):
            depth += 1
        elif text in (")", "]", "}"):
            if depth == 0:
                break
            depth -= 1
        elif text == "," and depth == 0:
            found.append("")
            continue
        found[-1] += text
    return found


def _joined(arguments: list[str]) -> str:
    """Literals as they stand, and a hole for each run of anything else."""
    made = ""
    for argument in arguments:
        place = 0
        for literal in _LITERAL.finditer(argument):
            between = argument[place : literal.start()].strip().strip("<+ ")
            made += hole(between) if re.search(r"\w", between) else ""
            made += literal[1]
            place = literal.end()
        rest = argument[place:].strip().strip("<+ ")
        if re.search(r"\w", rest) and "std::endl" not in rest:
            made += hole(rest)
    made = made.replace('\\"', '"').replace("\\n", "\n").replace("\\t", " ")
    return re.sub(r"%[-\d.]*(?:l{0,2}[dux]|zu|s|f)", HOLE.format("value"), made).strip()
