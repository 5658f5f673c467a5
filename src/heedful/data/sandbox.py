"""Render the chat templates of others within limits of time and size.

transformers renders chat templates in jinja2's sandbox. It keeps them away from the machine, but not from its time and
memory: ``"a" * 10000000000`` is one operation, and ``[x, x]`` sixty times around is a list that nothing could write out. This
sandbox renders what transformers' renders, and refuses

- what could make much of little, and chat templates do not use: `REFUSED`, powers, lists added up by ``sum``;
- the rest of what makes much of little if its operands say that it would: repeated and formatted texts, replacements;
- any value that is too large, too much in all, and too much processor time, which it looks at in each loop and operation.
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
"""Processor time of one rendering, which takes less than a millisecond."""
LARGEST = 2**24
"""Size of the largest value: characters of a text, and `ENTRY` for each entry of a list. For conversations of more than an
eighth of it, it is eight times their size."""
MOST = 64
"""How many times the size of the largest value all values of one rendering may have together."""
ENTRY = 16
"""What an entry of a list or a dictionary counts beside its value."""
LONGEST_INTEGER = 4096
"""Bits of the largest integer."""
MOST_COMPARISONS = 2**30
"""Of characters, in a search from the right, which compares each place with all that is sought."""
REFUSED = {
    *("batch", "center", "expandtabs", "encode", "from_bytes", "ljust", "maketrans", "pprint", "rjust"),
    *("slice", "striptags", "to_bytes", "translate", "unescape", "urlize", "wordwrap", "zfill"),
}
"""Filters and methods that a template may not use."""
SIZED, JOINED, TICK = "sized", "joined with ~", "one more turn"
"""Filters of this sandbox; no template can name them."""


class LimitError(Exception):
    """A template computes more than it may."""


class TimeUpError(LimitError):
    """A template takes longer than it may."""


@dataclass
class _Budget:
    """What is left for one rendering."""

    largest: int
    left: int
    deadline: float


_budget: ContextVar[_Budget] = ContextVar("_budget")


def render(template: str, **variables: Any) -> str:
    """Return a chat template's rendering with these variables.

    Raises LimitError if it computes too much, TimeUpError if it takes too long, and whatever the template raises.
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
    """Puts lists, tuples, dictionaries and ``~``, which are no operators, and each turn of a loop through filters."""

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
    """A filter within limits."""
    first = int(hasattr(function, "jinja_pass_arg"))  # what jinja2 passes before the filter's own arguments

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        if name in REFUSED:
            raise _refused(f"the filter {name}")
        values = _checked(f"|{name}", args[first:], kwargs)
        return _spend(function(*args[:first], *values, **kwargs), f"the filter {name}")

    return filtered


def _checked(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call if it may be made; what it would join or add up is then a list."""
    if name in GROWS:
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        _refuse_larger(f"the filter {name[1:]}" if name[0] == "|" else f"{name}()", GROWS[name](*args, **kwargs))
    return args


def _refused(what: str) -> LimitError:
    return LimitError(f"it uses {what}, which no chat template may")


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
    """Return the size of a value as `LARGEST` counts it, or more than ``cutoff``. What is in it twice counts twice."""
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
    """What ``~``, and the pieces of an output, become."""
    texts: list[str] = []
    size = 0
    for one in values:
        texts.append(_spend(str(one), "its output"))
        size += len(texts[-1])
        _refuse_larger("its output", size)
    return "".join(texts)


# The most that operators, filters and methods make of their arguments, if that may be much more than these are ---------


def _count(value: Any) -> int:
    """How often a number repeats something, or how wide it makes a text; the size of anything else."""
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
        raise _refused("the filter sum for what are no numbers")
    return 0


def _searched(*texts: Any, **named: Any) -> int:
    lengths = [len(one) for one in (*texts, *named.values()) if isinstance(one, str)]
    if lengths[0] * max(lengths[1:], default=1) > MOST_COMPARISONS:
        raise LimitError(f"it searches for or takes off {max(lengths[1:]):,} characters in a text of {lengths[0]:,}")
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
