// One answer, a quality from 1 to 7, and flags (Ouyang et al. 2022, table 3).
import { el, key } from "../dom.js";
import { t } from "../words.js";
import { answerCards } from "./pair.js";

export const FLAGS = ["fails-instruction", "inappropriate-for-assistant", "hallucination", "satisfies-constraint", "sexual-content",
  "violent-content", "encourages-violence", "denigrates-protected-class", "harmful-advice", "expresses-opinion", "moral-judgement"];

export function rating(item, { changed }) {
  let chosen = null;
  const buttons = [1, 2, 3, 4, 5, 6, 7].map((n) => el("button", { type: "button", class: "choice rate", aria: { pressed: "false", label: t("rating_n", { n }) }, on: { click: () => rate(n) } }, String(n)));
  const boxes = FLAGS.map((name) => el("input", { type: "checkbox", name, on: { change: changed } }));
  const flags = el("fieldset", { class: "card flags" }, el("legend", {}, t("rating_flags"), " ", key("↓")),
    FLAGS.map((name, at) => el("label", {}, boxes[at], el("span", {}, t(`flag_${name}`)))));

  function rate(n) {
    chosen = n;
    buttons.forEach((node, at) => node.setAttribute("aria-pressed", String(at + 1 === n)));
    changed();
  }
  return {
    body: el("div", { class: "rating" }, answerCards(item.answers, item.markdown), flags),
    controls: el("div", { class: "choices rates", role: "group", aria: { label: t("quality") } }, el("span", { class: "ask" }, t("worst")), buttons, el("span", { class: "ask" }, t("best"))),
    onKey(event) {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (/^[1-7]$/.test(event.key)) rate(Number(event.key));
      else if (step) boxes[Math.max(0, Math.min(boxes.length - 1, boxes.indexOf(document.activeElement) + step))].focus();
      else return false;
      return true;
    },
    missing: () => (chosen === null ? t("rate_first") : null),
    answer: () => ({ rating: chosen, flags: FLAGS.filter((_, at) => boxes[at].checked) }),
    restore(answer) {
      if (answer?.rating) rate(answer.rating);
      for (const name of answer?.flags ?? []) if (FLAGS.includes(name)) boxes[FLAGS.indexOf(name)].checked = true;
    },
  };
}
