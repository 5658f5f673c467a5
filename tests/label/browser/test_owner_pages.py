"""Pages of owners: who waits, the bar of links, imports that are withdrawn."""

import pytest

from jsonl import write_jsonl

pytestmark = pytest.mark.exhaustive
CUT = """() => {
  const cut = [...document.querySelectorAll(".top nav a")].filter((one) => {
    const box = one.getBoundingClientRect(), nav = one.parentElement.getBoundingClientRect();
    return box.left < nav.left - 1 || box.right > nav.right + 1;
  });
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  return [...cut.map((one) => one.textContent), ...(wide > 0 ? [`${wide} px`] : [])];
}"""


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_no_link_of_the_bar_is_cut(serve, item, language):
    owner = serve([item("pair", "问题", "a", "b")]).labeller(role="owner", locale=language)
    for width in (760, 1024, 1280, 1920):
        owner.page.set_viewport_size({"width": width, "height": 800})
        for path in ("/", "/rounds"):
            owner.open(path)
            assert owner.page.evaluate(CUT) == [], f"{width} px, {path}"


def test_the_owner_sees_who_waits(serve, item):
    """A newcomer who skipped the screening set has nothing more to do by themselves."""
    served = serve([item("pair", "p", "a", "b", screening=True)], screening_items=1)
    new = served.project.add_person("Noor", "annotator").person_id
    held = served.project.next_item(new)
    served.project.skip(new, held.item.item_id, "", (), "skip-nonce")
    owner = served.labeller("Mei", "owner", "/people")
    assert owner.page.get_by_text("waits for you").count() == 1


def test_an_import_and_an_item_are_withdrawn_and_an_import_is_put_back(serve, tmp_path):
    """Who holds the item is told."""
    served = serve()
    owner = served.labeller("Mei", "owner", "/import")
    for number, (name, prompts) in enumerate((("好", "一二"), ("错", "三四")), 1):
        rows = [{"prompt": prompt, "responses": ["甲 😀", "乙"]} for prompt in prompts]
        owner.page.set_input_files("#file", write_jsonl(tmp_path / f"{name}.jsonl", rows))
        owner.page.get_by_role("button", name="Add 2 items", exact=True).click()
        owner.page.get_by_role("button", name=f"Withdraw: {number} {name}.jsonl").wait_for()
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
