"""Render untrusted chat templates within limits of time and size.

transformers renders chat templates in jinja2's sandbox, which protects the machine but not its time and memory:
``"a" * 10000000000`` is one operation, and ``[x, x]`` nested sixty times is too large to write out. This sandbox gives the
same renderings and refuses

- operations that can produce huge values and that chat templates do not need: `REFUSED`, powers, lists added by ``sum``;
- repeated and formatted texts, replacements and the like, if their operands would produce a huge value;
- a too large value, too large values in total, and too much processor time, checked in each loop and operation.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

SECONDS = 10.0
"""Limit of the processor time of one rendering in seconds; usually it takes less than a millisecond."""
LARGEST = 2**24
"""Maximal size of a value: characters of a text, plus `ENTRY` for each entry of a list. For conversations larger than an
eighth of this, the limit is eight times their size."""
MOST = 64
"""Maximal total size of all values of one rendering, as a multiple of the maximal size of one."""
ENTRY = 16
"""Size of an entry of a list or a dictionary besides its value."""
LONGEST_INTEGER = 4096
"""Bits of the largest integer."""
MOST_COMPARISONS = 2**30
"""Maximal number of character comparisons in a search from the right, which compares the whole pattern at each place."""
REFUSED = {
    *("batch", "center", "expandtabs", "encode", "from_bytes", "ljust", "maketrans", "pprint", "rjust"),
    *("slice", "striptags", "to_bytes", "translate", "unescape", "urlize", "wordwrap", "zfill"),
}
"""Filters and methods that a template may not use."""
SIZED, JOINED, TICK = "sized", "joined with ~", "one more turn"
"""Filters of this sandbox; no template can name them."""


class LimitError(Exception):
    """A template exceeds the limits of size."""


class TimeUpError(LimitError):
    """A template exceeds the limit of time."""


@dataclass
class _Budget:
    """The remaining limits of one rendering."""

    largest: int
    left: int
    deadline: float


_budget: ContextVar[_Budget] = ContextVar("_budget")


def render(template: str, **variables: Any) -> str:
    """Return a chat template's rendering with these variables.

    Raises LimitError if it computes too much, TimeUpError if it takes too long, and the template's own errors.
    """
    largest = max(LARGEST, 8 * size_of([variables.get("messages"), variables.get("tools")]))
    token = _budget.set(_Budget(largest, MOST * largest, time.thread_time() + SECONDS))
    try:
        return _compiled(template).render(**variables)
    finally:
        _budget.reset(token)


@functools.lru_cache
def _compiled(template: str) -> Template:
    theirs = _compile_jinja_template("").environment
    ours = _Sandbox(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(one) for one in theirs.extensions.values()],
    )
    ours.globals = {name: value for name, value in theirs.globals.items() if name != "lipsum"}
    ours.filters = {name: _limited(name, function) for name, function in theirs.filters.items()}
    ours.filters |= {SIZED: _spend, JOINED: _joined, TICK: _tick}
    return ours.from_string(template)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in REFUSED:
            raise _refused(f".{attr}()")
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        what = f"the operator {operator}"
        if operator == "**":
            raise _refused(what)
        if operator == "*":
            _refuse_larger(what, _repeated(left, right))
        if operator == "%" and isinstance(left, str):
            _refuse_larger(what, _formatted(left, *(right if isinstance(right, tuple) else (right,))))
        return _spend(super().call_binop(context, operator, left, right), what)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in jinja2
        function = getattr(__obj, "__wrapped__", __obj)  # str.format, which jinja2 wraps
        name, owner = str(getattr(function, "__name__", "a function")), getattr(function, "__self__", None)
        given = {
            key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")
        }  # jinja2's own
        if isinstance(owner, str):
            args = _checked(f".{name}", (owner, *args), given)[1:]
        elif name == "strftime_now":
            _checked(name, args, given)
        return _spend(super().call(__context, __obj, *args, **kwargs), f"{name}()")

    def concat(self, pieces: Iterable[str]) -> str:
        return _joined(pieces)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Instrumented(self).visit(source), *arguments, **options)


class _Instrumented(NodeTransformer):
    """Wraps lists, tuples, dictionaries, ``~`` and each iteration of a loop in filters that check the limits."""

    def __init__(self, environment: _Sandbox) -> None:
        self.environment = environment

    def visit_List(self, node: Any) -> nodes.Node:  # noqa: N802
        return self._through(SIZED, self.generic_visit(node))

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return self._through(JOINED, self.visit(nodes.List(node.nodes, lineno=node.lineno)))

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        tick = self._through(TICK, nodes.Const(None, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def _through(self, name: str, node: nodes.Node) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno).set_environment(self.environment)


@pass_context  # else jinja2 would compute it when it compiles
def _tick(_: Context, value: Any) -> Any:
    return _spend(value, "a loop")


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the limits."""
    first = int(hasattr(function, "jinja_pass_arg"))  # what jinja2 passes before the filter's own arguments

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        if name in REFUSED:
            raise _refused(f"the filter {name}")
        values = _checked(f"|{name}", args[first:], kwargs)
        return _spend(function(*args[:first], *values, **kwargs), f"the filter {name}")

    return filtered


def _checked(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Check that a call stays within the limits and return its arguments, with iterables to join or add as lists."""
    if name in GROWS:
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        _refuse_larger(f"the filter {name[1:]}" if name[0] == "|" else f"{name}()", GROWS[name](*args, **kwargs))
    return args


def _refused(what: str) -> LimitError:
    return LimitError(f"it uses {what}, which is not allowed in a chat template")


def _refuse_larger(what: str, size: int) -> None:
    largest = _budget.get().largest
    if size > largest:
        raise LimitError(
            f"{what} would make more than {largest:,} characters, counting {ENTRY} for each entry of a list"
        )


def _spend(value: Any, what: str = "a list") -> Any:
    """Return a value if it is within the limits."""
    budget = _budget.get()
    if time.thread_time() > budget.deadline:
        raise TimeUpError(f"it takes more than {SECONDS:g} seconds")
    if isinstance(value, int):
        if value.bit_length() > LONGEST_INTEGER:
            raise LimitError(f"{what} makes an integer of more than {LONGEST_INTEGER} bits")
        return value
    size = size_of(value, budget.largest)
    _refuse_larger(what, size)
    budget.left -= size
    if budget.left < 0:
        raise LimitError(f"its values have more than {MOST * budget.largest:,} characters in all")
    return value


def size_of(value: Any, cutoff: int = 2**62) -> int:
    """Return the size of a value in the units of `LARGEST`, or a number above ``cutoff``. Repeated parts count each time."""
    if isinstance(value, str):  # nearly all of a rendering
        return len(value)
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
            size += ENTRY * (1 + len(one))
            if size <= cutoff:
                left += one
                left += one.values() if isinstance(one, Mapping) else ()
    return size


def _joined(values: Iterable[Any]) -> str:
    """The text of ``~`` and of the pieces of an output."""
    texts: list[str] = []
    size = 0
    for one in values:
        texts.append(_spend(str(one), "its output"))
        size += len(texts[-1])
        _refuse_larger("its output", size)
    return "".join(texts)


# Upper bounds for the results of operators, filters and methods that may be much larger than their arguments ----------


def _count(value: Any) -> int:
    """A number as a repetition count or a width; the size of any other value."""
    return max(value, 0) if isinstance(value, int) else size_of(value)


def _repeated(left: Any, right: Any) -> int:
    are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return 0 if are_numbers else _count(left) * _count(right)


WIDE = re.compile(r"%[-+ #0-9.*]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)")
"""A width or a precision above 999, or one that a value sets."""


def _formatted(text: str, *values: Any, **named: Any) -> int:
    if WIDE.search(text):
        raise LimitError(f"it formats a text to a width above 999 or to one that a value sets ({text[:40]!r})")
    return len(text) + (text.count("%") + text.count("{")) * (1000 + size_of([values, named]))


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return len(str(text)) + str(text).count(str(old)) * max(len(str(new)) - len(str(old)), 0)


def _joined_by(separator: Any, values: Any) -> int:
    return size_of(values) + (len(values) if hasattr(values, "__len__") else 0) * len(str(separator))


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return len(str(text)) + (1 + str(text).count("\n")) * _count(width)


def _as_json(value: Any, _: bool = False, indent: Any = 0, separators: Any = (), **__: Any) -> int:
    return size_of(value) * (1 + 4 * _count(indent or 0) + sum(len(one) for one in separators or ()))


def _rounded(_: Any, precision: int = 0, __: str = "") -> int:
    if abs(precision) > 400:
        raise LimitError(f"it rounds to {precision} digits; a number has fewer than 400")
    return 0


def _summed(_: Any, __: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise _refused("the filter sum for values that are not numbers")
    return 0


def _searched(*texts: Any, **named: Any) -> int:
    lengths = [len(one) for one in (*texts, *named.values()) if isinstance(one, str)]
    if lengths[0] * max(lengths[1:], default=1) > MOST_COMPARISONS:
        raise LimitError(f"it searches for or removes {max(lengths[1:]):,} characters in a text of {lengths[0]:,}")
    return 0


GROWS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        (".rfind", ".rindex", ".rsplit", ".rpartition", ".strip", ".lstrip", ".rstrip", "|trim"), _searched
    ),
    **dict.fromkeys(("|format", ".format", "strftime_now"), _formatted),
    **dict.fromkeys(("|replace", ".replace"), _replaced),
    ".format_map": _formatted,
    ".join": _joined_by,
    "|join": lambda values, d="", *_, **__: _joined_by(d, values),
    "|indent": _indented,
    "|round": _rounded,
    "|sum": _summed,
    "|tojson": _as_json,
}
"""By filter (``|``), method (``.``) or function."""
