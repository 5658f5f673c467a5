// Criteria about each answer, besides the preference: a scale or labels per criterion, as radio buttons.
import { el, key } from "./dom.js";
import { t } from "./words.js";

let groups = 0;

/** Puts the criteria below each answer's card. `done` is called when the last one was given by a digit. */
export function criteria(asked, cards, { changed, done }) {
  let byKeys = true; // after a click, digits answer the question again
  const sets = cards.flatMap((card, place) => asked.map((one) => ({ ...one, place, node: group(one, place, cards.length) })));
  const on = { pointerdown: () => { byKeys = false; }, focusout: () => { byKeys = true; } };
  for (const [place, card] of cards.entries()) if (asked.length) card.append(el("div", { class: "criteria", on }, sets.filter((one) => one.place === place).map((one) => one.node)));

  function group({ name, values, question, required }, place, count) {
    const radios = `criterion-${(groups += 1)}`;
    const of = count > 1 ? `${t("answer_n", { n: place + 1 })}: ` : "";
    return el("fieldset", { class: "criterion", dir: "auto" },
      el("legend", {}, el("span", { class: "unseen" }, of), el("b", {}, name), question && ` ${question}`, !required && el("span", { class: "hint" }, ` ${t("criterion_optional")}`), place === 0 && name === asked[0].name && [" ", key("k")]),
      el("div", { class: "criterion-values" }, values.map((value, at) => el("label", {},
        el("input", { type: "radio", name: radios, value: at, on: { change: changed } }), el("span", {}, String(value)), typeof value === "string" && key((at + 1) % 10)))));
  }
  const radiosOf = (one) => [...one.node.querySelectorAll("input")];
  const chosen = (one) => radiosOf(one).find((radio) => radio.checked);
  const focus = (one) => {
    byKeys = true;
    (chosen(one) ?? radiosOf(one)[0]).focus({ preventScroll: true });
    one.node.scrollIntoView({ block: "nearest" });
  };
  const current = () => sets.findIndex((one) => one.node.contains(document.activeElement));

  return {
    /** True if a key is for the radio button that has the focus. */
    has: (node, name) => (byKeys || name.startsWith("Arrow")) && sets.some((one) => one.node.contains(node)),
    count: sets.length,
    /** Focuses the first unanswered criterion, or the first of all. */
    enter: () => sets.length > 0 && (focus(sets.find((one) => !chosen(one)) ?? sets[0]), true),
    onKey(event) {
      const at = current();
      const one = sets[at];
      if (/^[0-9]$/.test(event.key)) {
        const radio = radiosOf(one)[(Number(event.key) + 9) % 10];
        if (!radio) return true;
        radio.checked = true;
        changed();
        if (sets[at + 1]) focus(sets[at + 1]);
        else done();
      } else if (event.key === "Backspace") {
        for (const radio of radiosOf(one)) radio.checked = false;
        changed();
      } else return event.key.startsWith("Arrow") ? null : false;
      return true;
    },
    missing: () => {
      const one = sets.find((set) => set.required && !chosen(set));
      if (!one) return null;
      focus(one);
      return cards.length > 1 ? t("criterion_first_n", { name: one.name, n: one.place + 1 }) : t("criterion_first", { name: one.name });
    },
    /** For each place an object with what was chosen. */
    answer: () => (sets.length === 0 ? {} : { criteria: cards.map((_, place) => Object.fromEntries(sets.filter((one) => one.place === place && chosen(one)).map((one) => [one.name, one.values[chosen(one).value]]))) }),
    restore(said) {
      if (!Array.isArray(said)) return;
      for (const one of sets) {
        const at = one.values.indexOf(said[one.place]?.[one.name]);
        if (at >= 0) radiosOf(one)[at].checked = true;
      }
    },
  };
}
