"""The import page: what is read wrongly is refused with its place, and what is shown names the user's own file."""

import json

import pytest


def choose(owner, path, content):
    path.write_bytes(content)
    owner.page.set_input_files("#file", path)
    return owner.page.locator("#banner")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("wrong", "byte", "line"),
    [
        ('{"prompt": "问 😀"}\n{"prompt": "'.encode() + b'caf\xe9"}\n', 39, 2),
        (b"\xff\xfe{\x00", 1, 1),
        ('{"prompt": "问'.encode()[:-1], 13, 1),
    ],
)
def test_text_that_is_not_utf_8_is_refused_with_its_place(serve, tmp_path, wrong, byte, line):
    served = serve()
    owner = served.labeller("Mei", "owner", "/import")
    good = '\ufeff{"prompt": "问 😀\u2028", "responses": ["甲", "乙"]}\n'.encode()
    choose(owner, tmp_path / "good.jsonl", good)
    owner.page.locator("#result section").first.wait_for()
    banner = choose(owner, tmp_path / "名.jsonl", wrong)
    banner.get_by_text("UTF-8").wait_for()
    said = banner.text_content()
    assert "名.jsonl" in said
    assert f"byte {byte}, in line {line}," in said
    assert owner.page.locator("#result section").count() == 0, "nothing of the file before can be added by mistake"


def test_errors_name_the_file_that_was_chosen(serve, tmp_path):
    owner = serve().labeller("Mei", "owner", "/import")
    good = b'{"prompt": "p", "responses": ["a", "b"]}\n'
    choose(owner, tmp_path / "我的 pairs.jsonl", good + b'{"prompt": 7, "responses": ["a", "b"]}\n')
    assert owner.page.locator(".errors").text_content().startswith("我的 pairs.jsonl:2")
    banner = choose(owner, tmp_path / "不 JSON.jsonl", good + b"{not JSON}\n")
    banner.get_by_text("不 JSON.jsonl:2").wait_for()


def test_a_table_is_read_and_a_file_of_another_kind_is_refused_by_its_ending(serve, tmp_path):
    served = serve()
    owner = served.labeller("Mei", "owner", "/import")
    banner = choose(owner, tmp_path / "表.xlsx", b"PK")
    banner.get_by_text("表.xlsx ends in none of .jsonl, .json, .csv and .tsv").wait_for()
    choose(owner, tmp_path / "表.csv", 'prompt,chosen,rejected\n"问, 😀",甲,乙\n'.encode())
    owner.page.get_by_role("button", name="Add 1 item").press("Enter")
    owner.page.get_by_text("1 item added").first.wait_for()
    assert [item.prompt for item in served.project.items()][-1] == "问, 😀"


def test_the_columns_in_the_example_are_read(serve, tmp_path):
    owner = serve().labeller("Mei", "owner", "/import")
    columns = owner.page.get_by_label("Names of columns, if they differ")
    columns.fill(columns.get_attribute("placeholder"))
    choose(owner, tmp_path / "p.jsonl", '{"question": "问 😀", "better": "甲", "rejected": "乙"}\n'.encode())
    owner.page.get_by_role("button", name="Add 1 item").wait_for()


def test_long_text_is_shown_shortened(serve, tmp_path):
    owner = serve().labeller("Mei", "owner", "/import")
    answers = ["\U0001f600" * 60_000, "字" * 2_000]
    lines = json.dumps({"prompt": "问", "responses": answers}, ensure_ascii=False)
    choose(owner, tmp_path / "long.jsonl", lines.encode())
    shown = owner.page.locator("#result .samples .text")
    shown.first.wait_for()
    assert shown.all_text_contents() == ["\U0001f600" * 2_000 + " … and 58,000 more characters", "字" * 2_000]


def test_labels_of_the_file_are_kept_if_asked(serve, tmp_path):
    served = serve()
    owner = served.labeller("Mei", "owner", "/import")
    choose(owner, tmp_path / "pairs.jsonl", '{"prompt": "问 😀", "chosen": "甲", "rejected": "乙"}\n'.encode())
    owner.page.get_by_label("Keep the label of the file").check()
    owner.page.get_by_role("button", name="Add 1 item").click()
    owner.page.get_by_text("1 label of the file added.").wait_for()
    assert [one.person.name for one in served.project.labels()] == ["import"]
