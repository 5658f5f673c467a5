"""Models, data and reward functions that a script makes: as heedful names them."""

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from heedful.apps.migrate.script import Script
from heedful.apps.migrate.values import Call, Function, Imported, source_text

FILES = ("json", "csv", "parquet", "arrow", "text")
"""What ``load_dataset`` reads from files."""
UNCHANGED = ("set_format", "with_format", "shuffle", "[]", "to_iterable_dataset", "flatten_indices")
"""Methods that leave the records as they are."""


def model_name(model: Any) -> Any:
    """The name of the model that is loaded, through models that wrap it and ``.to(device)``; or what stands there."""
    while isinstance(model, Call):
        if model.short_name in ("from_pretrained", "from_config", "get_peft_model", "prepare_model_for_kbit_training"):
            named = {"pretrained_model_name_or_path", "model", "model_name"} & set(model.kwargs)
            inner = model.args[0] if model.args else model.kwargs[named.pop()] if named else None
            if inner is None:
                return model
            model = inner
        elif model.name in (".to", ".cuda", ".eval", ".train", ".merge_and_unload") and model.owner is not None:
            model = model.owner
        else:
            return model
    return model


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
    return f"{path}:{given}" if given and given != "train" else str(path)


def lora_config(model: Any, given: Any) -> Call | None:
    """The LoraConfig of a trainer or of its model."""
    if isinstance(given, Call):
        return given
    while isinstance(model, Call):
        if isinstance(model.kwargs.get("peft_config"), Call):
            return model.kwargs["peft_config"]
        if model.short_name == "get_peft_model" and len(model.args) > 1 and isinstance(model.args[1], Call):
            return model.args[1]
        model = model.args[0] if model.args else None
    return None


def functions_file(script: Script, wanted: Sequence[Function]) -> str:
    """Functions of the script as a file of their own: with the imports, values and functions at its top level that they read.

    It holds the script's text as it is; nothing of it has run.
    """
    top: dict[str, ast.stmt] = {}
    for node in script.tree.body:
        for name in _bound(node):
            top[name] = node
    needed: dict[int, ast.stmt] = {}
    left: list[ast.AST] = [one.node for one in wanted]
    nested = [one.node for one in wanted if one.node not in script.tree.body and isinstance(one.node, ast.stmt)]
    seen: set[str] = set()
    while left:
        for name in {one.id for one in ast.walk(left.pop()) if isinstance(one, ast.Name)} - seen:
            seen.add(name)
            if name in top and top[name].lineno not in needed:
                needed[top[name].lineno] = top[name]
                left.append(top[name])
    for one in wanted:
        if isinstance(one.node, ast.stmt):
            needed[one.node.lineno] = one.node
    parts = [_dedented(script, needed[line], needed[line] in nested) for line in sorted(needed)]
    imports = [
        text
        for line, text in zip(sorted(needed), parts, strict=True)
        if isinstance(needed[line], ast.Import | ast.ImportFrom)
    ]
    others = [
        text
        for line, text in zip(sorted(needed), parts, strict=True)
        if not isinstance(needed[line], ast.Import | ast.ImportFrom)
    ]
    return "\n".join(imports) + ("\n\n\n" if imports else "") + "\n\n\n".join(others) + "\n"


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
        case ast.AnnAssign(target=ast.Name() as target):
            yield target.id


def _dedented(script: Script, node: ast.stmt, is_nested: bool) -> str:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    lines = script.source.split("\n")[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip()) if is_nested else 0
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)


def reward_name(reward: Any) -> tuple[str, str]:
    """heedful's name of a reward, empty if it has none, and what differs."""
    if isinstance(reward, str):
        return f"model:{reward}", ""
    if isinstance(reward, Call) and isinstance(model_name(reward), str):
        return f"model:{model_name(reward)}", ""
    if isinstance(reward, Imported):
        return TRL_REWARDS.get(
            reward.name.rpartition(".")[2],
            (
                "",
                f"{reward.name} is a function of a library: call it in a function of a file, python:FILE.py:FUNCTION.",
            ),
        )
    return "", f"{source_text(reward)}: put the function into a file, and name it python:FILE.py:FUNCTION."


TRL_REWARDS = {
    "accuracy_reward": (
        "verify:math",
        "Both compare the final answer as mathematics. TRL reads the column solution, and gives no score to a record whose "
        "own answer cannot be read. heedful reads answer (columns answer=solution) and refuses such records.",
    ),
}
"""Rewards of TRL that heedful has under another name."""
