// Two answers side by side (below each other on a narrow screen).
import { pairChoice } from "../choice.js";
import { answer } from "../content.js";
import { el } from "../dom.js";
import { t } from "../words.js";

export function pair(item, { changed }) {
  const cards = answerCards(item.answers, item.markdown);
  const choice = pairChoice(cards, changed);
  return {
    body: el("div", { class: "side-by-side" }, cards),
    controls: choice.element,
    onKey: choice.onKey,
    missing: choice.missing,
    answer: choice.answer,
    restore: choice.restore,
  };
}

/** The answers as cards that are named by their place. */
export function answerCards(answers, html = null) {
  const name = (at) => (answers.length === 1 ? t("answer") : t("answer_n", { n: at + 1 }));
  return answers.map((one, at) => el("section", { class: "card answer", aria: { label: name(at) } },
    el("h2", { class: "answer-name" }, name(at), el("span", { class: "mark", aria: { hidden: "true" } }, "✓")),
    answer(one, html?.[at] ?? null)));
}
