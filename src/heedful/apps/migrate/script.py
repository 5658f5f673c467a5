"""A Python script as the values that it gives to its calls. It is read by its syntax tree, and nothing of it runs.

Statements are followed from top to bottom: both branches of a condition that is not known, the body of a loop for each item
of a list that is known and one time otherwise, functions of the script where they are called. What that cannot tell is
`Unknown`.
"""

import ast
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.apps.migrate.values import (
    LONGEST,
    Call,
    Class,
    Function,
    Imported,
    Unknown,
    certainly_equal,
    is_plain,
    truth_value,
)
from heedful.errors import ConfigError

Names = dict[str, Any]
MOST_NODES = 200_000
"""Expressions and statements that are followed."""
MOST_ITEMS = 100
"""Items of a list for which the body of a loop is followed."""
BUILTINS = ("dict", "list", "tuple", "int", "float", "str", "bool", "getattr", "len", "range", "print")
OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
SAME = ("setup_chat_format", "clone_chat_template")
"""Functions of TRL that return their arguments, a model and a tokenizer, with another chat template."""
NONE_UNLESS = {"get_peft_config": ("use_peft",), "get_quantization_config": ("load_in_4bit", "load_in_8bit")}
"""Functions of TRL that return None unless one of these settings is on."""


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
        parses: whether the script reads a command line.

    Raises ConfigError for what is not Python.
    """

    def __init__(
        self,
        path: Path,
        source: str,
        arguments: Mapping[str, Any] | None = None,
        default: Callable[[str, str], list[Any]] = lambda _class, _name: [],
    ) -> None:
        self.path, self.source = path, source
        self.tree = _parsed(path, source)
        self.calls: list[Call] = []
        self.parses = False
        self.left_over = dict(arguments or {})
        self._arguments, self._default = dict(arguments or {}), default
        self._lines = [line.encode() for line in source.split("\n")]
        self._nodes = MOST_NODES
        self._running: set[ast.AST] = set()
        """Functions of the script that are being followed: one that calls itself is not followed again."""
        self._unsure: list[str] = []
        """Conditions that are not known, of the statements that are being followed."""
        self._loops = 0
        """Loops of which the items are not known, around them."""
        try:
            self._follow(self.tree.body, {"__name__": "__main__"})
        except RecursionError:
            raise ConfigError(f"{path}: it is nested too deeply to be read") from None

    @property
    def is_cut(self) -> bool:
        """Whether it is so long that the rest was not followed."""
        return self._nodes < 0

    def text(self, node: ast.AST) -> str:
        """The source of a node, on one line."""
        first, start = getattr(node, "lineno", 1) - 1, getattr(node, "col_offset", 0)
        last, end = (getattr(node, "end_lineno", None) or first + 1) - 1, getattr(node, "end_col_offset", None)
        if first == last:
            return " ".join(self._lines[first][start:end].decode("utf-8", "replace").split())
        lines = self._lines[first : last + 1]
        lines[-1:] = [lines[-1][:end]]
        lines[:1] = [lines[0][start:]]
        return " ".join(b" ".join(lines).decode("utf-8", "replace").split())

    def value(self, node: ast.expr, names: Names) -> Any:
        """The value of an expression."""
        if self._is_spent():
            return self._unknown(node)
        read = getattr(self, f"_value_{type(node).__name__}", None)
        if read is not None:
            return read(node, names)
        for child in ast.iter_child_nodes(node):  # there may be calls inside
            if isinstance(child, ast.expr):
                self.value(child, names)
        return self._unknown(node)

    def _unknown(self, node: ast.AST) -> Unknown:
        return Unknown(self.text(node), getattr(node, "lineno", 0))

    def _is_spent(self) -> bool:
        self._nodes -= 1
        return self._nodes < 0

    # statements: each returns what the function around it returns, as a list of one; None if it goes on ------------------

    def _follow(self, body: Sequence[ast.stmt], names: Names) -> list[Any] | None:
        for statement in body:
            if self._is_spent():
                return None
            follow = getattr(self, f"_follow_{type(statement).__name__}", None)
            returned: list[Any] | None = None if follow is None else follow(statement, names)
            if returned is not None:
                return returned
        return None

    def _follow_Import(self, node: ast.Import, names: Names) -> None:
        for one in node.names:
            top = one.name.partition(".")[0]
            names[one.asname or top] = Imported(one.name if one.asname else top)

    def _follow_ImportFrom(self, node: ast.ImportFrom, names: Names) -> None:
        module = node.module or ""
        for one in node.names:
            if one.name != "*":
                names[one.asname or one.name] = Imported(f"{module}.{one.name}")
            elif module.partition(".")[0] == "trl":
                names["*"] = Imported("trl")

    def _follow_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> None:
        names[node.name] = Function(node.name, node, names)

    _follow_AsyncFunctionDef = _follow_FunctionDef

    def _follow_ClassDef(self, node: ast.ClassDef, names: Names) -> None:
        found: Names = {}
        methods: dict[str, Function] = {}
        library: Imported | None = None
        for base in node.bases:
            above = self.value(base, names)
            if isinstance(above, Class):
                found |= above.fields
                methods |= above.methods
            library = library or (
                above if isinstance(above, Imported) else above.base if isinstance(above, Class) else None
            )
        for one in node.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                methods[one.name] = Function(one.name, one, names)
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                given = self._unknown(one) if one.value is None else self.value(one.value, names)
                if isinstance(given, Call) and given.short_name == "field":
                    given = given.kwargs.get("default", self._unknown(one))
                found[one.target.id] = given
        names[node.name] = Class(node.name, found, library, methods)

    def _follow_Assign(self, node: ast.Assign, names: Names) -> None:
        value = self.value(node.value, names)
        for target in node.targets:
            self._bind(target, value, names)

    def _follow_AnnAssign(self, node: ast.AnnAssign, names: Names) -> None:
        if node.value is not None:
            self._bind(node.target, self.value(node.value, names), names)

    def _follow_AugAssign(self, node: ast.AugAssign, names: Names) -> None:
        sides = self.value(node.target, names), self.value(node.value, names)
        self._bind(node.target, self._operation(node.op, *sides, node), names)

    def _follow_Expr(self, node: ast.Expr, names: Names) -> None:
        self.value(node.value, names)

    def _follow_Return(self, node: ast.Return, names: Names) -> list[Any]:
        return [None if node.value is None else self.value(node.value, names)]

    def _follow_If(self, node: ast.If, names: Names) -> list[Any] | None:
        holds = truth_value(self.value(node.test, names))
        if holds is not None:
            return self._follow(node.body if holds else node.orelse, names)
        other = dict(names)
        self._unsure.append(self.text(node.test))
        returned = [self._follow(node.body, names), self._follow(node.orelse, other)]
        self._unsure.pop()
        open_ones = [
            name
            for name in names | other
            if not certainly_equal(names.get(name), other.get(name)) or (name in names) != (name in other)
        ]
        names.update(
            {name: Unknown(f"{name}, which depends on: if {self.text(node.test)}", node.lineno) for name in open_ones}
        )
        return None if None in returned else [Unknown(f"if {self.text(node.test)}", node.lineno)]

    def _follow_For(self, node: ast.For | ast.AsyncFor, names: Names) -> list[Any] | None:
        items = self.value(node.iter, names)
        items = list(items) if isinstance(items, dict) else items
        if isinstance(items, list | tuple) and len(items) <= MOST_ITEMS:
            for item in list(items):
                self._bind(node.target, item, names)
                returned = self._follow(node.body, names)
                if returned is not None or self._is_spent():
                    return returned
            return self._follow(node.orelse, names)
        self._bind(node.target, self._unknown(node.target), names)
        return self._once([*node.body, *node.orelse], names)

    def _once(self, body: Sequence[ast.stmt], names: Names) -> list[Any] | None:
        """The body of a loop that may run any number of times."""
        self._loops += 1
        returned = self._follow(body, names)
        self._loops -= 1
        return returned

    _follow_AsyncFor = _follow_For

    def _follow_While(self, node: ast.While, names: Names) -> list[Any] | None:
        self.value(node.test, names)
        return self._once([*node.body, *node.orelse], names)

    def _follow_With(self, node: ast.With | ast.AsyncWith, names: Names) -> list[Any] | None:
        for item in node.items:
            value = self.value(item.context_expr, names)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value, names)
        return self._follow(node.body, names)

    _follow_AsyncWith = _follow_With

    def _follow_Try(self, node: ast.Try, names: Names) -> list[Any] | None:
        return self._follow([*node.body, *node.orelse, *node.finalbody], names)

    def _bind(self, target: ast.expr, value: Any, names: Names) -> None:
        """Give a value to names, to an attribute or to an item."""
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            known = isinstance(value, list | tuple) and len(value) == len(target.elts)
            for place, one in enumerate(target.elts):
                self._bind(one, value[place] if known else self._item(value, place, one), names)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, names)
            if isinstance(owner, Call) and owner.short_name not in ("from_pretrained", "get_peft_model", "[]"):
                owner.kwargs[target.attr] = self._changed(value, target)
                owner.lines[target.attr] = target.lineno
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value, names), self.value(target.slice, names)
            if isinstance(owner, dict) and isinstance(key, str):
                owner[key] = self._changed(value, target)
            elif isinstance(owner, Call) and isinstance(key, str):
                owner.kwargs[f"[{key}]"] = self._changed(value, target)

    def _changed(self, value: Any, node: ast.expr) -> Any:
        """What an attribute or an item becomes: nobody knows under a condition that is not known."""
        if not self._unsure:
            return value
        return Unknown(f"{self.text(node)}, which depends on: if {self._unsure[-1]}", node.lineno)

    # expressions ------------------------------------------------------------------------------------------------------

    def _value_Constant(self, node: ast.Constant, _names: Names) -> Any:
        return node.value

    def _value_Name(self, node: ast.Name, names: Names) -> Any:
        if node.id in names:
            return names[node.id]
        if node.id in BUILTINS:
            return Imported(node.id)
        return Imported(f"trl.{node.id}") if "*" in names and node.id[:1].isupper() else self._unknown(node)

    def _value_List(self, node: ast.List, names: Names) -> list[Any]:
        return [self.value(one, names) for one in node.elts]

    def _value_Tuple(self, node: ast.Tuple, names: Names) -> tuple[Any, ...]:
        return tuple(self.value(one, names) for one in node.elts)

    def _value_Dict(self, node: ast.Dict, names: Names) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, given in zip(node.keys, node.values, strict=True):
            value = self.value(given, names)
            name = None if key is None else self.value(key, names)
            if key is None and isinstance(value, dict):
                found |= value
            else:
                found[name if isinstance(name, str | int | float) else "**"] = value
        return found

    def _value_Attribute(self, node: ast.Attribute, names: Names) -> Any:
        owner = self.value(node.value, names)
        if isinstance(owner, Imported):
            return Imported(f"{owner.name}.{node.attr}")
        if not isinstance(owner, Call):
            return self._unknown(node)
        if node.attr in owner.kwargs:
            return owner.kwargs[node.attr]
        given = owner.command_line or {}
        found = [given[node.attr]] if node.attr in given else self._default(owner.short_name, node.attr)
        is_config = owner.name.startswith("trl.") and found
        return found[0] if is_config else Call(f".{node.attr}", [], {}, node.lineno, self.text(node), owner)

    def _value_Subscript(self, node: ast.Subscript, names: Names) -> Any:
        return self._item(self.value(node.value, names), self.value(node.slice, names), node)

    def _item(self, owner: Any, key: Any, node: ast.expr) -> Any:
        if isinstance(owner, list | tuple) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        if isinstance(owner, dict) and isinstance(key, str | int) and key in owner:
            return owner[key]
        if isinstance(owner, Call):
            return owner.kwargs.get(f"[{key}]") or Call("[]", [key], {}, node.lineno, self.text(node), owner)
        return self._unknown(node)

    def _value_Lambda(self, node: ast.Lambda, names: Names) -> Function:
        return Function("a lambda", node, names)

    def _value_IfExp(self, node: ast.IfExp, names: Names) -> Any:
        holds = truth_value(self.value(node.test, names))
        both = self.value(node.body, names), self.value(node.orelse, names)
        return self._unknown(node) if holds is None else both[0] if holds else both[1]

    def _value_BoolOp(self, node: ast.BoolOp, names: Names) -> Any:
        value: Any = None
        for one in node.values:
            value = self.value(one, names)
            holds = truth_value(value)
            if holds is None:
                return self._unknown(node)
            if holds is isinstance(node.op, ast.Or):
                return value
        return value

    def _value_UnaryOp(self, node: ast.UnaryOp, names: Names) -> Any:
        given = self.value(node.operand, names)
        if isinstance(node.op, ast.Not) and truth_value(given) is not None:
            return not truth_value(given)
        if isinstance(node.op, ast.USub) and isinstance(given, int | float):
            return -given
        return self._unknown(node)

    def _value_BinOp(self, node: ast.BinOp, names: Names) -> Any:
        return self._operation(node.op, self.value(node.left, names), self.value(node.right, names), node)

    def _value_Compare(self, node: ast.Compare, names: Names) -> Any:
        left, *rights = [self.value(one, names) for one in (node.left, *node.comparators)]
        return self._operation(node.ops[0], left, rights[0], node) if len(rights) == 1 else self._unknown(node)

    def _value_JoinedStr(self, node: ast.JoinedStr, names: Names) -> Any:
        parts = [self.value(one.value if isinstance(one, ast.FormattedValue) else one, names) for one in node.values]
        has_formats = any(isinstance(one, ast.FormattedValue) and one.format_spec for one in node.values)
        is_known = all(isinstance(one, str | int | float) for one in parts) and not has_formats
        return "".join(map(str, parts))[:LONGEST] if is_known else self._unknown(node)

    def _value_NamedExpr(self, node: ast.NamedExpr, names: Names) -> Any:
        value = self.value(node.value, names)
        self._bind(node.target, value, names)
        return value

    def _value_Await(self, node: ast.Await | ast.Starred, names: Names) -> Any:
        return self.value(node.value, names)

    _value_Starred = _value_Await

    def _operation(self, op: ast.AST, left: Any, right: Any, node: ast.AST) -> Any:
        """Of numbers and texts of ordinary size; a list plus a list; whether something is in a list."""
        if isinstance(op, ast.Is | ast.IsNot) and right is None and isinstance(left, Call) and left.is_object:
            return isinstance(op, ast.IsNot)
        if isinstance(op, ast.In | ast.NotIn) and isinstance(right, list | tuple | dict) and is_plain(left):
            return (left in right) is isinstance(op, ast.In) if all(map(is_plain, right)) else self._unknown(node)
        if isinstance(op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return [*left, *right][:LONGEST]
        if not (is_plain(left) and is_plain(right)) or type(op) not in OPERATIONS or _is_large(op, left, right):
            return self._unknown(node)
        try:
            return OPERATIONS[type(op)](left, right)
        except (TypeError, ZeroDivisionError, OverflowError):
            return self._unknown(node)

    # calls ------------------------------------------------------------------------------------------------------------

    def _value_Call(self, node: ast.Call, names: Names) -> Any:
        callee = self.value(node.func, names)
        args: list[Any] = []
        for place in node.args:
            value = self.value(place, names)
            spread = isinstance(place, ast.Starred) and isinstance(value, list | tuple)
            args += value if spread else [value]
        kwargs: Names = {}
        for one in node.keywords:
            value = self.value(one.value, names)
            if one.arg is None and isinstance(value, dict):
                kwargs |= {str(key): item for key, item in value.items()}
            else:
                kwargs[one.arg or "**"] = value
        if isinstance(callee, Function):
            return self._run(callee, args, kwargs, node)
        if isinstance(callee, Class):
            placed = dict(zip(callee.fields, args, strict=False))
            made = self._add_call(callee.name, args, callee.fields | placed | kwargs, node)
            made.made_by = callee
            if callee.base is not None and callee.base.name.startswith("trl."):
                made.name = callee.base.name
            elif "__init__" in callee.methods:
                self._run(callee.methods["__init__"], [made, *args], kwargs, node)
            return made
        if isinstance(callee, Imported):
            plain = _builtin(callee.name, args, kwargs)
            new = None if plain else self._add_call(callee.name, args, kwargs, node)
            return plain[0] if plain else tuple(args) if callee.short_name in SAME else new
        if isinstance(callee, Call) and callee.short_name == "LengthSampler" and isinstance(node.func, ast.Name):
            return self._add_call("a length", [], {}, node, callee)
        if isinstance(node.func, ast.Attribute):
            owner = callee.owner if isinstance(callee, Call) else self.value(node.func.value, names)
            return self._method(node.func.attr, owner, args, kwargs, node)
        return self._unknown(node)

    def _add_call(self, name: str, args: list[Any], kwargs: Names, node: ast.Call, owner: Any = None) -> Call:
        made = Call(name, args, kwargs, node.lineno, self.text(node), owner)
        made.lines |= {one.arg: one.value.lineno for one in node.keywords if one.arg is not None}
        self.calls.append(made)
        return made

    def _run(self, function: Function, args: list[Any], kwargs: Names, node: ast.Call) -> Any:
        """What a function of the script returns."""
        if function.node in self._running or isinstance(function.node, ast.Lambda):
            return self._unknown(node)
        wanted = function.node.args
        places = [one.arg for one in (*wanted.posonlyargs, *wanted.args)]
        defaults = dict(zip(reversed(places), reversed(wanted.defaults), strict=False))
        keywords = [one.arg for one in wanted.kwonlyargs]
        defaults |= {name: one for name, one in zip(keywords, wanted.kw_defaults, strict=True) if one is not None}
        inside = dict(function.names)
        for name in (*places, *keywords):
            has_default = name in defaults
            inside[name] = self.value(defaults[name], function.names) if has_default else Unknown(name, node.lineno)
        inside |= dict(zip(places, args, strict=False)) | kwargs
        self._running.add(function.node)
        returned = self._follow(function.node.body, inside)
        self._running.remove(function.node)
        return None if returned is None else returned[0]

    def _method(self, name: str, owner: Any, args: list[Any], kwargs: Names, node: ast.Call) -> Any:
        made = self._add_call(f".{name}", args, kwargs, node, owner)
        own = owner.made_by.methods.get(name) if isinstance(owner, Call) and owner.made_by is not None else None
        if own is not None:
            return self._run(own, [owner, *args], kwargs, node)
        if isinstance(owner, dict):
            return self._of_dict(owner, made, node)
        if isinstance(owner, list) and name in ("append", "extend") and args:
            is_known = not self._unsure and not self._loops and (name == "append" or isinstance(args[0], list | tuple))
            added = [args[0]] if name == "append" else args[0]
            owner.extend(added if is_known else [self._unknown(node.args[0])])
            del owner[LONGEST:]
        elif (
            isinstance(owner, Call)
            and owner.short_name in ("HfArgumentParser", "TrlParser")
            and name.startswith("parse")
        ):
            self.parses = True
            of = owner.args[0] if owner.args else owner.kwargs.get("dataclass_types", [])
            return tuple(self._parsed_class(one, node) for one in (of if isinstance(of, list | tuple) else [of]))
        elif isinstance(owner, Call) and owner.short_name == "ArgumentParser":
            if name == "add_argument":
                self._add_argument(owner, args, kwargs, node)
            if name in ("parse_args", "parse_known_args"):
                self.parses = True
                fields = {flag[2:]: given for flag, given in owner.kwargs.items() if flag.startswith("--")}
                found = Call("arguments", [], fields | self._taken(fields), node.lineno, self.text(node))
                return found if name == "parse_args" else (found, [])
        return made

    def _of_dict(self, owner: Names, made: Call, node: ast.Call) -> Any:
        """What a method of a mapping returns; ``update`` and ``setdefault`` change it."""
        name, (first, second) = made.short_name, [*made.args[:2], None, None][:2]
        if name == "update":
            new = first if isinstance(first, dict) else made.kwargs
            owner.update({key: self._changed(one, node) for key, one in new.items()})
        elif name == "setdefault" and isinstance(first, str) and first not in owner:
            owner[first] = self._changed(second, node)
        of_key = {"get": second, "pop": second, "setdefault": second}
        if name in of_key and isinstance(first, str):
            return owner.get(first, of_key[name])
        whole = {"items": [*owner.items()], "keys": [*owner], "values": [*owner.values()], "copy": dict(owner)}
        return whole.get(name, made)

    def _parsed_class(self, of: Any, node: ast.Call) -> Any:
        """A dataclass that a parser fills from the command line; of a library's its users know which arguments it has."""
        library = of.base if isinstance(of, Class) and of.base and of.base.name.startswith("trl.") else of
        fields = of.fields | self._taken(of.fields) if isinstance(of, Class) else {}
        if isinstance(library, Imported):
            made = Call(library.name, [], fields, node.lineno, self.text(node), command_line=dict(self._arguments))
            self.calls.append(made)
            return made
        if isinstance(of, Class):
            return Call(of.name, [], fields, node.lineno, self.text(node))
        return self._unknown(node)

    def _taken(self, fields: Mapping[str, Any]) -> Names:
        found = {name: value for name, value in self._arguments.items() if name in fields}
        for name in found:
            self.left_over.pop(name, None)
        return found

    def _add_argument(self, parser: Call, args: list[Any], kwargs: Names, node: ast.Call) -> None:
        flags = sorted((one for one in args if isinstance(one, str)), key=lambda one: not one.startswith("--"))
        if not flags:
            return
        given = kwargs.get("dest")
        name = given if isinstance(given, str) else flags[0].lstrip("-").replace("-", "_")
        switch = {"store_true": False, "store_false": True}.get(str(kwargs.get("action")))
        is_open = kwargs.get("required") is True or not flags[0].startswith("-")
        default = kwargs.get("default", self._unknown(node) if is_open else switch)
        kind = kwargs.get("type")
        if isinstance(kind, Imported) and isinstance(default, str):
            default = (_builtin(kind.name, [default], {}) or [default])[0]
        parser.kwargs[f"--{name}"] = default


def _builtin(name: str, args: list[Any], kwargs: Names) -> list[Any] | None:
    """The value of a call of Python's own, or of TRL's that may be None, as a list of one; None for others."""
    first = args[0] if args else None
    found: list[Any] | None = None
    if name == "dict" and not args:
        found = [kwargs]
    elif name in ("list", "tuple") and isinstance(first, list | tuple):
        found = [list(first) if name == "list" else tuple(first)]
    elif name in ("int", "float", "str") and isinstance(first, int | float | str) and len(args) == 1:
        try:
            found = [{"int": int, "float": float, "str": str}[name](first)]
        except (ValueError, OverflowError):
            found = None
    elif name == "getattr" and isinstance(first, Imported) and isinstance(args[1], str):
        found = [Imported(f"{first.name}.{args[1]}")]
    elif name == "getattr" and isinstance(first, Call) and isinstance(args[1], str):
        has = args[1] in first.kwargs
        found = [first.kwargs[args[1]]] if has else [args[2]] if len(args) > 2 else None
    elif name.startswith("trl.") and name.rpartition(".")[2] in NONE_UNLESS and isinstance(first, Call):
        settings = first.kwargs if first.command_line is None else first.command_line
        found = None if any(settings.get(one) for one in NONE_UNLESS[name.rpartition(".")[2]]) else [None]
    return found


def _is_large(op: ast.AST, left: Any, right: Any) -> bool:
    """Whether the result of an operation may be too large to be a setting."""
    if isinstance(left, str) or isinstance(right, str):
        return isinstance(op, ast.Mult | ast.Mod) or len(str(left)) + len(str(right)) > LONGEST
    if left is None or right is None:
        return False
    return max(abs(left), abs(right)) > (64 if isinstance(op, ast.Pow) else 1 << 63)


def _parsed(path: Path, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        old = "; it looks like Python 2" if "print" in str(error.msg) else ""
        raise ConfigError(f"{path}:{error.lineno or 1}: not Python {version}: {error.msg}{old}") from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{path}: it is nested too deeply to be read") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a Python script: {error}") from None
