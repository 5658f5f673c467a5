"""An import is withdrawn on its page, an item on its own; who holds one is told."""

import json

import pytest


@pytest.fixture
def served(serve, tmp_path):
    served = serve()
    owner = served.labeller("Mei", "owner", "/import")
    for number, (name, prompts) in enumerate((("好", "一二"), ("错", "三四")), 1):
        lines = [{"prompt": prompt, "responses": ["甲 😀", "乙"]} for prompt in prompts]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines), encoding="utf-8")
        owner.page.set_input_files("#file", path)
        owner.page.get_by_role("button", name="Add 2 items", exact=True).click()
        owner.page.get_by_role("button", name=f"Withdraw: {number} {name}.jsonl").wait_for()
    served.owner = owner
    return served


def test_an_import_and_an_item_are_withdrawn_and_an_import_is_put_back(served):
    """Who holds the item is told."""
    owner = served.owner
    owner.page.get_by_role("button", name="Withdraw: 2 错.jsonl").press("Enter")
    owner.page.get_by_label("Reason, if you like").fill("文件错了")
    owner.press("Enter")
    back = owner.page.get_by_role("button", name="Put back: 2 错.jsonl")
    back.wait_for()
    assert "2 withdrawn" in owner.page.locator("#earlier").inner_text()
    assert [one.prompt for one in served.project.items()] == ["一", "二"]
    assert served.project.events()[-1].content["reason"] == "文件错了"
    back.click()
    owner.page.get_by_role("button", name="Put back", exact=True).last.click()
    owner.page.get_by_role("button", name="Withdraw: 2 错.jsonl").wait_for()
    assert len(served.project.items()) == 4

    ada = served.labeller("Ada")
    before = ada.item
    ada.press("c")
    ada.page.keyboard.insert_text("我的备注")
    ada.press("Escape")
    owner.page.bring_to_front()
    owner.open("/labels?items=1")
    owner.page.get_by_text("4 items", exact=True).wait_for()
    owner.page.get_by_role("link", name="一").click()
    owner.page.get_by_role("button", name="Withdraw").click()
    owner.press("Enter")
    owner.page.get_by_text("This item is withdrawn").wait_for()
    ada.press("1", "5", "Enter")
    ada.page.get_by_role("heading", name="A label was not saved").wait_for()
    assert "The owner has withdrawn this item" in ada.page.locator("dialog").inner_text()
    comment = ada.page.get_by_label("Comment", exact=True).last
    assert comment.input_value() == "我的备注", "what was written can be copied"
    ada.press("Escape")
    assert ada.item != before


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_and_a_narrow_screen(axe, served, scheme):
    served.project.withdraw("p1", batch="2")
    owner = served.owner
    owner.page.emulate_media(color_scheme=scheme)
    owner.page.set_viewport_size({"width": 360, "height": 740})
    for path in ("/import", "/labels?items=1", f"/labels?item={served.project.items()[0].item_id}"):
        owner.open(path)
        assert axe(owner.page) == [], path
        assert owner.page.evaluate("document.scrollingElement.scrollWidth") <= 360, path
