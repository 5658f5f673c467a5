"""Models, data and reward functions that a script makes: as heedful names them."""

import ast
import builtins
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from heedful.apps.migrate.script import Script
from heedful.apps.migrate.values import Call, Function, Imported, source_text

FILES = ("json", "csv", "parquet", "arrow", "text")
"""What ``load_dataset`` reads from files."""
UNCHANGED_MODELS = (".to", ".cuda", ".eval", ".train", ".half", ".float", ".bfloat16", ".merge_and_unload")
"""Methods that return the model itself."""
UNCHANGED = ("set_format", "with_format", "shuffle", "[]", "to_iterable_dataset", "flatten_indices")
"""Methods that leave the records as they are."""


def model_name(model: Any) -> Any:
    """The name of the model that is loaded, through models that wrap it and ``.to(device)``; or what stands there."""
    while isinstance(model, Call):
        inner = _inside(model)
        if inner is None:
            return model
        model = inner
    return model


def loading(model: Any) -> Call | None:
    """The call of ``from_pretrained`` that loads a model."""
    while isinstance(model, Call):
        if model.short_name == "from_pretrained" and not isinstance(_inside(model), Call):
            return model
        model = _inside(model)
    return None


def _inside(model: Call) -> Any:
    """What a model wraps or is loaded from; None if it is made otherwise."""
    if model.short_name in ("from_pretrained", "from_config", "get_peft_model", "prepare_model_for_kbit_training"):
        named = [one for one in ("pretrained_model_name_or_path", "model", "model_name") if one in model.kwargs]
        return model.args[0] if model.args else model.kwargs[named[0]] if named else None
    is_pair = (
        model.name == "[]"
        and model.args == [0]
        and isinstance(model.owner, Call)
        and model.owner.short_name == "from_pretrained"
    )
    return model.owner if is_pair or model.name in UNCHANGED_MODELS else None


def data_name(data: Any) -> tuple[str, str]:
    """heedful's name of a data set, empty if it has none, and what has to be done."""
    steps: list[Call] = []
    split = ""
    while isinstance(data, Call) and data.short_name != "load_dataset":
        if data.name == "[]" and data.args and isinstance(data.args[0], str):
            split = split or data.args[0]
        if data.name not in UNCHANGED:
            steps.append(data)
        data = data.owner if data.owner is not None else data.args[0] if data.args else None
    if isinstance(data, tuple | list) and data:
        data = data[0]
    name = _loaded(data, split) if isinstance(data, Call) else ""
    changed = [one for one in reversed(steps) if one.name.startswith(".")]
    if not name and not changed and isinstance(data, Call) and not any(one.name.startswith(".") for one in steps):
        said = f"{source_text(data):.100}: if that is one file, folder or data set of a Hub, write its name."
        return "", f'{said} Otherwise add NAME_OF_THE_DATA_SET.save_to_disk("records") behind it, and write records.'
    if not name or changed:
        what = (
            f"The script changes the records ({', '.join(one.name[1:] for one in changed)})"
            if changed
            else "The script makes them"
        )
        line = f" on line {changed[0].line}" if changed else ""
        return "", (
            f"{what}{line}: add NAME_OF_THE_DATA_SET.save_to_disk(\"records\") behind it, run it once, and write records."
            + (f" As loaded they are {name}." if name else "")
        )  # fmt: skip
    return name, ""


def _loaded(call: Call, split: str) -> str:
    """What ``load_dataset`` reads, with its split."""
    path = call.args[0] if call.args else call.kwargs.get("path")
    config = call.args[1] if len(call.args) > 1 else call.kwargs.get("name")
    given = call.kwargs.get("split") or split
    if isinstance(given, list) and given:
        given = given[0]
    if path in FILES:
        files = call.kwargs.get("data_files")
        if isinstance(files, dict):
            files = files.get(str(given or "train"))
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        return files if isinstance(files, str) and (not given or given == "train") else ""
    is_plain = isinstance(path, str) and config is None and not {"data_dir", "data_files"} & set(call.kwargs)
    if not is_plain or not (given is None or isinstance(given, str)):
        return ""
    files = _files_of(Path(str(path)), given or "train")
    if len(files) == 1:
        return str(files[0])
    return f"{path}:{given}" if given and given != "train" else str(path)


def _files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split in a folder here, as load_dataset finds them by their names."""
    return [one for one in sorted(folder.glob(f"{split}*.*")) if one.suffix in (".json", ".jsonl", ".csv", ".parquet")]


def lora_config(model: Any, given: Any) -> Any:
    """The LoraConfig of a trainer or of its model, or Unsloth's call that has the same arguments; or what stands there."""
    if isinstance(given, Call):
        return given
    while isinstance(model, Call):
        if isinstance(model.kwargs.get("peft_config"), Call):
            return model.kwargs["peft_config"]
        if model.short_name == "get_peft_model":
            second = model.args[1] if len(model.args) > 1 else model.kwargs.get("peft_config", model)
            return second if isinstance(second, Call) else None
        model = _inside(model)
    return given


def functions_file(script: Script, wanted: Sequence[Function]) -> tuple[str, list[str]]:
    """Functions of the script as a file of their own: with the imports, values and functions at its top level that they read.

    It holds the script's text as it is; nothing of it has run.

    Returns the file, and the names that the functions read and that it does not have.
    """
    top: dict[str, list[ast.stmt]] = {}
    for node in script.tree.body:
        for name in _bound(node):
            top.setdefault(name, []).append(node)
    needed: dict[int, ast.stmt] = {}
    left: list[ast.AST] = [one.node for one in wanted]
    nested = [one.node for one in wanted if one.node not in script.tree.body and isinstance(one.node, ast.stmt)]
    seen: set[str] = set()
    missing: set[str] = set()
    while left:
        for name in _read_names(left.pop()) - seen:
            seen.add(name)
            bound = top.get(name, [])
            usable = [one for one in bound if not _is_of_a_run(one)]
            is_nowhere = not bound and not hasattr(builtins, name) and name not in {one.name for one in wanted}
            if is_nowhere or len(usable) < len(bound):
                missing.add(name)
            for one in usable:
                if one.lineno not in needed:
                    needed[one.lineno] = one
                    left.append(one)
    for function in wanted:
        if isinstance(function.node, ast.stmt):
            needed[function.node.lineno] = function.node
    parts = {line: _dedented(script, needed[line], needed[line] in nested) for line in sorted(needed)}
    imports = [part for line, part in parts.items() if isinstance(needed[line], ast.Import | ast.ImportFrom)]
    others = [part for line, part in parts.items() if not isinstance(needed[line], ast.Import | ast.ImportFrom)]
    content = "\n".join(imports) + ("\n\n\n" if imports and others else "") + "\n\n\n".join(others) + "\n"
    return content, sorted(missing)


def _read_names(node: ast.AST) -> set[str]:
    """Names that a statement reads and does not bind itself, those of annotations too."""
    inside = list(ast.walk(node))
    bound = {one.id for one in inside if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
    bound |= {one.arg for one in inside if isinstance(one, ast.arg)}
    bound |= {one.name for one in inside if isinstance(one, ast.ExceptHandler) and one.name}
    bound |= {name for one in inside if isinstance(one, ast.stmt) and one is not node for name in _bound(one)}
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    read = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return read - bound if is_function else read


CHANGES = ("append", "extend", "insert", "add", "update", "setdefault", "remove", "discard", "pop", "sort")
"""Methods that change a list, a set or a mapping: WORDS.append("good")."""


def _bound(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Import() | ast.ImportFrom():
            for one in node.names:
                yield one.asname or one.name.partition(".")[0]
        case ast.Assign():
            for target in node.targets:
                yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
        case ast.AnnAssign(target=ast.Name() as target) | ast.AugAssign(target=ast.Name() as target):
            yield target.id
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as owner, attr=method))) if method in CHANGES:
            yield owner.id
        case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    yield from _bound(child)
                elif isinstance(child, ast.ExceptHandler):
                    yield from (name for one in child.body for name in _bound(one))


def _is_of_a_run(node: ast.stmt) -> bool:
    """Whether a statement at the top level belongs to the script's run: its main part, its command line, or TRL."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and one.id == "__name__":
            return not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.Expr)
        if isinstance(one, ast.Attribute) and one.attr.startswith("parse_") and "arg" in one.attr:
            return not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(one, ast.ImportFrom) and (one.module or "").partition(".")[0] == "trl":
            return True
        if isinstance(one, ast.Import) and any(name.name.partition(".")[0] == "trl" for name in one.names):
            return True
        if (
            isinstance(one, ast.Attribute)
            and one.attr == "train"
            and not isinstance(node, ast.FunctionDef | ast.ClassDef)
        ):
            return True
    return False


def _dedented(script: Script, node: ast.stmt, is_nested: bool) -> str:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    lines = script.source.split("\n")[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip()) if is_nested else 0
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)


def own_module(script: Script, named: Imported) -> str:
    """The file beside the script that a name is imported from; empty if it is another library's."""
    module = named.name.strip(".").rpartition(".")[0].replace(".", "/")
    found = [script.path.parent / f"{module}{end}" for end in (".py", "/__init__.py")] if module else []
    return next((str(one) for one in found if one.is_file()), "")


def reward_name(reward: Any) -> tuple[str, str]:
    """heedful's name of a reward, empty if it has none, and what differs."""
    if isinstance(reward, str):
        return f"model:{reward}", ""
    if isinstance(reward, Call) and isinstance(model_name(reward), str):
        return f"model:{model_name(reward)}", ""
    if isinstance(reward, Imported) and reward.short_name in TRL_REWARDS and reward.name.startswith("trl."):
        return TRL_REWARDS[reward.short_name]
    return "", f"{source_text(reward):.100}: put the function into a file, and name it python:FILE.py:FUNCTION."


TRL_REWARDS = {
    "accuracy_reward": (
        "verify:math",
        "Both compare the final answer as mathematics. TRL reads the column solution, and gives no score to a record whose "
        "own answer cannot be read. heedful reads it as answer and refuses such records.",
    ),
}
"""Rewards of TRL that heedful has under another name."""
