"""A Python script as values: what it gives to the calls that it makes. It is read by its syntax tree, and nothing of it runs.

Statements are followed from top to bottom, each once: both branches of a condition that is not known, the body of a loop one
time, functions of the script where they are called. What that cannot tell is `Unknown`.
"""

import ast
import io
import json
import operator
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.errors import ConfigError

LARGEST_SCRIPT = 4_000_000
"""Bytes that are read of a script or notebook."""
MOST_NODES = 200_000
"""Expressions and statements that are followed."""
DEEPEST = 20
"""Calls of the script's functions inside one another."""
LONGEST = 10_000
"""Characters of a text, and items of a list, that are put together from others."""

ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Unknown:
    """What only a run of the script could tell."""

    text: str
    """The expression."""
    line: int


@dataclass(frozen=True)
class Named:
    """Something of another module, such as ``torch.bfloat16``."""

    name: str


@dataclass(frozen=True, eq=False)
class Function:
    """A function or a lambda of the script."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    names: dict[str, Any] = field(repr=False)
    """Those around it."""


@dataclass(frozen=True, eq=False)
class Class:
    """A class of the script; of a dataclass, the fields with their defaults."""

    name: str
    fields: dict[str, Any]


@dataclass(eq=False)
class Made:
    """What a call returns, or an item of something: its parts are known, and not what it does."""

    name: str
    """``trl.GRPOConfig``; ``.map`` of a method, ``[]`` of an item."""
    args: list[Any]
    kwargs: dict[str, Any]
    line: int
    text: str
    """The expression."""
    of: Any = None
    """Whose method it is."""
    lines: dict[str, int] = field(default_factory=dict)
    """Where each of ``kwargs`` stands."""

    @property
    def last(self) -> str:
        """The name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def is_object(self) -> bool:
        """Whether it is certainly not None: of a class, or loaded."""
        return self.last[:1].isupper() or self.last in ("from_pretrained", "load_dataset", "get_peft_config")


class Script:
    """A script that was followed.

    Args:
        path: for messages.
        source: its text.
        arguments: what is given on the script's command line.
        default: returns the default of a field of a library's dataclass, by the names of both, as a list of one; an empty one
            if there is no such field.

    Attributes:
        calls: everything that was made, in the order of the calls.
        left_over: arguments of the command line that no parser of the script takes.

    Raises ConfigError for what is not Python.
    """

    def __init__(
        self,
        path: Path,
        source: str,
        arguments: Mapping[str, Any] | None = None,
        default: Callable[[str, str], list[Any]] = lambda _class, _name: [],
    ) -> None:
        self.path, self.source, self._default = path, source, default
        self.tree = _parsed(path, source)
        self._lines = [line.encode() for line in source.split("\n")]
        self.calls: list[Made] = []
        self.left_over = dict(arguments or {})
        self._arguments = dict(arguments or {})
        self._nodes, self._depth = MOST_NODES, 0
        self._classes: dict[str, Class] = {}
        self.names: dict[str, Any] = {"__name__": "__main__"}
        try:
            self._follow(self.tree.body, self.names)
        except RecursionError:
            raise ConfigError(f"{path}: it is nested too deeply to be read") from None

    def text(self, node: ast.AST) -> str:
        """The source of a node, on one line."""
        first, start = getattr(node, "lineno", 1) - 1, getattr(node, "col_offset", 0)
        last, end = (getattr(node, "end_lineno", None) or first + 1) - 1, getattr(node, "end_col_offset", None)
        lines = self._lines[first : last + 1]
        lines[-1:] = [lines[-1][:end]]
        lines[:1] = [lines[0][start:]]
        return " ".join(b" ".join(lines).decode("utf-8", "replace").split())

    # statements -------------------------------------------------------------------------------------------------------

    def _follow(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> Any:
        """The value of the first ``return``, as a list of one; None without."""
        for statement in body:
            if self._spent():
                return None
            returned = self._statement(statement, names)
            if returned is not None:
                return returned
        return None

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> Any:
        match node:
            case ast.Import():
                for alias in node.names:
                    names[alias.asname or alias.name.partition(".")[0]] = Named(
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            case ast.ImportFrom():
                for alias in node.names:
                    names[alias.asname or alias.name] = Named(f"{node.module or ''}.{alias.name}")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names[node.name] = Function(node.name, node, names)
            case ast.ClassDef():
                self._classes[node.name] = names[node.name] = self._class(node, names)
            case ast.Assign():
                value = self.value(node.value, names)
                for target in node.targets:
                    self._bind(target, value, names)
            case ast.AnnAssign(value=ast.expr() as given):
                self._bind(node.target, self.value(given, names), names)
            case ast.AugAssign():
                value = self._operation(node.op, [self.value(node.target, names), self.value(node.value, names)], node)
                self._bind(node.target, value, names)
            case ast.Expr():
                self.value(node.value, names)
            case ast.Return():
                return [None if node.value is None else self.value(node.value, names)]
            case ast.If():
                return self._condition(node, names)
            case ast.For() | ast.AsyncFor():
                self._bind(node.target, Unknown(self.text(node.target), node.lineno), names, self.value(node.iter, names))
                return self._follow([*node.body, *node.orelse], names)
            case ast.While():
                self.value(node.test, names)
                return self._follow([*node.body, *node.orelse], names)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr, names)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, value, names)
                return self._follow(node.body, names)
            case ast.Try():
                return self._follow([*node.body, *node.orelse, *node.finalbody], names)
        return None

    def _condition(self, node: ast.If, names: dict[str, Any]) -> Any:
        test = self.value(node.test, names)
        if not isinstance(test, Unknown | Made):
            return self._follow(node.body if _truth(test) else node.orelse, names)
        other = dict(names)
        returned = [self._follow(node.body, names), self._follow(node.orelse, other)]
        for name in names | other:
            if names.get(name, names) is not other.get(name, names) and not _equal(names.get(name), other.get(name)):
                names[name] = Unknown(f"{name}, which depends on: if {self.text(node.test)}", node.lineno)
        if all(one is not None for one in returned):
            return [Unknown(f"if {self.text(node.test)}", node.lineno)]
        return None

    def _bind(self, target: ast.expr, value: Any, names: dict[str, Any], each: Any = None) -> None:
        """Give a value to names. ``each`` is what a loop runs over: a list that is known gives its first item."""
        if isinstance(each, list | tuple) and each and not isinstance(each[0], Unknown):
            value = each[0]
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Tuple() | ast.List():
                known = value if isinstance(value, list | tuple) and len(value) == len(target.elts) else None
                for place, one in enumerate(target.elts):
                    self._bind(one, self._item(value, place, target) if known is None else known[place], names)
            case ast.Starred():
                self._bind(target.value, Unknown(self.text(target), target.lineno), names)
            case ast.Attribute():
                owner = self.value(target.value, names)
                if isinstance(owner, Made):
                    owner.kwargs[target.attr] = value
            case ast.Subscript():
                owner, key = self.value(target.value, names), self.value(target.slice, names)
                if isinstance(owner, dict) and isinstance(key, str):
                    owner[key] = value
                elif isinstance(owner, Made) and isinstance(key, str):
                    owner.kwargs[f"[{key}]"] = value

    def _class(self, node: ast.ClassDef, names: dict[str, Any]) -> Class:
        found: dict[str, Any] = {}
        for base in node.bases:
            above = self.value(base, names)
            if isinstance(above, Class):
                found |= above.fields
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                given = Unknown(one.target.id, one.lineno) if one.value is None else self.value(one.value, names)
                if isinstance(given, Made) and given.last == "field":
                    given = given.kwargs.get("default", Unknown(self.text(one), one.lineno))
                found[one.target.id] = given
        return Class(node.name, found)

    # expressions ------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """The value of an expression."""
        if self._spent():
            return Unknown(self.text(node), node.lineno)
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names.get(node.id, Named(node.id) if node.id in names or _is_builtin(node.id) else self._unknown(node))
            case ast.List() | ast.Tuple():
                parts = [self.value(one, names) for one in node.elts]
                return tuple(parts) if isinstance(node, ast.Tuple) else parts
            case ast.Dict():
                return self._dict(node, names)
            case ast.Attribute():
                return self._attribute(self.value(node.value, names), node)
            case ast.Subscript():
                return self._item(self.value(node.value, names), self.value(node.slice, names), node)
            case ast.Call():
                return self._call(node, names)
            case ast.Lambda():
                return Function("a lambda", node, names)
            case ast.IfExp():
                test = self.value(node.test, names)
                both = [self.value(node.body, names), self.value(node.orelse, names)]
                return self._unknown(node) if isinstance(test, Unknown | Made) else both[0 if _truth(test) else 1]
            case ast.BoolOp():
                return self._boolean(node, names)
            case ast.UnaryOp():
                given = self.value(node.operand, names)
                if isinstance(given, int | float | bool | str | None):
                    if isinstance(node.op, ast.Not):
                        return not given
                    if isinstance(node.op, ast.USub) and isinstance(given, int | float):
                        return -given
                return self._unknown(node)
            case ast.BinOp():
                return self._operation(node.op, [self.value(node.left, names), self.value(node.right, names)], node)
            case ast.Compare(ops=[op], comparators=[right]):
                return self._operation(op, [self.value(node.left, names), self.value(right, names)], node)
            case ast.JoinedStr():
                parts = [
                    self.value(one.value if isinstance(one, ast.FormattedValue) else one, names) for one in node.values
                ]
                plain = all(isinstance(one, str | int | float) for one in parts)
                formats = any(isinstance(one, ast.FormattedValue) and one.format_spec for one in node.values)
                return "".join(map(str, parts))[:LONGEST] if plain and not formats else self._unknown(node)
            case ast.NamedExpr():
                value = self.value(node.value, names)
                self._bind(node.target, value, names)
                return value
            case ast.Await() | ast.Starred():
                return self.value(node.value, names)
        for child in ast.iter_child_nodes(node):  # calls inside of it
            if isinstance(child, ast.expr):
                self.value(child, names)
        return self._unknown(node)

    def _unknown(self, node: ast.AST) -> Unknown:
        return Unknown(self.text(node), getattr(node, "lineno", 0))

    def _spent(self) -> bool:
        self._nodes -= 1
        return self._nodes < 0

    def _dict(self, node: ast.Dict, names: dict[str, Any]) -> Any:
        found: dict[Any, Any] = {}
        for key, given in zip(node.keys, node.values, strict=True):
            value = self.value(given, names)
            name = None if key is None else self.value(key, names)
            if key is None and isinstance(value, dict):
                found |= value
            elif isinstance(name, str | int | float | bool):
                found[name] = value
            else:
                found["**"] = self._unknown(given)
        return found

    def _attribute(self, owner: Any, node: ast.Attribute) -> Any:
        if isinstance(owner, Named):
            return Named(f"{owner.name}.{node.attr}")
        if isinstance(owner, Made) and node.attr in owner.kwargs:
            return owner.kwargs[node.attr]
        if isinstance(owner, Made) and owner.name.startswith("trl."):
            line = owner.kwargs.get("command line", {})
            found = [line[node.attr]] if node.attr in line else self._default(owner.last, node.attr)
            if found:
                return found[0]
        if isinstance(owner, Made):
            return Made(f".{node.attr}", [], {}, node.lineno, self.text(node), owner)
        return self._unknown(node)

    def _item(self, owner: Any, key: Any, node: ast.expr) -> Any:
        if isinstance(owner, list | tuple) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        if isinstance(owner, dict) and isinstance(key, str | int) and key in owner:
            return owner[key]
        if isinstance(owner, Made):
            return owner.kwargs.get(f"[{key}]") or Made("[]", [key], {}, node.lineno, self.text(node), owner)
        return self._unknown(node)

    def _boolean(self, node: ast.BoolOp, names: dict[str, Any]) -> Any:
        value: Any = None
        for one in node.values:
            value = self.value(one, names)
            if isinstance(value, Unknown | Made):
                return self._unknown(node)
            if _truth(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _operation(self, op: ast.AST, sides: list[Any], node: ast.AST) -> Any:
        plain = all(isinstance(one, int | float | str | bool | None) for one in sides)
        if isinstance(op, ast.Is | ast.IsNot) and sides[1] is None and isinstance(sides[0], Made) and sides[0].is_object:
            return isinstance(op, ast.IsNot)
        if isinstance(op, ast.In | ast.NotIn) and isinstance(sides[1], list | tuple | dict | str):
            known = isinstance(sides[0], str | int | float) and not any(isinstance(one, Unknown) for one in sides[1])
            if known and not (isinstance(sides[1], str) and not isinstance(sides[0], str)):
                return (sides[0] in sides[1]) is isinstance(op, ast.In)
        if isinstance(op, ast.Add) and all(isinstance(one, list) for one in sides):
            return [*sides[0], *sides[1]][:LONGEST]
        if isinstance(op, ast.Pow) and all(isinstance(one, int | float) for one in sides):
            return _powered(*sides) if abs(sides[1]) <= 64 and abs(sides[0]) <= 1e6 else self._unknown(node)
        if not plain or type(op) not in ARITHMETIC:
            return self._unknown(node)
        is_text = any(isinstance(one, str) for one in sides)
        if is_text and (isinstance(op, ast.Mult | ast.Mod) or sum(len(str(one)) for one in sides) > LONGEST):
            return self._unknown(node)
        try:
            found = ARITHMETIC[type(op)](*sides)
        except (TypeError, ZeroDivisionError, OverflowError):
            return self._unknown(node)
        is_large = isinstance(found, int) and not isinstance(found, bool) and abs(found) > 1 << 63
        return self._unknown(node) if is_large else found

    # calls ------------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        callee = self.value(node.func, names)
        args = [self.value(one, names) for one in node.args]
        kwargs: dict[str, Any] = {}
        for one in node.keywords:
            value = self.value(one.value, names)
            if one.arg is not None:
                kwargs[one.arg] = value
            elif isinstance(value, dict):
                kwargs |= {str(key): item for key, item in value.items()}
            else:
                kwargs["**"] = Unknown(f"**{self.text(one.value)}", node.lineno)
        if isinstance(callee, Function):
            return self._run(callee, args, kwargs, node)
        if isinstance(callee, Class):
            given = dict(zip(callee.fields, args, strict=False)) | kwargs
            return self._made(callee.name, args, callee.fields | given, node, None)
        if isinstance(callee, Named):
            plain = self._builtin(callee.name, args, kwargs)
            return plain[0] if plain else self._made(callee.name, args, kwargs, node, None)
        if isinstance(callee, Made) and callee.name.startswith(".") and isinstance(node.func, ast.Attribute):
            return self._method(callee, args, kwargs, node)
        if isinstance(node.func, ast.Attribute):  # a method of something unknown, or of a list or a dict
            owner = self.value(node.func.value, names)
            if isinstance(owner, dict) and node.func.attr == "get" and args and isinstance(args[0], str):
                return owner.get(args[0], args[1] if len(args) > 1 else None)
            if isinstance(owner, dict) and node.func.attr == "update" and len(args) == 1 and isinstance(args[0], dict):
                owner.update(args[0])
            return self._made(f".{node.func.attr}", args, kwargs, node, owner)
        return self._unknown(node)

    def _made(self, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call, of: Any) -> Made:
        made = Made(name, args, kwargs, node.lineno, self.text(node), of)
        made.lines |= {one.arg: one.value.lineno for one in node.keywords if one.arg is not None}
        self.calls.append(made)
        return made

    def _run(self, function: Function, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """What a function of the script returns."""
        if self._depth >= DEEPEST or isinstance(function.node, ast.Lambda):
            return self._unknown(node)
        wanted = function.node.args
        inside = dict(function.names)
        places = [*wanted.posonlyargs, *wanted.args]
        defaults = dict(zip([one.arg for one in reversed(places)], reversed(wanted.defaults), strict=False))
        keyed = zip([one.arg for one in wanted.kwonlyargs], wanted.kw_defaults, strict=True)
        defaults |= {name: given for name, given in keyed if given is not None}
        for one in [*places, *wanted.kwonlyargs]:
            has = one.arg in defaults
            inside[one.arg] = self.value(defaults[one.arg], function.names) if has else Unknown(one.arg, node.lineno)
        inside |= dict(zip([one.arg for one in places], args, strict=False)) | kwargs
        self._depth += 1
        returned = self._follow(function.node.body, inside)
        self._depth -= 1
        return None if returned is None else returned[0]

    def _builtin(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """The value of a call of Python's own, as a list of one; None for others."""
        if name == "dict" and not args:
            return [kwargs]
        if name in ("list", "tuple") and len(args) == 1 and isinstance(args[0], list | tuple):
            return [list(args[0]) if name == "list" else tuple(args[0])]
        if name in ("int", "float", "str") and len(args) == 1 and isinstance(args[0], int | float | str):
            try:
                return [{"int": int, "float": float, "str": str}[name](args[0])]
            except (ValueError, OverflowError):
                return None
        if name.startswith("trl.get_") and args and isinstance(args[0], Made):  # of TRL: None if the settings do not ask for it
            wanted = {"get_peft_config": ("use_peft",), "get_quantization_config": ("load_in_4bit", "load_in_8bit")}
            names, line = wanted.get(name.rpartition(".")[2], ()), args[0].kwargs.get("command line", args[0].kwargs)
            return [None] if names and not any(line.get(one) for one in names) else None
        if name == "getattr" and len(args) in (2, 3) and isinstance(args[0], Made) and isinstance(args[1], str):
            if args[1] in args[0].kwargs:
                return [args[0].kwargs[args[1]]]
            return [args[2]] if len(args) == 3 else None
        return None

    def _method(self, callee: Made, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        owner = callee.of
        made = self._made(callee.name, args, kwargs, node, owner)
        if not isinstance(owner, Made):
            return made
        if owner.last in ("HfArgumentParser", "TrlParser") and callee.last.startswith("parse"):
            of = owner.args[0] if owner.args else owner.kwargs.get("dataclass_types", [])
            wanted = of if isinstance(of, list | tuple) else [of]
            return tuple(self._parsed_class(one, node) for one in wanted)
        if owner.last == "ArgumentParser" and callee.last == "add_argument":
            self._add_argument(owner, args, kwargs, node)
        if owner.last == "ArgumentParser" and callee.last in ("parse_args", "parse_known_args"):
            fields = {name: given for name, given in owner.kwargs.items() if name.startswith("--")}
            found = Made("arguments", [], {name[2:]: one for name, one in fields.items()}, node.lineno, self.text(node))
            found.kwargs |= self._taken(found.kwargs)
            return found if callee.last == "parse_args" else (found, [])
        return made

    def _parsed_class(self, of: Any, node: ast.Call) -> Any:
        """A dataclass that a parser fills from the command line. Of a library's class every argument that is left is taken."""
        if isinstance(of, Class):
            return Made(of.name, [], of.fields | self._taken(of.fields), node.lineno, self.text(node))
        if isinstance(of, Named):
            made = Made(of.name, [], {}, node.lineno, self.text(node))
            made.kwargs["command line"] = dict(self._arguments)
            self.calls.append(made)
            return made
        return self._unknown(node)

    def _taken(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in self._arguments.items() if name in fields}
        for name in found:
            self.left_over.pop(name, None)
        return found

    def _add_argument(self, parser: Made, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> None:
        long = [one for one in args if isinstance(one, str) and one.startswith("--")] or [
            one for one in args if isinstance(one, str)
        ]
        if not long:
            return
        name = kwargs.get("dest") if isinstance(kwargs.get("dest"), str) else long[0].lstrip("-").replace("-", "_")
        switch = {"store_true": False, "store_false": True}.get(str(kwargs.get("action")))
        missing = Unknown(f"{long[0]}, given on the command line", node.lineno)
        given = kwargs.get("default", missing if kwargs.get("required") or not long[0].startswith("-") else switch)
        read = kwargs.get("type")
        if isinstance(read, Named) and isinstance(given, str) and read.name in ("int", "float"):
            given = (self._builtin(read.name, [given], {}) or [given])[0]
        parser.kwargs[f"--{name}"] = given


def _powered(base: float, exponent: float) -> Any:
    try:
        return base**exponent
    except (ZeroDivisionError, OverflowError):
        return Unknown(f"{base} ** {exponent}", 0)


def _truth(value: Any) -> bool:
    return True if isinstance(value, Named | Function | Class) else bool(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Made) and isinstance(other, Made) and one.last == other.last == "from_pretrained":
        return bool(one.args and other.args) and one.args[0] == other.args[0]  # a class by the model's kind
    return isinstance(one, int | float | str | bool | Named) and type(one) is type(other) and one == other


def _is_builtin(name: str) -> bool:
    return name in ("dict", "list", "tuple", "int", "float", "str", "getattr", "len", "range", "print", "bool")


def _parsed(path: Path, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        old = "; it looks like Python 2" if "print" in str(error.msg) else ""
        raise ConfigError(f"{path}:{error.lineno}: not Python {_python()}: {error.msg}{old}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: not a Python script: {error or 'nested too deeply'}") from None


def _python() -> str:
    import sys

    return ".".join(map(str, sys.version_info[:2]))


def read_source(path: Path) -> str:
    """The text of a script, or the code of a notebook. Raises ConfigError."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        raise ConfigError(f"{path} is {what}; name a Python script, a notebook, or a YAML file of LLaMA-Factory")
    with path.open("rb") as file:
        content = file.read(LARGEST_SCRIPT + 1)
    if len(content) > LARGEST_SCRIPT:
        raise ConfigError(f"{path} has more than {LARGEST_SCRIPT:,} bytes, so it is no script")
    try:
        if path.suffix == ".ipynb":
            return "\n\n".join(_cells(path, json.loads(content.decode("utf-8"))))
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise ConfigError(f"{path}: its text cannot be read: {error}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not a notebook: {error}") from None


def _cells(path: Path, notebook: Any) -> Iterator[str]:
    """The code of a notebook's cells. Lines for the shell and for IPython become comments."""
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ConfigError(f"{path}: not a notebook of format 4: it has no list of cells")
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            text = "".join(source) if isinstance(source, list) else str(source)
            yield "\n".join(f"# {line}" if line.lstrip()[:1] in ("%", "!") else line for line in text.splitlines())


def shown(value: Any) -> str:
    """A value as a report writes it, on one line."""
    if isinstance(value, Unknown | Made):
        return value.text
    if isinstance(value, Named | Function | Class):
        return value.name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items() if one is not value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(one) for one in value if one is not value) + "]"
    return repr(value)
