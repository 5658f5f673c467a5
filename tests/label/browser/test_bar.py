"""The bar at the top of each page: every link of an owner is in sight, in both languages and on usual screens."""

import pytest

CUT = """() => {
  const cut = [...document.querySelectorAll(".top nav a")].filter((one) => {
    const box = one.getBoundingClientRect(), nav = one.parentElement.getBoundingClientRect();
    return box.left < nav.left - 1 || box.right > nav.right + 1;
  });
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  return [...cut.map((one) => one.textContent), ...(wide > 0 ? [`${wide} px`] : [])];
}"""


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_no_link_is_cut(serve, item, language):
    owner = serve([item("pair", "问题", "a", "b")]).labeller(role="owner", locale=language)
    for width in (760, 1024, 1280, 1920):
        owner.page.set_viewport_size({"width": width, "height": 800})
        for path in ("/", "/rounds"):
            owner.open(path)
            owner.page.screenshot(path=f"/tmp/shots/{language}-{width}-{path[1:] or 'work'}.png")
            assert owner.page.evaluate(CUT) == [], f"{width} px, {path}"
