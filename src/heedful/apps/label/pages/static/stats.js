// Statistics of labels: on people, the page and the reward model. Every share has its 95 % interval and its count.
import { get } from "./api.js";
import { bars, intervals } from "./chart.js";
import { answer, asText, prompt } from "./content.js";
import { el } from "./dom.js";
import { attempt, ready, start } from "./shell.js";
import { known, number, percent, t } from "./words.js";

const range = (share) => (share ? `${percent(share.low)} – ${percent(share.high)} · n\u00a0${number(share.count)}` : "");
const tile = (label, value, below = "") => el("div", { class: "tile" }, el("h2", {}, label), el("div", { class: "value" }, value), el("div", { class: "range" }, below));
const shareTile = (stats, label, name, note) => tile(label, percent(stats[name]?.value), [range(stats[name]), note, ...apart(stats, name)].filter(Boolean).join(" · "));
/** A share by task, if several have one: rankings have many comparisons and would outweigh pairs. */
function apart(stats, name) {
  const tasks = Object.entries(stats.by_task ?? {}).filter(([, one]) => one[name]);
  return tasks.length > 1 ? tasks.map(([task, one]) => `${t(`task_${task}`)} ${percent(one[name].value, 0)}`) : [];
}
const shareCell = (share) => el("td", { class: "number" }, percent(share?.value, 0), share && el("div", { class: "range" }, `${percent(share.low, 0)}–${percent(share.high, 0)}`));
const table = (label, heads, rows, numbers = 1) => el("div", { class: "scroll", tabindex: "0", role: "region", aria: { label } }, el("table", {},
  el("thead", {}, el("tr", {}, heads.map((head, at) => el("th", { scope: "col", class: at >= numbers ? "number" : null }, head)))), el("tbody", {}, rows)));
const cell = (value) => el("td", { class: "number" }, value);

function draw(stats) {
  const left = Object.entries(stats.left_out ?? {}).filter(([, count]) => count).map(([name, count]) => t(`left_out_${name}`, { n: number(count) }));
  const seconds = Object.entries(stats.median_seconds ?? {});
  document.getElementById("main").replaceChildren(
    el("div", { class: "page-head" }, el("h1", {}, t("page_stats")), el("span", { class: "hint" }, [t("stats_of", { labels: number(stats.labels), items: number(stats.items) }), ...left, ...(stats.corrected ? [t("corrected_n", { n: number(stats.corrected) })] : [])].join(" · "))),
    el("div", { class: "tiles" },
      shareTile(stats, t("left_rate"), "left", t("left_rate_note")), shareTile(stats, t("longer_rate"), "longer"), shareTile(stats, t("tie_rate"), "ties"), shareTile(stats, t("both_bad_rate"), "both_bad"),
      shareTile(stats, t("self_consistency"), "self_consistency"), stats.gold ? shareTile(stats, t("gold_accuracy"), "gold") : "", stats.suggestion_followed ? shareTile(stats, t("suggestions_followed"), "suggestion_followed") : "", tile(t("median_seconds"), number(seconds[0]?.[1], 1), seconds.map(([task, value]) => `${t(`task_${task}`)} ${number(value, 1)}`).join(" · "))),
    el("div", { class: "columns" }, agreement(stats), el("section", { class: "card" }, el("h2", {}, t("per_day")), stats.per_day?.length ? bars(t("per_day"), stats.per_day.map((one) => [one.day, one.labels])) : el("p", { class: "hint" }, t("no_labels_yet")))),
    ...criteria(stats.criteria ?? {}), people(stats), model(stats.model));
}

function agreement(stats) {
  const tasks = Object.entries(stats.agreement ?? {}).filter(([, one]) => one);
  const card = el("section", { class: "card" }, el("h2", {}, t("agreement")));
  if (!tasks.length) card.append(el("p", {}, t("no_overlap")));
  else {
    card.append(intervals(t("agreement"), tasks.flatMap(([task, one]) => [
      ...(one.share ? [[t(`task_${task}`), one.share]] : []), ...(one.without_ties ? [[`${t(`task_${task}`)}, ${t("without_ties")}`, one.without_ties]] : [])]), stats.references));
    const names = new Map((stats.people ?? []).map((one) => [one.person, one.name]));
    card.append(table(t("agreement"), [t("column_task"), t("column_items"), "κ Fleiss", t("alpha_nominal"), t("alpha_ordinal"), t("alpha_interval")], tasks.map(([task, one]) => el("tr", {}, el("td", {}, t(`task_${task}`)), cell(number(one.items)), cell(number(one.fleiss, 2)), cell(number(one.alpha_nominal, 2)), cell(number(one.alpha_ordinal, 2)), cell(number(one.alpha_interval, 2))))));
    const cohen = tasks.flatMap(([task, one]) => (one.cohen ?? []).map((two) => el("tr", {}, el("td", { dir: "auto" }, two.people.map((id) => names.get(id) ?? id).join(" · ")), el("td", {}, t(`task_${task}`)), cell(number(two.units)), cell(number(two.kappa, 2)))));
    if (cohen.length) card.append(el("details", { class: "changes" }, el("summary", {}, t("cohen_by_pair")), table(t("cohen_by_pair"), [t("column_people"), t("column_task"), t("column_items"), "κ Cohen"], cohen, 2)));
  }
  if (tasks.length) card.append(el("p", { class: "hint" }, t("references")), el("ul", { class: "hint references" }, (stats.references ?? []).map((one) => el("li", {}, `${percent(one.value)}: ${known(`reference_${one.name}`) ? t(`reference_${one.name}`) : one.who} (${one.paper})`))));
  return card;
}

function criteria(found) {
  const rows = Object.entries(found);
  if (!rows.length) return [];
  const counts = (one) => Object.entries(one.counts).map(([value, n]) => `${value}: ${number(n)}`).join(" · ");
  return [el("section", { class: "card" }, el("h2", {}, t("criteria")), table(t("criteria"), [t("criterion"), t("criterion_counts"), t("column_answers"), t("column_mean"), t("column_equal"), t("alpha_nominal"), t("alpha_ordinal")],
    rows.map(([name, one]) => el("tr", {}, el("td", { dir: "auto" }, name), el("td", { dir: "auto", class: "hint" }, counts(one)), cell(number(one.answers)), cell(number(one.mean, 2)), shareCell(one.agreement), cell(number(one.alpha_nominal, 2)), cell(number(one.alpha_ordinal, 2)))), 2))];
}

function people({ people: rows = [], suggestion_followed: suggested }) {
  const heads = ["name", "labels", "others", "self", "left", "longer", "ties", "seconds", "screening", "gold", ...(suggested ? ["followed"] : [])].map((name) => t(`column_${name}`));
  return el("section", { class: "card" }, el("h2", {}, t("page_people")), table(t("page_people"), heads, rows.filter((one) => one.labels > 0 || one.role === "annotator").map((one) => el("tr", {},
    el("td", { dir: "auto" }, one.name, el("div", { class: "hint" }, t(`standing_${one.standing}`))), cell(number(one.labels)), shareCell(one.others ?? one.with_others ?? one.agreement),
    shareCell(one.self_consistency), shareCell(one.left), shareCell(one.longer), shareCell(one.ties), cell(number(one.median_seconds, 1)), shareCell(one.screening), shareCell(one.gold), suggested && shareCell(one.suggestion_followed)))));
}

function model(found) {
  const card = el("section", { class: "card" }, el("h2", {}, t("model_and_people")));
  if (!found) {
    card.append(el("p", {}, t("no_scores")));
    return card;
  }
  card.append(el("p", {}, `${t("model_agrees")}: ${percent(found.agreement?.value)} `, el("span", { class: "hint" }, range(found.agreement))));
  for (const [at, item] of found.items.entries()) {
    card.append(el("details", { class: "changes", open: at === 0 }, el("summary", {}, `${number(item.margin, 2)} · ${asText(item.prompt).slice(0, 110)}`),
      el("div", { class: "preview" }, prompt(item.prompt), el("div", { class: "samples" }, item.answers.map((one, at) => el("div", { class: "card" },
        el("h2", {}, t("score_n", { score: number(item.scores[at], 2) }), " ", liked(item, at)), answer(one)))))));
  }
  return card;
}

/** How many people preferred an answer, or its ranks. */
function liked(item, at) {
  if (item.task === "ranking") return t("ranked", { ranks: item.labels.map((one) => one.ranks[at]).join(", ") });
  return t("preferred_by", { n: item.labels.filter((one) => one.preferred === at).length, of: item.labels.length });
}

const me = await start();
const found = me && await attempt(() => get("/api/stats"));
if (found) draw(found);
ready();
