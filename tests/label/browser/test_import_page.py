"""The import page: what is read wrongly is refused with its place, and what is shown names the user's own file."""

import pytest

from jsonl import lines


def choose(owner, path, content):
    path.write_bytes(content)
    owner.page.set_input_files("#file", path)
    return owner.page.locator("#banner")


WRONG = (
    ('{"prompt": "问 😀"}\n{"prompt": "'.encode() + b'caf\xe9"}\n', 39, 2),
    (b"\xff\xfe{\x00", 1, 1),
    ('{"prompt": "问'.encode()[:-1], 13, 1),
)


@pytest.mark.exhaustive
def test_text_that_is_not_utf_8_is_refused_with_its_place(serve, tmp_path):
    owner = serve().labeller("Mei", "owner", "/import")
    good = '\ufeff{"prompt": "问 😀\u2028", "responses": ["甲", "乙"]}\n'.encode()
    for wrong, byte, line in WRONG:
        choose(owner, tmp_path / "good.jsonl", good)
        owner.page.locator("#result section").first.wait_for()
        banner = choose(owner, tmp_path / "名.jsonl", wrong)
        banner.get_by_text(f"byte {byte} in line {line} is").wait_for()
        assert "名.jsonl" in banner.text_content()
        assert owner.page.locator("#result section").count() == 0, "nothing of the file before can be added by mistake"


def test_files_are_looked_at_refused_and_added(serve, tmp_path):
    served = serve()
    owner = served.labeller("Mei", "owner", "/import")
    good = b'{"prompt": "p", "responses": ["a", "b"]}\n'
    banner = choose(owner, tmp_path / "不 JSON.jsonl", good + b"{not JSON}\n")
    banner.get_by_text("不 JSON.jsonl:2").wait_for()
    banner = choose(owner, tmp_path / "表.xlsx", b"PK")
    banner.get_by_text("表.xlsx does not end in .jsonl, .json, .csv or .tsv").wait_for()

    rows = [{"prompt": "问 😀\u2028", "responses": ["甲", "乙"]}, {"prompt": 7, "responses": ["a", "b"]}]
    choose(owner, tmp_path / "我的 pairs.jsonl", lines(rows).encode())
    errors = owner.page.locator(".errors")
    errors.wait_for()
    assert errors.text_content().startswith("我的 pairs.jsonl:2:"), "an error has its file and line"
    add = owner.page.get_by_role("button", name="Add 1 item", exact=True)
    assert add.is_disabled()
    assert served.project.items() == []
    owner.page.get_by_label("Leave out the 1 record with errors").check()
    add.click()
    owner.page.locator(".link-made").wait_for()
    assert [one.prompt for one in served.project.items()] == ["问 😀\u2028"]

    owner.open("/import")
    choose(owner, tmp_path / "表.csv", 'prompt,chosen,rejected\n"问, 😀",甲,乙\n'.encode())
    owner.page.get_by_label("Keep the label of the file").check()
    owner.page.get_by_role("button", name="Add 1 item").press("Enter")
    owner.page.get_by_text("1 label of the file added.").wait_for()
    assert [item.prompt for item in served.project.items()][-1] == "问, 😀"
    assert [one.person.name for one in served.project.labels()] == ["import"]

    owner.open("/import")
    answers = ["\U0001f600" * 60_000, "字" * 2_000]
    choose(owner, tmp_path / "long.jsonl", lines([{"prompt": "问", "responses": answers}]).encode())
    shown = owner.page.locator("#result .samples .text")
    shown.first.wait_for()
    assert shown.all_text_contents() == ["\U0001f600" * 2_000 + " … and 58,000 more characters", "字" * 2_000]

    owner.open("/import")
    columns = owner.page.get_by_label("Names of columns, if they differ")
    columns.fill(columns.get_attribute("placeholder"))
    choose(owner, tmp_path / "p.jsonl", '{"question": "问 😀", "better": "甲", "rejected": "乙"}\n'.encode())
    owner.page.get_by_role("button", name="Add 1 item").wait_for()
