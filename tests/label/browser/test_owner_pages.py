"""What the owner of a small project meets: statistics without overlap, ones and manys."""


def test_one_is_not_spoken_of_as_many(serve, item):
    served = serve([item("pair", f"p{i}", "a", "b") for i in range(2)])
    owner = served.labeller("Mei", "owner")
    owner.then_next("1", "5", "Enter")
    assert owner.page.locator("#progress").text_content() == "Project: 1 of 2 done · you: 1 today"
    owner.open("/stats")
    owner.page.get_by_text("1 label of 1 item", exact=True).wait_for()
    owner.page.get_by_text("No item has labels of two people yet").wait_for()
    assert owner.page.get_by_text("Dashed lines").count() == 0, "there is no chart to explain"
    owner.open("/")
    owner.then_next("1", "5", "Enter")
    owner.open("/stats")
    owner.page.get_by_text("2 labels of 2 items", exact=True).wait_for()


def test_the_owner_sees_who_waits(serve, item):
    """A newcomer who skipped the screening set has nothing more to do by themselves. Rounds have curves of other colours."""
    served = serve([item("pair", "p", "a", "b", screening=True)], screening_items=1)
    new = served.project.add_person("Noor", "annotator").person_id
    held = served.project.next_item(new)
    served.project.skip(new, held.item.item_id, "", (), "skip-nonce")
    owner = served.labeller("Mei", "owner", "/people")
    assert owner.page.get_by_text("waits for you").count() == 1
    owner.open("/rounds")
    strokes = owner.page.evaluate(
        """async () => {
            const { curves } = await import("/static/chart.js");
            const series = [1, 2, 3, 4, 5, 6].map((n) => ({ name: `轮 ${n}`, points: [[0, n], [1, n + 1]] }));
            document.getElementById("main").append(curves("x", series));
            return [...document.querySelectorAll(".chart polyline")].map((line) => {
                const { stroke, opacity } = getComputedStyle(line);
                return `${stroke} ${opacity}`;
            });
        }"""
    )
    assert len(set(strokes)) == 6
    assert {stroke.rpartition(" ")[2] for stroke in strokes} == {"1"}, "none is faint"
