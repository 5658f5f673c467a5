// Exports labels as training files. The archive's content is shown before the download.
import { get, Refused } from "./api.js";
import { el } from "./dom.js";
import { attempt, ready, start } from "./shell.js";
import { named, number, t } from "./words.js";

const main = document.getElementById("main");
const me = await start();
const found = me && await attempt(() => get("/api/people"));
if (found) draw(found.people.filter((one) => one.progress?.own));

/** `people` are those with labels: the labels of each can be left out. */
function draw(people) {
  const choice = (name, values) => el("label", { class: "field" }, el("span", {}, t(`export_${name}`)), el("select", { name }, values.map((value) => el("option", { value }, t(`export_${name}_${value}`)))));
  const fault = el("div", { class: "fault", role: "alert", hidden: true });
  const withoutShare = el("button", { type: "button", on: { click: () => { form.elements.eval_fraction.value = "0"; show(); } } }, t("export_without_share"));
  const form = el("form", { class: "card", on: { change: show, submit: (event) => event.preventDefault() } }, el("div", { class: "form" },
    el("div", { class: "share" }, el("label", { class: "field" }, el("span", {}, t("export_eval_fraction")), el("input", { type: "number", name: "eval_fraction", min: "0", max: "0.9", step: "0.05", value: "0.1" })), fault),
    choice("margin", ["small", "large", "none"]), choice("flagged", ["keep", "leave-out"]), choice("gold", ["leave-out", "keep"]), choice("withdrawn", ["leave-out", "keep"])),
  people.length && el("details", { class: "changes" }, el("summary", {}, t("export_without")), people.map((one) => el("label", { class: "one-line" }, el("input", { type: "checkbox", name: "without", value: one.person }), el("span", { dir: "auto" }, one.name)))));
  main.replaceChildren(el("div", { class: "page-head" }, el("h1", {}, t("page_export")), el("span", { class: "hint" }, t("export_hint"))), form, el("div", { id: "result", class: "preview" }));
  let wanted = 0, drawn = Promise.resolve();
  show();

  /** Draws the form's latest state; states in between, while a reply is awaited, are skipped. */
  function show() {
    const mine = ++wanted;
    drawn = drawn.then(() => mine === wanted && preview());
  }

  async function preview() {
    const { eval_fraction: share, margin, flagged, gold, withdrawn } = form.elements;
    const query = new URLSearchParams({ eval_fraction: share.value, margin: margin.value, flagged: flagged.value, gold: gold.value, withdrawn: withdrawn.value });
    const without = new FormData(form).getAll("without");
    if (without.length) query.set("without", without.join(","));
    const manifest = await attempt(() => get(`/api/export?${query}&preview=1`).catch(shareIsWrong));
    if (manifest !== null) {
      fault.hidden = !manifest.fault;
      fault.replaceChildren(...(manifest.fault ? [el("p", {}, manifest.fault), withoutShare] : []));
      document.getElementById("result").replaceChildren(...(manifest.fault ? [] : contents(manifest, query)));
    }
    ready();
  }
}

/** Only the share can be refused (too few prompts, say): the message is shown beside it. */
function shareIsWrong(error) {
  if (error instanceof Refused && error.status === 422) return { fault: error.message };
  throw error;
}

function contents(manifest, query) {
  const left = Object.entries(manifest.left_out ?? {}).filter(([, count]) => count);
  return [
    el("section", { class: "card" }, el("h2", {}, t("export_files")), el("div", { class: "scroll", tabindex: "0", role: "region", aria: { label: t("export_files") } }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("column_file")), el("th", { class: "number", scope: "col" }, t("column_records")), el("th", { scope: "col" }, t("column_for")))),
      el("tbody", {}, Object.entries(manifest.files).map(([name, one]) => el("tr", {}, el("td", {}, el("code", {}, name)), el("td", { class: "number" }, number(one.records)), el("td", { class: "hint" }, named("file", name.split(".")[0])))))))),
    left.length ? el("section", { class: "card" }, el("h2", {}, t("export_left_out")), el("ul", { class: "plain" }, left.map(([name, count]) => el("li", {}, `${named("left", name.replaceAll(" ", "_"))}: ${number(count)}`)))) : "",
    ...(manifest.notes ?? []).map((note) => el("p", { class: "hint" }, note)),
    el("div", { class: "row" }, el("a", { class: "button main", href: `/api/export?${query}`, download: "labels.zip" }, t("download")),
      el("span", { class: "hint hash" }, `${t("content_hash")} ${String(manifest.content_hash).slice(0, 16)}…`)),
  ];
}
