// Writing an answer oneself (a demonstration), and correcting one (an edit, which gives a pair: the edit is better than the original).
import { answer, asText } from "../content.js";
import { differences } from "../diff.js";
import { el, key } from "../dom.js";
import { t } from "../words.js";

const area = (label, value, oninput) => {
  const node = el("textarea", { class: "writing", rows: "10", dir: "auto", spellcheck: "true", aria: { label }, on: { input: () => { fit(node); oninput(); } } });
  node.value = value;
  requestAnimationFrame(() => fit(node));
  return node;
};
/** As high as its text, so that the page scrolls and not a box within it. */
export function fit(node) {
  node.style.height = "auto";
  node.style.height = `${Math.max(node.scrollHeight + 4, 120)}px`;
}
/** A text as in a textarea, which has only one kind of line break. */
const plain = (text) => text.replace(/\r\n?/g, "\n");
/** The written text, with the line breaks of the original. */
const asGiven = (written, original) => (original.includes("\r\n") ? written.replaceAll("\n", "\r\n") : written);
const keys = () => el("p", { class: "keys-line" }, key("Ctrl"), "+", key("Enter"), " ", t("keys_send"), " · ", key("Esc"), " ", t("keys_leave_text"), " · ", key("e"), " ", t("keys_write"));

export function demonstration(item, { changed }) {
  const draft = item.answers.length ? asText(item.answers[0]) : "";
  const count = el("span", { class: "hint" });
  const counted = () => { count.textContent = t("characters", { n: Array.from(box.value).length }); };
  const box = area(t("your_answer"), draft, () => { counted(); changed(); });
  counted();
  return {
    body: el("section", { class: "card" }, el("h2", {}, t("your_answer")), draft && el("p", { class: "hint" }, t("draft_given")), box, count),
    controls: keys(),
    focus: box,
    onKey: (event) => event.key === "e" && (box.focus(), true),
    missing: () => (box.value.trim() === "" ? t("write_first") : null),
    answer: () => ({ text: asGiven(box.value, draft) }),
    restore(given) {
      if (typeof given?.text === "string") box.value = given.text;
      counted();
    },
  };
}

export function correction(item, { changed }) {
  const original = asText(item.answers[0]);
  const shown = el("div", { class: "text diff", dir: "auto" });
  const draw = () => shown.replaceChildren(...differences(plain(original), box.value).map(([kind, text]) => (kind === "same" ? text : el(kind === "added" ? "ins" : "del", {}, text))));
  const box = area(t("corrected"), original, () => { draw(); changed(); });
  draw();
  return {
    body: el("div", { class: "stack" }, el("div", { class: "side-by-side" },
      el("section", { class: "card answer" }, el("h2", {}, t("original")), answer(item.answers[0])),
      el("section", { class: "card answer" }, el("h2", {}, t("corrected")), box)),
    el("details", { class: "card changes", open: true }, el("summary", {}, t("changes")), shown)),
    controls: keys(),
    focus: box,
    onKey: (event) => event.key === "e" && (box.focus(), true),
    missing: () => (box.value.trim() === "" ? t("write_first") : box.value === plain(original) ? t("change_first") : null),
    answer: () => ({ text: asGiven(box.value, original) }),
    restore(given) {
      if (typeof given?.text === "string") box.value = given.text;
      draw();
    },
  };
}
