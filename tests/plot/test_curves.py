"""Learning curves: what is drawn is what was logged, and a run that cannot be drawn says why."""

import importlib
import json
import struct
import xml.etree.ElementTree as ET

import pytest
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg

import heedful
from heedful import CheckpointError, ConfigError, DataError, plot
from heedful.apps.plot.panels import panels_of
from heedful.cli.main import COMMANDS, main
from heedful.configs.options import RunOptions
from heedful.files import to_json
from heedful.training.result import TrainingResult

PPO_STEP = {
    "loss/policy": 0.0,
    "reward/score_mean": 1.0,
    "reference/kl": 0.5,
    "reference/kl_coef": 0.05,
    "rollout/response_length": 20.0,
    "rollout/eos_frac": 0.9,
    "policy/entropy": 2.0,
}
PPO_EVAL = {"eval/score_mean": 0.5, "eval/kl": 0.1, "eval/response_length": 21.0, "eval/eos_frac": 1.0}


@pytest.fixture
def logged(tmp_path):
    """``logged(name, lines, algorithm)`` is a run folder with these lines of metrics.jsonl.

    A string is written as it is; with None as the algorithm there is no environment.json.
    """

    def write(name, lines, algorithm="sft"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        if algorithm is not None:
            environment = {"command": f"heedful {algorithm}", "seed": 0}
            (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def sft(logged):
    train = [{"step": i, "loss/sft": 4.0 / i, "time/update": 0.1} for i in range(1, 7)]
    return logged(
        "运行/sft", [{"step": 0, "eval/loss": 5.0, "eval/perplexity": 148.4}, *train, {"step": 6, "eval/loss": 1}]
    )


@pytest.fixture
def reward(logged):
    train = [{"step": i, "loss/reward": 0.6, "reward/accuracy": float(i % 2)} for i in range(1, 61)]
    return logged("运行/reward", [{"step": 0, "eval/accuracy": 0.5, "eval/loss": 0.7}, *train], "reward")


@pytest.fixture
def ppo(logged):
    """``ppo(name, algorithm, **changed)``: five steps; ``changed`` maps a metric, / written as _, to its values."""

    def write(name="运行/ppo", algorithm="ppo", **changed):
        steps = [{"step": i, **PPO_STEP} for i in range(1, 6)]
        for metric, values in changed.items():
            for step, value in zip(steps, values, strict=True):
                step[metric.replace("_", "/", 1)] = value
        return logged(name, [{"step": 0, **PPO_EVAL}, *steps, {"step": 5, **PPO_EVAL}], algorithm)

    return write


def figure(*folders):
    return plot.curves(list(folders), [folder.name for folder in folders])


def panels(drawn):
    return {axes.get_title(): axes for axes in drawn.axes if axes.get_title()}


def lines(axes):
    return [list(map(tuple, line.get_xydata().tolist())) for line in axes.lines]


def legend(drawn):
    return [text.get_text() for text in drawn.legends[0].get_texts()]


def overlaps(drawn):
    """Pairs of texts and axes that lie on each other once everything has its place, and texts outside the picture."""
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    renderer = canvas.get_renderer()
    labels = []
    for axes in drawn.axes:
        labels += [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axis for axis in (axes.xaxis, axes.yaxis) if axis.get_visible()):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            labels += [label for place, label in ticks if low <= place <= high]
    labels = [label for label in labels if label.get_text() and label.get_visible()]
    boxes = [(label.get_text(), label.get_window_extent(renderer)) for label in labels]
    boxes.append(("legend", drawn.legends[0].get_window_extent(renderer)))
    frame = drawn.bbox.padded(1)
    outside = [text for text, box in boxes if not (frame.contains(*box.min) and frame.contains(*box.max))]
    pairs = [
        (a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[i + 1 :] if one.padded(-1).overlaps(other)
    ]
    return outside + pairs


def test_lines_are_what_was_logged(sft, reward, ppo):
    drawn = panels(figure(sft, reward, ppo(reference_kl=[0.0, 0.1, 0.4, 0.9, 1.6])))
    own = {panel.title for algorithm in ("sft", "reward", "ppo") for panel in panels_of(algorithm)}
    assert set(drawn) == own - {f"PPO: {name}" for name in NOT_LOGGED}
    assert lines(drawn["SFT: loss"]) == [[(i, 4.0 / i) for i in range(1, 7)], [(0, 5.0), (6, 1.0)]]
    assert drawn["SFT: loss"].get_yscale() == "log"
    assert lines(drawn["PPO: KL to the reference"]) == [
        [(1, 0.0), (2, 0.1), (3, 0.4), (4, 0.9), (5, 1.6)],
        [(0, 0.1), (5, 0.1)],
    ]
    assert lines(drawn["PPO: score"]) == [[(i, 1.0) for i in range(1, 6)], [(0, 0.5), (5, 0.5)]]
    assert lines(drawn["PPO: entropy"])[0] == [(i, 2.0) for i in range(1, 6)]
    assert drawn["PPO: KL to the reference"].get_ylabel() == "nats per response"
    assert all(axes.get_xlabel().startswith("step") for axes in drawn.values())


EXPLAINED = "variance explained by values"
BY_OTHERS = {"variance explained by the prompt's value", "variance explained at the first token"}
NOT_LOGGED = {"KL coefficient", EXPLAINED, *BY_OTHERS, "KL of the update", "clipped"}
ONLINE = {"score", "KL to the reference", "length", "responses that end", "entropy"}


def test_online_algorithms_have_panels_of_their_own(ppo):
    """The run folder names the algorithm: PPO and A2C log the same metrics here. Runs of one algorithm share them."""
    other = ppo("二", reward_score_mean=[2.0] * 5)
    a2c = ppo("三/ppo", "a2c", reward_score_mean=[3.0] * 5, value_explained_variance=[0.2] * 5)
    drawn = figure(ppo("一", value_explained_variance=[0.1] * 5), other, a2c)
    found = panels(drawn)
    assert set(found) == {f"{algorithm}: {name}" for algorithm in ("PPO", "A2C") for name in (*ONLINE, EXPLAINED)}
    assert lines(found["PPO: score"])[::2] == [[(i, score) for i in range(1, 6)] for score in (1.0, 2.0)]
    assert lines(found["A2C: score"]) == [[(i, 3.0) for i in range(1, 6)], [(0, 0.5), (5, 0.5)]]
    assert lines(found[f"A2C: {EXPLAINED}"])[0] == [(i, 0.2) for i in range(1, 6)]
    assert [line.get_color() for line in found["PPO: score"].lines] == ["C0", "C0", "C1", "C1"]
    assert [line.get_color() for line in found["A2C: score"].lines] == ["C2", "C2"]
    assert legend(drawn) == ["一", "二", "ppo", "training", "held out", "healthy"]
    assert [key.get_color() for key in drawn.legends[0].get_lines()[:3]] == ["C0", "C1", "C2"]


def test_a_critics_loss_is_not_drawn_with_its_error(ppo):
    """It is half of a squared error, so that values that are learned and held out would seem to be far apart."""
    both = {"loss_value": [1.0] * 5, "eval_value_error": [2.0] * 5, "eval_explained_variance_prompt": [0.1] * 5}
    found = panels(figure(ppo("一", "critic", **both)))
    assert lines(found["critic: loss"]) == [[(i, 1.0) for i in range(1, 6)]]
    assert lines(found["critic: held-out error"]) == [[(i, 2.0) for i in range(1, 6)]]
    assert lines(found["critic: variance explained by the prompt's value"]) == [[(i, 0.1) for i in range(1, 6)]]


def test_every_command_that_leaves_a_run_has_panels():
    """A run folder names the command that wrote it (the trainers' own folders are read in tests/cli)."""
    trains = {name: c for name, c in COMMANDS.items() if not name.startswith("plan ")}  # plans have a run's settings
    of_runs = {name for name, command in trains.items() if issubclass(config_of(command), RunOptions)}
    assert of_runs >= {"sft", "reward", "dpo", "ppo", "a2c", "grpo"}
    for name in of_runs:
        assert {panel.title.lower().split(":")[0] for panel in panels_of(name)} == {
            {"reward": "reward model"}.get(name, name.replace("-", " "))
        }


def config_of(command):
    module, _, name = command.config.partition(":")
    return getattr(importlib.import_module(f"heedful.{module}"), name)


def test_a_run_without_an_environment_does_not_say_what_it_ran(ppo, tmp_path, capsys):
    folder = ppo("别处", None)
    assert main(["report", str(folder), "--output", str(tmp_path / "c.png")]) == 2
    message = capsys.readouterr().err
    assert f"CheckpointError: {folder}/environment.json: there is no such file" in message
    assert 'copy it from the original run, or write {"command": "heedful ALGORITHM"}, such as heedful ppo' in message
    assert not (tmp_path / "c.png").exists()
    (folder / "environment.json").write_text('{"command": "heedful a2c"}', encoding="utf-8")
    assert set(panels(figure(folder))) == {f"A2C: {name}" for name in ONLINE}


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"seed": 0}', "it has no command"),
        ('{"command": 3}', "command must be a text"),
        ('{"command": "heedful evaluate kl"}', "got 'heedful evaluate kl'"),
    ],
)
def test_an_environment_that_names_no_algorithm(sft, content, fragment):
    path = sft / "environment.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError) as error:
        plot.curves(sft)
    for part in (str(path), fragment, 'write {"command": "heedful ALGORITHM"}'):
        assert part in str(error.value)


def test_noisy_accuracies_are_smoothed_and_the_panel_says_so(reward):
    """Of 60 steps, means of 3: accuracies 1, 0, 1, 0, ... become 1, 1/2, 2/3, 1/3, 2/3, ..."""
    (axes,) = figure(reward).axes
    training, held_out = lines(axes)
    assert [value for _, value in training[:5]] == pytest.approx([1, 1 / 2, 2 / 3, 1 / 3, 2 / 3])
    assert [step for step, _ in training] == list(range(1, 61))
    assert held_out == [(0, 0.5)]
    assert axes.get_xlabel() == "step (training: mean of 3 steps)"


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a/ppo", "b/ppo"], ["a/ppo", "b/ppo"]),
        (["一", "一/b"], ["一", "一/b"]),
    ],
)
def test_names_are_as_short_as_they_can_be(ppo, folders, names):
    assert legend(plot.curves([ppo(f"runs/{folder}") for folder in folders]))[: len(names)] == names


def test_only_a_line_break_ends_a_line(logged):
    """JSON writes other ends of lines as they are, here in the name of a reward."""
    end = "\u2028\x85"
    logs = [to_json({"step": step, "loss/sft": 2.0, f"reward/奖{end}励": 1.0}) for step in (1, 2)]
    assert end in logs[0]
    folder = logged("运行", "".join(line + "\n" for line in logs))
    (axes,) = plot.curves(folder, metrics=[f"reward/奖{end}励"]).axes
    assert lines(axes) == [[(1, 1.0), (2, 1.0)]]


def test_no_text_lies_on_another(sft, reward, ppo):
    changed = {"reference_kl_coef": [0.05, 0.1, 0.2, 0.4, 0.8], "value_explained_variance": [-0.1, 0.1, 0.5, 0.7, 0.9]}
    changed |= {f"{name}_{which}": [0.1] * 5 for name in ["value_explained_variance"] for which in ("prompt", "first")}
    runs = [sft, reward, ppo(**changed)]
    runs += [ppo(f"另一次 with a rather long name that goes on, number {i}", **changed) for i in range(3)]
    drawn = figure(*runs)
    assert len(panels(drawn)) == 11
    assert drawn.get_size_inches()[0] == pytest.approx(16.8), "rows of four, 4.2 inches each"
    assert overlaps(drawn) == []


def test_names_that_no_font_has_are_escaped_and_none_is_a_formula(sft):
    """Otherwise empty boxes and a warning; a dollar sign would start mathematics."""
    drawn = plot.curves(sft, [r"$\x$ 😀第一次"])
    fonts = {font.name for font in font_manager.fontManager.ttflist}
    chinese = fonts & {"Noto Sans CJK SC", "Noto Sans SC", "Microsoft YaHei", "PingFang SC", "WenQuanYi Zen Hei"}
    assert legend(drawn)[0].startswith(r"$\x$ ")
    assert ("第" in legend(drawn)[0]) == bool(chinese)
    assert overlaps(drawn) == []  # draws it, and warnings are errors


def test_the_picture_is_real(sft, reward, tmp_path, capsys):
    """Two panels, 4.2 by 3.4 inches each at 150 dots an inch, and a line of legend."""
    output = tmp_path / "图" / "curves.png"
    plot.curves([sft, str(reward)], path=output)
    header = output.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", header[16:])
    assert (width, 510 < height < 600) == (1260, True), height
    assert [path.name for path in output.parent.iterdir()] == ["curves.png"]
    output = tmp_path / "曲线.svg"
    assert main(["report", str(sft), str(reward), "--output", str(output)]) == 0
    assert f"2 runs are in {output}" in capsys.readouterr().out
    assert ET.parse(output).getroot().tag.endswith("svg")


def test_what_a_trainer_returned_is_drawn_as_its_folder(sft):
    result = TrainingResult(sft, {}, heedful.SFTConfig())
    assert lines(plot.curves(result).axes[0]) == lines(plot.curves(str(sft)).axes[0])
    assert legend(plot.curves([result, sft], ["a", "b"]))[:2] == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"step": 1, "loss/sft": "低"}',
        '{"step": 1, "loss/sft": true}',
        '{"step": 1, "loss/sft": 1' + "0" * 400 + "}",
        "[" * 5000,
        '{"step": null}',
    ],
)
def test_a_damaged_line_is_named(logged, line):
    folder = logged("坏", f'{{"step": 0, "eval/loss": 1}}\n\n{line}\n{{"step": 1, "loss/sft": 1}}\n')
    with pytest.raises(DataError) as error:
        plot.curves(folder)
    where = f"{folder / 'metrics.jsonl'}:3 is damaged: expected an object of numbers with a step, got {line[:9]}"
    assert where in str(error.value)


def test_a_folder_that_is_no_run(sft, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="没有 does not exist"):
        plot.curves([tmp_path / "没有"])
    with pytest.raises(CheckpointError, match=f"no metrics.jsonl; did you mean {sft}"):
        plot.curves(sft.parent)
    (sft / "final").mkdir()
    assert main(["report", str(sft / "final"), "--output", str(tmp_path / "c.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"no metrics.jsonl; did you mean {sft}?" in captured.err
    assert not (tmp_path / "c.png").exists()


@pytest.mark.parametrize("content", ["", '{"step": 0, "eval/loss": 5.0}\n', '{"step": 3, "time/update": 1}\n'])
def test_a_run_without_a_step_has_nothing_to_draw(logged, tmp_path, content):
    folder = logged("空", content)
    with pytest.raises(CheckpointError, match=r"空.metrics\.jsonl has nothing to draw: no step of sft"):
        plot.curves(folder)


def test_a_picture_that_cannot_be_written_is_told_first(sft, tmp_path, capsys):
    missing = tmp_path / "没有"
    with pytest.raises(ConfigError, match=r"path .* is a folder; name a picture"):
        plot.curves(missing, path=tmp_path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a file"):
        plot.curves(missing, path=sft / "metrics.jsonl" / "c.png")
    with pytest.raises(ConfigError, match=r"must end in .png, .svg or .pdf; got '.gif'"):
        plot.curves(missing, path=tmp_path / "c.gif")
    with pytest.raises(ConfigError, match=r"plot\.curves: runs is empty"):
        plot.curves([])
    folder = tmp_path / "c.png"
    folder.mkdir()
    assert main(["report", str(missing), "--output", str(folder)]) == 2
    assert f"--output {folder} is a folder" in capsys.readouterr().err
