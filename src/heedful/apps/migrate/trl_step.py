"""Scripts that call TRL's PPOTrainer.step: the same script on heedful.compat.trl, and the settings of heedful ppo."""

import ast
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from heedful.apps.migrate import common
from heedful.apps.migrate.objects import model_name
from heedful.apps.migrate.script import Script
from heedful.apps.migrate.translate import Origin, Row, Translation
from heedful.apps.migrate.values import Call, is_unknown, source_text
from heedful.configs.peers import peers

COMPAT = "heedful.compat.trl"
IMPORT_UTILS = ("is_npu_available", "is_xpu_available")
"""Names of heedful.compat.trl.import_utils."""
POSITIONAL = (
    "config", "model", "ref_model", "tokenizer", "dataset", "optimizer", "data_collator", "num_shared_layers", "lr_scheduler",
)  # fmt: skip
"""The trainer's arguments, in order."""


def step_calls(script: Script) -> list[Call]:
    """The calls of a PPOTrainer's ``step``."""
    return [one for one in script.calls if one.name == ".step" and is_ppo_trainer(one.owner)]


def is_ppo_trainer(made: Any) -> bool:
    """Whether something is TRL's PPOTrainer."""
    return isinstance(made, Call) and made.short_name == "PPOTrainer" and made.name.startswith("trl")


def read_origin(trainer: Call, script: Script) -> Origin:
    """What the script sets."""
    arguments = dict(zip(POSITIONAL, trainer.args, strict=False)) | trainer.kwargs
    config, model = arguments.get("config"), value_head_call(arguments.get("model"))
    sampled = next((one for one in script.calls if one.name == ".generate" and one.owner in (trainer, model)), None)
    adapters = None if model is None else model.kwargs.get("peft_config")
    if adapters is None and model is not None and model.args:  # get_peft_model(model, config)
        inner = model.args[0]
        adapters = (
            inner.args[1]
            if isinstance(inner, Call) and inner.short_name == "get_peft_model" and len(inner.args) > 1
            else None
        )
    shared = arguments.get("ref_model")
    if (
        isinstance(shared, Call)
        and shared.short_name == "create_reference_model"
        and "num_shared_layers" in shared.kwargs
    ):
        arguments["num_shared_layers"] = shared.kwargs["num_shared_layers"]
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    parts = [("PPOConfig", config), ("generate", sampled), ("model", model), ("LoraConfig", adapters)]
    for section, made in parts:
        if isinstance(made, Call):
            placed = {
                f"argument {place + 1}": one
                for place, one in enumerate(made.args)
                if section in ("PPOConfig", "LoraConfig")
            }
            values = placed | {name: value for name, value in made.kwargs.items() if name != "peft_config"}
            table = peers()["trl-step"].sections["PPOConfig"]
            of_parser = {name: value for name, value in (made.command_line or {}).items() if name in table}
            for name in of_parser:
                script.left_over.pop(name, None)
            values = of_parser | values
            found |= {f"{section}.{name}": value for name, value in values.items()}
            lines |= {f"{section}.{name}": made.lines.get(name, made.line) for name in values}
    for name, value in arguments.items():
        if name not in ("config", "model", "tokenizer", "dataset", "data_collator") and value is not None:
            found[f"PPOTrainer.{name}"], lines[f"PPOTrainer.{name}"] = value, trainer.line
    rows, is_split = found.get("PPOConfig.batch_size"), "PPOConfig.mini_batch_size" in found
    is_old = isinstance(rows, int) and rows % 128 != 0 and not is_split  # from 0.7 on mini_batch_size is 128
    sections = {"PPOConfig", "PPOTrainer"} | {section for section, made in parts if isinstance(made, Call)}
    return Origin("trl-step", "PPOTrainer", found, lines, frozenset(sections), version="0.6" if is_old else "")


def value_head_call(model: Any) -> Call | None:
    """The call that made the model with its value head."""
    return model if isinstance(model, Call) and model.short_name == "from_pretrained" else None


def translate_groups(run: Translation, trainer: Call, step: Call) -> None:
    """Settings that several of the origin's make together, and what is no setting."""
    common.subclass(run, trainer)
    _older_defaults(run)
    _sizes(run)
    _kl(run)
    _sampling(run)
    _adapters(run)
    arguments = dict(zip(POSITIONAL, trainer.args, strict=False)) | trainer.kwargs
    name = model_name(arguments.get("model"))
    is_known = isinstance(name, str) and bool(name)
    model = run.write("model", name) if is_known else "model: ?"
    run.rows.append(Row("kept" if is_known else "question", "the model", source_text(name), model, line=trainer.line))
    said = 'A file with a JSON object {"prompt": TEXT} a line, the texts of the queries: heedful encodes them itself.'
    run.rows.append(Row("question", "the data", source_text(arguments.get("dataset")), "data: ?", said, trainer.line))
    scores = step.args[2] if len(step.args) > 2 else step.kwargs.get("scores")
    said = (
        "A function that returns a number for each completion, python:FILE.py:FUNCTION; or a reward model, model:NAME."
    )
    run.rows.append(Row("question", "the scores", source_text(scores), "rewards: ?", said, step.line))
    said = f"How many batches the script's loop makes; left out, heedful makes {run.config_class.steps}."
    run.rows.append(Row("question", "the loop", "", "steps: ?", said, step.line))
    if run.claim("PPOTrainer.ref_model"):
        reference = model_name(run.value("PPOTrainer.ref_model"))
        same = reference == name and isinstance(name, str)
        ours = "" if same or not isinstance(reference, str) else run.write("reference", reference)
        run.add_row(
            "kept", "PPOTrainer.ref_model", ours or "reference: none", "The policy as it starts." if not ours else ""
        )
    if run.claim("PPOConfig.steps"):
        run.add_row("none", "PPOConfig.steps")


def _older_defaults(run: Translation) -> None:
    """Defaults of the script's version that heedful.compat.trl does not have, as it has those of the last one."""
    last = run.peer.versions[-1]
    for name, setting in run.table.items():
        old, new = setting.default(run.version), setting.default(last)
        is_in_both = name.startswith("PPOConfig.") and setting.is_in(run.version) and setting.is_in(last)
        if is_in_both and name not in run.given and old != new and setting.kind != "none":
            said = (
                f"The default of {run.version}. heedful.compat.trl has {new!r}, as {last}: write {setting.name}={old!r}"
            )
            run.rows.append(
                Row("question", f"the script's {setting.name}", repr(old), "", f"{said} into its PPOConfig.")
            )


def _sizes(run: Translation) -> None:
    rows, each, accumulated = (
        run.number(f"PPOConfig.{name}") for name in ("batch_size", "mini_batch_size", "gradient_accumulation_steps")
    )
    old = "PPOConfig.forward_batch_size"
    if run.claim(old) and run.value(old) is not None:
        each = run.number(old)
        run.add_row("kept", old)
    names = ("PPOConfig.batch_size", "PPOConfig.mini_batch_size", "PPOConfig.gradient_accumulation_steps")
    run.claim(*names)
    if rows is None or each is None or accumulated is None:
        for name in names:
            if is_unknown(run.value(name)):
                run.add_row("question", name, "rollout_batch_size, minibatch_size: ?")
        return
    ours = (
        run.write("rollout_batch_size", int(rows * run.processes)),
        run.write("micro_batch_size", int(each)),
        run.write("minibatch_size", int(each * accumulated * run.processes)),
    )
    for name, mine in zip(names, ours, strict=True):
        run.add_row("kept" if name in run.given else "default", name, mine)


def _kl(run: Translation) -> None:
    adaptive, target, horizon = "PPOConfig.adap_kl_ctrl", "PPOConfig.target", "PPOConfig.horizon"
    run.claim(adaptive, target, horizon)
    is_adaptive = run.value(adaptive)
    if is_unknown(is_adaptive) or is_unknown(run.value(target)):
        run.add_row("question", adaptive, "kl_target: ?")
    elif is_adaptive:
        ours = run.write("kl_target", run.value(target))
        if adaptive in run.given:
            run.add_row("kept", adaptive, ours)
        run.add_row("kept" if target in run.given else "default", target, ours)
        run.add_row(
            "kept" if horizon in run.given else "default",
            horizon,
            run.write("kl_horizon", int(run.number(horizon) or 1)),
        )
    else:
        run.add_row("kept", adaptive, "kl_target: none", "The coefficient stays.")
        for name in (target, horizon):
            if name in run.given:
                run.add_row("none", name, note="adap_kl_ctrl is False, so it does nothing.")
    stop, limit = "PPOConfig.early_stopping", "PPOConfig.target_kl"
    run.claim(stop, limit)
    if is_unknown(run.value(stop)):
        run.add_row("question", stop, "approx_kl_limit: ?")
    elif run.value(stop) and run.number(limit) is not None:
        ours = run.write("approx_kl_limit", round(1.5 * (run.number(limit) or 0), 6))
        run.add_row("differs", stop, ours)
        run.add_row("differs", limit, ours)
        run.add_row("kept", stop, ours)
    else:
        for name in (stop, limit):
            if name in run.given:
                run.add_row("none", name, note="early_stopping is False, so nothing stops early.")


def _sampling(run: Translation) -> None:
    lengths, sampled, end = "generate.length_sampler", "generate.do_sample", "generate.eos_token_id"
    drawn = run.value("generate.max_new_tokens")
    if isinstance(drawn, Call) and drawn.name == "a length":
        lengths = "generate.max_new_tokens"
    if lengths in run.given:
        run.claim(lengths)
        sampler = drawn.owner if isinstance(drawn, Call) and drawn.name == "a length" else run.value(lengths)
        bounds = [*sampler.args, *sampler.kwargs.values()] if isinstance(sampler, Call) else []
        if len(bounds) == 2 and isinstance(bounds[1], int):
            run.add_row(
                "differs",
                lengths,
                run.write("max_new_tokens", bounds[1] - 1),
                run.table["generate.length_sampler"].note,
            )
        else:
            run.add_row("question", lengths, "max_new_tokens: ?")
    if run.claim(sampled) and run.value(sampled) is True:
        run.add_row("kept", sampled, "temperature: 1.0")
    elif run.value(sampled) is not True:
        run.add_row("lost", sampled)
    if run.claim(end):
        none_exists = isinstance(run.value(end), int) and (run.value(end) < 0 or run.value(end) >= 100_000)
        ours = run.write("response_length", "fixed") if none_exists else ""
        run.add_row(
            "differs" if none_exists else "none", end, ours if none_exists else "The model's own ends a response."
        )


def _adapters(run: Translation) -> None:
    targets, flag = "LoraConfig.target_modules", "model.peft_config"
    run.claim(flag)
    if not any(name.startswith("LoraConfig.") for name in run.given):
        return
    run.claim(targets)
    wanted = run.value(targets)
    if isinstance(wanted, list) and all(isinstance(one, str) for one in wanted):
        run.add_row("kept", targets, run.write("lora_targets", ",".join(wanted)))
    elif wanted == "all-linear":
        run.add_row("kept", targets, run.write("lora_targets", "all-linear"))
    else:
        run.add_row("question", targets, "lora_targets: ?")


def with_compat_imports(script: Script) -> tuple[str, list[Row]]:
    """The script with the imports of ``trl`` from heedful.compat.trl, and rows for names that are not there."""
    source = [line.encode() for line in script.source.split("\n")]
    rows: list[Row] = []
    edits: list[tuple[ast.stmt, str]] = []
    needs_scores = "return_all_scores" in script.source
    for name in ("AutoModelForSeq2SeqLMWithValueHead", "TextEnvironment"):  # there to be imported, not to be used
        used = next((one for one in script.calls if name in one.name.split(".") and one.name.startswith("trl")), None)
        if used is not None:
            rows.append(Row("lost", name, used.text, "", _why_missing(name), used.line))
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl" and not node.level:
            homes = _homes(node)
            missing = [one.name for one in node.names if one.name != "*" and one.name not in homes]
            rows += [
                Row("lost", f"from {node.module} import {one}", "", "", _why_missing(one), node.lineno)
                for one in missing
            ]
            edits.append((node, _from(node, homes, COMPAT)))
        elif isinstance(node, ast.Import) and any(one.name.split(".")[0] == "trl" for one in node.names):
            edits.append((node, "; ".join(_import_statements(node))))
        elif needs_scores and isinstance(node, ast.ImportFrom) and any(one.name == "pipeline" for one in node.names):
            edits.append((node, _from(node, {"pipeline": f"{COMPAT}.pipelines"}, node.module or "transformers")))
            said = "transformers 5 ignores return_all_scores, and returns the best label alone."
            rows.append(Row("kept", "pipeline", "", f"from {COMPAT}.pipelines import pipeline", said, node.lineno))
    for node, text in sorted(edits, key=lambda one: (-one[0].lineno, -one[0].col_offset)):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = source[first][: node.col_offset], source[last][node.end_col_offset :]
        source[first : last + 1] = [before + text.encode() + after]
    return b"\n".join(source).decode(), rows


def _homes(node: ast.ImportFrom) -> dict[str, str]:
    """Where the names of heedful.compat.trl are: in the module of the same name if that has them, such as ``core``."""
    of_same_name = COMPAT + (node.module or "").removeprefix("trl")
    in_utils = dict.fromkeys(IMPORT_UTILS, f"{COMPAT}.import_utils")
    return dict.fromkeys(_names(COMPAT), COMPAT) | in_utils | dict.fromkeys(_names(of_same_name), of_same_name)


def _from(node: ast.ImportFrom, homes: Mapping[str, str], other: str) -> str:
    """An import of the same names: of some from modules of their own, of the rest from ``other``."""
    modules: dict[str, list[str]] = {}
    for one in node.names:
        named = f"{one.name} as {one.asname}" if one.asname else one.name
        modules.setdefault(homes.get(one.name, other), []).append(named)
    return "; ".join(f"from {home} import {', '.join(names)}" for home, names in modules.items())


def _names(module: str) -> set[str]:
    """The names of a module of heedful.compat.trl, read without importing torch; none if there is no such module."""
    folder, name = files("heedful.compat") / "trl", module.removeprefix(COMPAT).strip(".") or "__init__"
    file = folder / f"{name}.py"
    if not file.is_file():
        return set()
    content = file.read_text(encoding="utf-8")
    named = [one for one in ast.parse(content).body if isinstance(one, ast.Assign) and _is_all(one.targets[0])]
    return set(ast.literal_eval(named[0].value)) if named else set()


def _is_all(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "__all__"


def _import_statements(node: ast.Import) -> Iterator[str]:
    for one in node.names:
        if one.name.split(".")[0] == "trl":
            yield f"import {COMPAT} as {one.asname or 'trl'}"
        else:
            yield f"import {one.name}" + (f" as {one.asname}" if one.asname else "")


def _why_missing(name: str) -> str:
    return {
        "AutoModelForSeq2SeqLMWithValueHead": "heedful trains decoders only; an encoder-decoder such as T5 stays with TRL.",
        "TextEnvironment": "Episodes with tools are heedful's environments: docs/environments.md.",
    }.get(name, f"{COMPAT} does not have it; remove the import if the script does not need it.")
