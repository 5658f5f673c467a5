// Two to nine answers put in order. The answers keep their places; a short list beside them is
// put in order: dragged, by buttons, or by keys. Answers on one rank tie.
import { asText } from "../content.js";
import { el, key } from "../dom.js";
import { announce } from "../shell.js";
import { t } from "../words.js";
import { answerCards } from "./pair.js";

/** Cuts off an answer of many lines, with a button to show the rest, so that nine long ones can be skimmed. */
function fold(card) {
  const shown = card.querySelector(":scope > .text, :scope > .messages");
  shown.classList.add("folded");
  if (shown.scrollHeight <= shown.clientHeight + 1) return shown.classList.remove("folded");
  const all = el("button", { type: "button", class: "quiet small", on: { click: () => { shown.classList.remove("folded"); all.remove(); } } }, t("show_all"));
  return shown.after(all);
}

export function ranking(item, { changed }) {
  const cards = answerCards(item.answers, item.markdown);
  /** Places from best to worst, and for each whether it ties with the one above it. */
  let order = item.answers.map((_, place) => ({ place, tied: false }));
  let touched = false;
  let confirmed = false;
  let at = 0; // the row that keys move
  const list = el("ol", { class: "ranks", aria: { label: t("ranks_label") } });
  const rows = item.answers.map((value, place) => row(value, place));
  const onCards = cards.map((card, place) => ranksOnCard(card, place));

  queueMicrotask(() => cards.forEach(fold)); // once they are on the page and have a height

  function row(value, place) {
    const name = t("answer_n", { n: place + 1 });
    const small = (label, sign, action) => el("button", { type: "button", class: "quiet small", tabindex: "-1", aria: { label: `${name}: ${label}` }, title: label, on: { click: (event) => { event.stopPropagation(); at = find(place); action(); } } }, sign);
    const up = small(t("move_up"), "↑", () => move(-1));
    const down = small(t("move_down"), "↓", () => move(1));
    const tie = small(t("tie_above"), "=", () => toggleTie());
    const grip = el("button", { type: "button", class: "grip", on: { focus: () => { at = find(place); mark(); } } },
      el("span", { class: "rank" }), el("span", { class: "row-text" }, el("b", {}, name), " ", el("span", { class: "snippet", dir: "auto" }, asText(value).slice(0, 160))));
    grip.addEventListener("click", () => cards[place].scrollIntoView({ block: "nearest", behavior: "smooth" }));
    const node = el("li", { class: "rank-row", data: { place } }, grip, el("span", { class: "moves" }, tie, up, down));
    drag(grip, place);
    return { node, grip, tie, up, down };
  }

  /** Buttons on the answer itself, where the list of ranks is below all answers (a narrow screen): its rank, and a tie. */
  function ranksOnCard(card, place) {
    const name = t("answer_n", { n: place + 1 });
    const press = (label, sign, action) => {
      const button = el("button", { type: "button", class: "choice", title: label, aria: { pressed: "false", label: `${name}: ${label}` }, on: { click: () => { at = find(place); action(); button.focus({ preventScroll: true }); } } }, sign);
      return button;
    };
    const ranks = item.answers.map((_, index) => press(t("rank_n", { n: index + 1 }), String(index + 1), () => putAt(place, index)));
    const tie = press(t("tie_above"), "=", toggleTie);
    card.querySelector(".answer-name").after(el("div", { class: "card-ranks", role: "group", aria: { label: `${name}: ${t("ranks_label")}` } }, ranks, tie));
    return { ranks, tie };
  }

  const find = (place) => order.findIndex((entry) => entry.place === place);
  function ranksByRow() {
    let rank = 0;
    return order.map((entry, index) => (entry.tied && index > 0 ? rank : (rank = index + 1)));
  }
  function act() {
    touched = true;
    order[0].tied = false;
    draw();
    say();
    changed();
  }
  const say = () => announce(t("now_at_rank", { n: order[at].place + 1, rank: ranksByRow()[at] }));

  function move(step) {
    const to = at + step;
    if (to < 0 || to >= order.length) return;
    place(at, to);
  }
  function place(from, to) {
    const entry = take(from);
    order.splice(to, 0, { ...entry, tied: Boolean(order[to]?.tied) }); // in the midst of a tie, it joins the tie
    at = to;
    act();
    rows[entry.place].grip.focus({ preventScroll: true });
  }
  /** A button of an answer: moves it to that place, also into a tie there. */
  const putAt = (number, to) => place(find(number), to);
  /** Takes a row out; what tied with it ties among itself from then on. */
  function take(from) {
    const [entry] = order.splice(from, 1);
    if (order[from] && !entry.tied) order[from].tied = false;
    return entry;
  }
  function toggleTie() {
    if (at === 0) return;
    order[at].tied = !order[at].tied;
    act();
    rows[order[at].place].grip.focus({ preventScroll: true });
  }

  function drag(grip, placeNumber) {
    grip.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const node = rows[placeNumber].node;
      const startY = event.clientY;
      let moving = false;
      const onMove = (now) => {
        if (!moving && Math.abs(now.clientY - startY) < 5) return;
        moving = true;
        node.classList.add("dragging");
        node.style.transform = `translateY(${now.clientY - startY}px)`;
        markTarget(target(now.clientY));
      };
      const onEnd = (now) => {
        grip.removeEventListener("pointermove", onMove);
        grip.removeEventListener("pointerup", onEnd);
        grip.removeEventListener("pointercancel", onEnd);
        node.classList.remove("dragging");
        node.style.transform = "";
        markTarget(null);
        if (!moving || now.type === "pointercancel") return;
        const where = target(now.clientY);
        if (where.onto !== null) tieWith(placeNumber, where.onto);
        else place(find(placeNumber), where.to);
      };
      grip.setPointerCapture(event.pointerId);
      grip.addEventListener("pointermove", onMove);
      grip.addEventListener("pointerup", onEnd);
      grip.addEventListener("pointercancel", onEnd);
    });

    /** Where a row dropped at this height goes: between two others, or onto the middle of one, which ties them. */
    function target(y) {
      const others = order.filter((entry) => entry.place !== placeNumber);
      for (const [index, entry] of others.entries()) {
        const box = rows[entry.place].node.getBoundingClientRect();
        const share = (y - box.top) / box.height;
        if (share < 0.3) return { to: index, onto: null };
        if (share < 0.7) return { to: index, onto: entry.place };
      }
      return { to: others.length, onto: null };
    }
    function markTarget(where) {
      for (const other of rows) other.node.classList.remove("tie-target", "before-target", "after-target");
      if (where === null) return;
      const others = order.filter((entry) => entry.place !== placeNumber);
      if (where.onto !== null) rows[where.onto].node.classList.add("tie-target");
      else if (others[where.to]) rows[others[where.to].place].node.classList.add("before-target");
      else rows[others.at(-1).place].node.classList.add("after-target");
    }
  }
  function tieWith(moved, onto) {
    const entry = take(find(moved));
    const index = find(onto) + 1;
    order.splice(index, 0, { ...entry, tied: true });
    at = index;
    act();
    rows[moved].grip.focus({ preventScroll: true });
  }

  function mark() {
    rows.forEach(({ node }, index) => node.classList.toggle("current", order[at].place === index));
    cards.forEach((card, index) => card.classList.toggle("current", order[at].place === index));
  }
  function draw() {
    const ranks = ranksByRow();
    const shown = [...list.children];
    order.forEach((entry, index) => {
      const { node, grip, tie, up, down } = rows[entry.place];
      node.classList.toggle("tied", entry.tied);
      grip.querySelector(".rank").textContent = ranks[index];
      grip.setAttribute("aria-label", t("row_label", { n: entry.place + 1, rank: ranks[index] }));
      onCards[entry.place].ranks.forEach((button, rank) => button.setAttribute("aria-pressed", String(rank + 1 === ranks[index])));
      onCards[entry.place].tie.setAttribute("aria-pressed", String(entry.tied));
      onCards[entry.place].tie.disabled = index === 0;
      tie.disabled = index === 0;
      tie.setAttribute("aria-pressed", String(entry.tied));
      up.disabled = index === 0;
      down.disabled = index === order.length - 1;
      if (shown[index] !== node) list.insertBefore(node, list.children[index] ?? null);
    });
    mark();
  }
  draw();

  return {
    body: el("div", { class: "ranking" }, el("div", { class: "rank-answers" }, cards),
      el("div", { class: "rank-side card" }, el("h2", {}, t("your_order")), el("p", { class: "hint" }, t("ranking_hint")), list)),
    controls: el("p", { class: "keys-line" }, key("↑"), key("↓"), " ", t("keys_rank_walk"), " · ", key("⇧↑"), key("⇧↓"), " ", t("keys_rank_move"), " · ", key("="), " ", t("keys_rank_tie"), " · ", key("1"), "–", key(String(order.length)), " ", t("keys_rank_digit")),
    onKey(event) {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (step && (event.shiftKey || event.altKey)) move(step);
      else if (step) rows[order[Math.max(0, Math.min(order.length - 1, document.activeElement?.classList.contains("grip") ? at + step : at))].place].grip.focus();
      else if (event.key === "=" || event.key === "t") toggleTie();
      else if (/^[1-9]$/.test(event.key) && Number(event.key) <= order.length) place(at, Number(event.key) - 1);
      else return false;
      return true;
    },
    missing() {
      if (touched || confirmed) return null;
      confirmed = true;
      return t("order_untouched");
    },
    answer() {
      const ranks = ranksByRow();
      return { ranks: item.answers.map((_, place) => ranks[find(place)]) };
    },
    /** An untouched order is the random one of the screen: it is not a draft. */
    draft() {
      return touched ? this.answer() : {};
    },
    restore(answer) {
      const ranks = answer?.ranks;
      if (!Array.isArray(ranks) || ranks.length !== order.length) return;
      order = ranks.map((rank, place) => ({ place, rank })).sort((a, b) => a.rank - b.rank || a.place - b.place)
        .map(({ place, rank }, index, all) => ({ place, tied: index > 0 && all[index - 1].rank === rank }));
      touched = true;
      draw();
    },
  };
}
