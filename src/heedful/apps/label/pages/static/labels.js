// Single labels for the owner: a list to search, an item with everybody's labels, and corrections, which stay visible.
import { get, post } from "./api.js";
import { answerCards } from "./tasks/pair.js";
import { asText, conversation, judgement, prompt, text } from "./content.js";
import { el, nonce } from "./dom.js";
import { withdraw } from "./withdraw.js";
import { ask, attempt, ready, showBanner, start, toast } from "./shell.js";
import { language, number, t } from "./words.js";

const main = document.getElementById("main");
const EXCERPT = 120; // characters of a text in the list
const when = (at) => new Date(at).toLocaleString(language === "zh" ? "zh-CN" : "en", { dateStyle: "short", timeStyle: "short" });
const query = () => new URLSearchParams(location.search);

/** Shows a page of the list or an item, by the address. */
async function show() {
  const asked = query();
  const shown = asked.get("item") ? await attempt(() => get(`/api/item?${new URLSearchParams({ item: asked.get("item") })}`)) : await attempt(() => get(`/api/labels?${asked}`));
  if (shown !== null) (asked.get("item") ? drawItem : drawList)(shown);
  ready();
}

async function go(to) {
  history.pushState(null, "", `/labels?${new URLSearchParams(Object.entries(to).filter(([, value]) => value))}`);
  await show();
  main.querySelector("h1").focus();
}

/* ---- the list ---- */

function drawList(found) {
  const asked = query();
  const filter = { person: asked.get("person") ?? "", differ: asked.get("differ") ?? "", search: asked.get("search") ?? "", items: asked.get("items") ?? "" };
  const person = el("select", { name: "person" }, el("option", { value: "" }, t("everybody")), found.people.map((one) => el("option", { value: one.person, selected: one.person === filter.person }, one.name)));
  const differ = el("input", { type: "checkbox", name: "differ", checked: filter.differ !== "" });
  const items = el("select", { name: "items" }, el("option", { value: "" }, t("page_labels")), el("option", { value: "1", selected: filter.items !== "" }, t("labels_all_items")));
  const search = el("input", { type: "text", name: "search", value: filter.search, maxlength: "300", placeholder: t("labels_search_hint") });
  const chosen = () => ({ person: person.value, differ: differ.checked ? "1" : "", search: search.value.trim(), items: items.value });
  const turn = (name, step, off) => el("button", { type: "button", disabled: off, on: { click: () => go({ ...filter, page: found.page + step }) } }, t(name));
  main.replaceChildren(
    el("div", { class: "page-head" }, el("h1", { tabindex: "-1" }, t("page_labels")), el("span", { class: "hint" }, t(filter.items ? "items_count" : "labels_count", { n: number(found.count) }))),
    el("form", { class: "card", on: { submit: (event) => { event.preventDefault(); go(chosen()); } } }, el("div", { class: "form" },
      el("label", { class: "field" }, el("span", {}, t("labels_what")), items),
      el("label", { class: "field" }, el("span", {}, t("column_name")), person),
      el("label", { class: "field" }, el("span", {}, t("labels_search")), search),
      el("label", { class: "one-line" }, differ, el("span", {}, t("labels_differ"))),
      el("button", { type: "submit", class: "main" }, t("labels_show")))),
    found.count === 0 ? el("p", { class: "card" }, t("labels_none")) : el("section", { class: "card scroll", tabindex: "0", aria: { label: t("page_labels") } }, el("table", {},
      el("thead", {}, el("tr", {}, (filter.items ? ["prompt", "labels", "batch"] : ["prompt", "name", "answer", "when"]).map((name) => el("th", { scope: "col" }, t(`column_${name}`))))),
      el("tbody", {}, found.rows.map((one) => el("tr", {}, el("td", { dir: "auto" }, link(one), one.withdrawn && el("span", { class: "hint" }, ` (${t("withdrawn")})`)), filter.items
        ? [el("td", {}, number(one.labels)), el("td", { class: "hint", dir: "auto" }, one.batch)]
        : [el("td", { dir: "auto" }, one.name), el("td", { dir: "auto" }, said(one), mark(one)), el("td", { class: "hint" }, when(one.at))]))))),
    found.pages > 1 ? el("div", { class: "row" }, turn("page_before", -1, found.page === 1), el("span", { class: "hint" }, t("page_of", { page: number(found.page), pages: number(found.pages) })), turn("page_after", 1, found.page === found.pages)) : "");
}

const link = (one) => el("a", { href: `/labels?item=${one.item}`, on: { click: (event) => { if (event.ctrlKey || event.metaKey || event.shiftKey) return; event.preventDefault(); go({ item: one.item }); } } }, short(one.prompt) || one.item);
const mark = (one) => [one.repeat && el("span", { class: "hint" }, ` (${t("a_repeat")})`), one.corrected_by && el("span", { class: "hint" }, ` (${t("corrected_mark")})`)].filter(Boolean);
const short = (value) => { const all = [...asText(value)]; return all.length > EXCERPT ? `${all.slice(0, EXCERPT).join("")} …` : all.join(""); };

/** An answer in words; a text is cut off. */
function said({ answer }) {
  const parts = "text" in answer ? [short(answer.text)] : judgement(answer);
  const names = [...new Set((answer.criteria ?? []).flatMap(Object.keys))];
  return [...parts, ...names.map((name) => `${name}: ${answer.criteria.map((one) => one[name] ?? "–").join(" / ")}`)].join(" · ");
}

/* ---- one item ---- */

function drawItem(found) {
  main.replaceChildren(
    el("div", { class: "page-head" }, el("h1", { tabindex: "-1" }, t("labels_of_item")), el("span", { class: "hint" }, `${t(`task_${found.task}`)} · ${t("round_n", { n: found.round })} · ${found.item}`)),
    el("div", { class: "row" }, el("button", { type: "button", on: { click: () => (history.length > 1 ? history.back() : go({})) } }, t("back_to_list")),
      el("button", { type: "button", on: { click: () => withdraw({ item: found.item, back: found.withdrawn }, show) } }, t(found.withdrawn ? "put_back" : "withdraw")), found.withdrawn && el("span", {}, t("is_withdrawn"))),
    found.gold ? el("p", { class: "card", dir: "auto" }, t("gold_known", { answer: said({ answer: found.gold }) })) : "",
    found.suggestion ? el("p", { class: "card", dir: "auto" }, t("suggested_n", { answer: said({ answer: found.suggestion }) })) : "",
    el("section", { class: "card prompt" }, el("h2", {}, t("prompt")), prompt(found.prompt)),
    found.answers.length ? el("div", { class: "samples" }, answerCards(found.answers)) : "",
    ...(found.labels.length ? [] : [el("p", { class: "card" }, t("no_labels_yet"))]),
    ...found.labels.map((one) => labelCard(found, one)));
}

function labelCard(found, one) {
  const task = found.task;
  return el("section", { class: "card label-card", data: { label: one.label }, aria: { label: t("label_of", { name: one.name }) } },
    el("div", { class: "page-head" }, el("h2", { dir: "auto" }, one.name, " ", el("span", { class: "hint" }, `${t(`standing_${one.standing}`)} · ${when(one.at)}`), mark(one)),
      el("button", { type: "button", on: { click: () => correct(found, one) } }, t("correct_label"))),
    one.messages && el("details", {}, el("summary", {}, t("task_chat")), conversation(one.messages), el("div", { class: "samples" }, answerCards(one.responses))),
    "text" in one.answer ? text(one.answer.text) : el("p", { dir: "auto" }, said({ task, answer: one.answer })),
    one.flags.length > 0 && el("p", { class: "flag-note" }, `⚑ ${one.flags.map((name) => t(`item_flag_${name}`)).join(" · ")}`),
    one.comment && el("p", { class: "hint", dir: "auto" }, one.comment),
    one.history.length > 0 && el("ol", { class: "history", aria: { label: t("history") } }, one.history.map((step) => el("li", { dir: "auto" },
      t("correction_by", { name: step.name, at: when(step.at) }), " ", el("del", {}, said({ task, answer: step.old })), " ", el("ins", {}, said({ task, answer: step.answer })), step.reason && el("div", { class: "hint" }, step.reason)))));
}

/* ---- a correction ---- */

const select = (label, values, chosen) => el("label", { class: "field" }, el("span", {}, label), el("select", {}, values.map(([value, words]) => el("option", { value, selected: String(value) === String(chosen) }, words))));
const valueOf = (field) => field.querySelector("select, textarea").value;

/** The fields of a correction, and a function that returns their answer. */
function fieldsOf(found, { answer, responses }) {
  const count = (responses ?? found.answers).length;
  if ("preferred" in answer) {
    const now = answer.preferred === null ? (answer.both_bad ? "bad" : "tie") : answer.preferred;
    const better = select(t("which_better"), [[0, t("answer_n_better", { n: 1 })], [1, t("answer_n_better", { n: 2 })], ["tie", t("tie")], ["bad", t("both_bad")]], now);
    const strength = select(t("how_much"), [1, 2, 3, 4].map((n) => [n, t(`strength_${n}`)]), answer.strength ?? 1);
    const draw = () => { strength.hidden = ["tie", "bad"].includes(valueOf(better)); };
    better.addEventListener("change", draw);
    draw();
    return [[better, strength], () => (strength.hidden ? { preferred: null, strength: null, both_bad: valueOf(better) === "bad" } : { preferred: Number(valueOf(better)), strength: Number(valueOf(strength)), both_bad: false })];
  }
  if ("ranks" in answer) {
    const ranks = answer.ranks.map((rank, at) => select(t("answer_n", { n: at + 1 }), Array.from({ length: count }, (_, index) => [index + 1, t("rank_n", { n: index + 1 })]), rank));
    return [ranks, () => ({ ranks: ranks.map((one) => Number(valueOf(one))) })];
  }
  if ("rating" in answer) {
    const rating = select(t("quality"), [1, 2, 3, 4, 5, 6, 7].map((n) => [n, t("rating_n", { n })]), answer.rating);
    return [[rating], () => ({ rating: Number(valueOf(rating)) })];
  }
  const box = el("textarea", { class: "writing", rows: "8", dir: "auto" });
  box.value = answer.text;
  return [[el("label", { class: "field" }, el("span", {}, t("corrected_text")), box)], () => ({ text: box.value })];
}

function criteriaFields(found, { answer }) {
  if (!answer.criteria) return [[], () => ({})]; // criteria were not asked then
  const rows = found.answers.map((_, place) => found.criteria.map((one) => ({ one, field: select(`${t("answer_n", { n: place + 1 })}: ${one.name}`, [["", "–"], ...one.values.map((value, at) => [at, String(value)])], one.values.indexOf(answer.criteria[place]?.[one.name])) })));
  return [rows.flat().map((one) => one.field), () => ({ criteria: rows.map((row) => Object.fromEntries(row.filter(({ field }) => valueOf(field) !== "").map(({ one, field }) => [one.name, one.values[valueOf(field)]]))) })];
}

function correct(found, one) {
  const [fields, given] = fieldsOf(found, one);
  const [more, also] = criteriaFields(found, one);
  const reason = el("input", { type: "text", maxlength: "1000", dir: "auto" });
  const sent = nonce();
  ask(t("correct_of", { name: one.name }), [el("div", { class: "stack" }, fields, more, el("label", { class: "field" }, el("span", {}, t("correction_reason")), reason),
    el("p", { class: "hint" }, t(one.closed ? "correction_closed" : "correction_hint")))], t("correct_label"), () => {
    attempt(() => post("/api/correct", { nonce: sent, label: one.label, answer: { ...given(), ...also() }, reason: reason.value.trim() })).then(async (reply) => {
      if (reply === null) return;
      await show();
      toast(t("was_corrected"));
      if (reply.closed) showBanner(t("correction_closed"), { kind: "warn" });
    });
  });
}

if (await start()) {
  window.addEventListener("popstate", show);
  await show();
}
