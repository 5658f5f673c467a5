"""Limits on what a chat template computes: how large a value may be, and how much one rendering may make in all.

Python ends no operation before it is done, so a time limit does not reach into a product of huge integers, a text of a
thousand million spaces, or the text of lists that hold each other. Here templates are compiled for a sandbox that looks at
operands before an operation whose result may be much larger than they are, and at the results of all others. What stays
within the limits is rendered as transformers renders it.
"""

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from string import Formatter
from threading import local
from typing import Any

from jinja2 import Template, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

LARGEST = 2**24
"""Size of the largest value: characters of a text, and `PLACE` for each entry of a list. For conversations of more than an
eighth of it, it is eight times their size."""
MOST = 64
"""How many times the size of the largest value all values of one rendering may have together."""
LONGEST_INTEGER = 4096
"""Bits of the largest integer."""
SLOWEST = 2**30
"""The most comparisons of characters, or copies of entries, in one operation that needs the product of two sizes of them."""
PLACE = 16
"""What an entry of a list or a dictionary counts beside its value."""
LONGEST_URLIZED = 2**14
"""Characters of a text in which ``urlize`` may search for addresses; its patterns need the square of them."""
CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?[^%]")
"""What ``%`` replaces, with its width and its precision."""
SMALL, JOINED = "within limits", "joined within limits"
"""Filters that no template can name."""
UNLIMITED = 2**62
_limits = local()
_compile = chat_template_utils._compile_jinja_template


class LimitError(Exception):
    """A template computes more than its limits allow."""


@contextlib.contextmanager
def limited(conversation: Any) -> Iterator[None]:
    """Have chat templates rendered within limits in this thread, inside a ``with`` block.

    Args:
        conversation: what the template is given.

    A template that goes beyond them raises `LimitError`.
    """
    _limits.largest = max(LARGEST, 8 * _size(conversation, UNLIMITED))
    _limits.left = MOST * _limits.largest
    try:
        yield
    finally:
        del _limits.largest, _limits.left


def _compiled(template: str) -> Template:
    return _within_limits(template) if hasattr(_limits, "left") else _compile(template)


chat_template_utils._compile_jinja_template = _compiled  # the same as before where nothing is `limited`


@functools.lru_cache
def _within_limits(template: str) -> Template:
    theirs = _compile("").environment  # which would compute the constants of this template without limits
    ours = _Limited(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(one) for one in theirs.extensions.values()],
    )
    ours.globals.update(theirs.globals)
    ours.filters = {name: _within(name, function) for name, function in theirs.filters.items()}
    ours.filters |= {SMALL: _spend, JOINED: _joined}
    return ours.from_string(template)


class _Limited(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in OPERATORS:
            _refuse_large(f"the operator {operator}", OPERATORS[operator](left, right))
        return _spend(super().call_binop(context, operator, left, right), f"the operator {operator}")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in jinja2
        function = getattr(__obj, "__wrapped__", __obj)  # str.format, which jinja2 wraps
        name = str(getattr(function, "__name__", "a function"))
        if isinstance(function, types.BuiltinMethodType):
            args = _refuse_growth(f".{name}()", f".{name}", (function.__self__, *args), kwargs)[1:]
        return _spend(super().call(__context, __obj, *args, **kwargs), f"{name}()")

    def concat(self, pieces: Iterable[str]) -> str:
        return _joined(pieces)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Displays(self).visit(source), *arguments, **options)


class _Displays(NodeTransformer):
    """Puts a template's lists, tuples, dictionaries, ``~`` and output through filters, as they are no operators."""

    def __init__(self, environment: _Limited) -> None:
        self.environment = environment

    def visit_List(self, node: Any) -> nodes.Node:  # noqa: N802
        return self._through(SMALL, self.generic_visit(node))

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return self._through(JOINED, self.visit(nodes.List(node.nodes, lineno=node.lineno)))

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.TemplateData) else self._through(SMALL, one) for one in node.nodes]
        return node

    def _through(self, name: str, node: nodes.Node) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno).set_environment(self.environment)


def _within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within limits."""
    own = int(hasattr(function, "jinja_pass_arg"))  # what jinja2 passes first

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        values = _refuse_growth(f"the filter {name}", f"|{name}", args[own:], kwargs)
        return _spend(function(*args[:own], *values, **kwargs), f"the filter {name}")

    return filtered


def _refuse_growth(what: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a call if it would make too much. Returns its arguments; generators that it would join or add are lists."""
    grows = GROWS.get(name) or GROWS.get(name[1:])
    if grows is None or not args:
        return args
    if name[1:] in ("join", "sum"):
        args = tuple([_spend(entry, what) for entry in one] if isinstance(one, Iterator) else one for one in args)
    _refuse_large(what, grows(args, kwargs))
    return args


def _refuse_large(what: str, size: int) -> None:
    if size > _largest():
        raise LimitError(
            f"{what} would need more than {_largest():,} characters or entries, or more than {LONGEST_INTEGER} bits"
        )


def _largest() -> int:
    return getattr(_limits, "largest", LARGEST)  # templates compute constants when they are compiled


def _spend(value: Any, what: str = "a list") -> Any:
    """Return a value if it is within the limits."""
    if isinstance(value, int):
        if value.bit_length() > LONGEST_INTEGER:
            raise LimitError(f"{what} makes an integer of more than {LONGEST_INTEGER} bits")
        return value
    size = _size(value, _largest())
    _refuse_large(what, size)
    if hasattr(_limits, "left"):
        _limits.left -= size
        if _limits.left < 0:
            raise LimitError(f"its values have more than {MOST * _largest():,} characters or entries in all")
    return value


def _size(value: Any, cutoff: int) -> int:
    """The characters and entries in a value, or more than ``cutoff``. What is in it twice counts twice."""
    size, left = 0, [value]
    while left and size <= cutoff:
        one = left.pop()
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, int):
            size += one.bit_length() // 3
        elif isinstance(one, Namespace):
            left.append(one._Namespace__attrs)
        elif isinstance(one, list | tuple | Set | Mapping | type({}.values())):
            size += PLACE * (1 + len(one))
            if size <= cutoff:
                left += one
                left += one.values() if isinstance(one, Mapping) else ()
    return size


def _joined(values: Iterable[Any]) -> str:
    """What ``~``, and the pieces of its output, become."""
    texts: list[str] = []
    size = 0
    for one in values:
        texts.append(_spend(str(one), "its output"))
        size += len(texts[-1])
        _refuse_large("its output", size)
    return "".join(texts)


def _many(value: Any) -> int:
    """How often a number repeats something, or how wide it makes a text; the size of anything else."""
    return max(value, 0) if isinstance(value, int) else _size(value, UNLIMITED)


def _too_slow(work: int) -> int:
    """Nothing for work that is soon done, else more than is allowed."""
    return 0 if work <= SLOWEST else UNLIMITED


def _bits(count: int) -> int:
    return 0 if count <= LONGEST_INTEGER else UNLIMITED


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _bits(left.bit_length() + right.bit_length())
    return _many(left) * _many(right)


def _power(left: Any, right: Any) -> int:
    return _bits(left.bit_length() * right) if isinstance(left, int) and isinstance(right, int) else 0


def _remainder(left: Any, right: Any) -> int:
    return (
        _percent((left, *(right if isinstance(right, tuple) else (right,))), {}) if isinstance(left, str | bytes) else 0
    )


def _percent(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """``text % values``, whose values each stand in one place if they have no names."""
    text, *values = args
    named = [*filter(None, [kwargs]), *(one for one in values if isinstance(one, Mapping))]
    conversions = CONVERSION.findall(str(text))
    widest = max((one for one in values if isinstance(one, int)), default=0)
    widths = sum(widest if one == "*" else int(one or 0) for pair in conversions for one in pair)
    return len(str(text)) + widths + _size(named or values, UNLIMITED) * (len(conversions) if named else 1)


def _format(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """``text.format(...)``, whose values may stand in each of its places, and may be widths."""
    text, *values = args
    values += kwargs.values()
    places = [spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None]
    widths = sum(int(digits) for spec in places for digits in re.findall(r"\d+", spec))
    widest = max((one for one in values if isinstance(one, int)), default=0)
    return len(text) + widths + len(places) * (_size(values, UNLIMITED) + widest * ("{" in "".join(places)))


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _padded(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return max(map(_many, (*args[1:], *kwargs.values())), default=0)


def _tabs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return len(args[0]) + str(args[0]).count("\t") * _many(_argument(args, kwargs, 1, "tabsize", 8))


def _translated(args: tuple[Any, ...], _: Mapping[str, Any]) -> int:
    return len(args[0]) * max(map(_many, args[1].values()), default=1) if isinstance(args[-1], Mapping) else 0


def _replaced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    text, old, new = (str(_argument(args, kwargs, i, name, "")) for i, name in enumerate(("s", "old", "new")))
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _between(values: Any, separator: Any) -> int:
    return _size(values, UNLIMITED) + (len(values) if hasattr(values, "__len__") else 0) * len(str(separator))


def _indented(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return len(str(args[0])) + (1 + str(args[0]).count("\n")) * _many(_argument(args, kwargs, 1, "width", 4))


def _as_json(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    separators = _argument(args, kwargs, 3, "separators", None) or ()
    return _size(args[0], UNLIMITED) * (
        1 + _many(_argument(args, kwargs, 2, "indent", 0)) + sum(len(str(one)) for one in separators)
    )


def _searched(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Searches from the right, and characters taken off the ends: every place is compared with all that is sought."""
    sought = [len(one) for one in (*args[1:], *kwargs.values()) if isinstance(one, str | bytes)]
    return _too_slow(len(str(args[0])) * max(sought, default=1))


def _summed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Lists are copied once for each that is added."""
    numbers = isinstance(_argument(args, kwargs, 2, "start", 0), int | float)
    return 0 if numbers or not hasattr(args[0], "__len__") else _too_slow(_many(args[0]) * len(args[0]))


OPERATORS: dict[str, Callable[[Any, Any], int]] = {"*": _product, "**": _power, "%": _remainder}
"""The most that an operator makes of two operands."""
GROWS: dict[str, Callable[[tuple[Any, ...], Mapping[str, Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"), _padded),
    **dict.fromkeys(("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim"), _searched),
    ".expandtabs": _tabs,
    ".translate": _translated,
    ".join": lambda args, _: _between(args[-1], args[0]),
    ".format": _format,
    ".format_map": lambda args, _: _format(args[:1], args[1]),
    "|join": lambda args, kwargs: _between(args[0], _argument(args, kwargs, 1, "d", "")),
    "|format": _percent,
    "|indent": _indented,
    "|round": lambda args, kwargs: _bits(4 * abs(int(_argument(args, kwargs, 1, "precision", 0)))),
    "|sum": _summed,
    "|tojson": _as_json,
    "|urlize": lambda args, _: 0 if len(str(args[0])) <= LONGEST_URLIZED else UNLIMITED,
    "|wordwrap": lambda args, kwargs: len(str(args[0])) * len(_argument(args, kwargs, 3, "wrapstring", None) or "\n"),
    "replace": _replaced,
}
"""The most that a filter (``|``) or a method (``.``) makes of its arguments, if that may be much more than they are."""
