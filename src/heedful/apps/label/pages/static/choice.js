// Choosing between two answers: left, right, tie or both bad, then how much better. Used for pairs and for turns of a chat.
import { el, key } from "./dom.js";
import { t } from "./words.js";

const FIRST = 3; // the key of the least strength; 1 and 2 always choose the two answers

/** `cards` are the two answers on the screen, marked when chosen; `changed` is called when the choice changes. */
export function pairChoice(cards, changed) {
  const state = { preferred: undefined, strength: null, both_bad: false };
  const button = (name, label, short, brief = label) => el("button", { type: "button", class: `choice ${name}`, aria: { pressed: "false", label }, on: { click: () => choose(name) } }, key(short), el("span", { class: "long" }, label), el("span", { class: "short", aria: { hidden: "true" } }, brief));
  const sides = {
    left: button("left", t("left_better"), "1", t("answer_n", { n: 1 })),
    tie: button("tie", t("tie"), "t"),
    bad: button("bad", t("both_bad"), "b"),
    right: button("right", t("right_better"), "2", t("answer_n", { n: 2 })),
  };
  const strengths = [1, 2, 3, 4].map((n) => el("button", { type: "button", class: "choice strength", aria: { pressed: "false" }, on: { click: () => strong(n) } }, key(n + FIRST - 1), el("span", {}, t(`strength_${n}`))));
  const row = el("div", { class: "choices strengths", role: "group", aria: { label: t("how_much") } }, el("span", { class: "ask" }, t("how_much")), strengths);
  const element = el("div", { class: "pair-choice" },
    el("div", { class: "choices sides", role: "group", aria: { label: t("which_better") } }, Object.values(sides)), row);

  const chosen = () => {
    if (state.preferred === undefined) return null;
    if (state.preferred === null) return state.both_bad ? "bad" : "tie";
    return state.preferred === 0 ? "left" : "right";
  };
  function choose(name) {
    const preferred = { left: 0, right: 1, tie: null, bad: null }[name];
    if (preferred === null || preferred !== state.preferred) state.strength = null; // it belonged to the other answer
    state.preferred = preferred;
    state.both_bad = name === "bad";
    draw();
    changed();
  }
  function strong(n) {
    if (state.preferred === undefined || state.preferred === null) return;
    state.strength = n;
    draw();
    changed();
  }
  function draw() {
    const now = chosen();
    for (const [name, node] of Object.entries(sides)) node.setAttribute("aria-pressed", String(name === now));
    strengths.forEach((node, at) => {
      node.setAttribute("aria-pressed", String(state.strength === at + 1));
      node.disabled = state.preferred === undefined || state.preferred === null;
    });
    row.classList.toggle("waiting", now !== null && state.preferred !== null && state.strength === null);
    cards.forEach((card, at) => {
      card.classList.toggle("chosen", state.preferred === at);
      card.classList.toggle("rejected", state.both_bad);
    });
  }
  draw();
  return {
    element,
    /** A single key; true if it was used. 1 and 2 are the answers, 3 to 6 how much better the chosen one is. */
    onKey(event) {
      const one = event.key.toLowerCase();
      if (one === "t") choose("tie");
      else if (one === "b") choose("bad");
      else if (one === "arrowleft") choose("left");
      else if (one === "arrowright") choose("right");
      else if (one === "backspace") { Object.assign(state, { preferred: undefined, strength: null, both_bad: false }); draw(); changed(); }
      else if (/^[3-6]$/.test(one)) strong(Number(one) - FIRST + 1);
      else if (one === "1") choose("left");
      else if (one === "2") choose("right");
      else return false;
      return true;
    },
    missing: () => (state.preferred === undefined ? t("choose_first") : state.preferred !== null && state.strength === null ? t("strength_first") : null),
    answer: () => ({ ...state }),
    restore(answer) {
      if (!answer || !("preferred" in answer)) return;
      Object.assign(state, { preferred: answer.preferred, strength: answer.strength ?? null, both_bad: Boolean(answer.both_bad) });
      draw();
    },
  };
}
