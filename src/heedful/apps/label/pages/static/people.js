// People: names, roles, standings, invitation links.
import { get, post } from "./api.js";
import { el } from "./dom.js";
import { ask, attempt, ready, showBanner, start, toast } from "./shell.js";
import { number, t } from "./words.js";

const ROLES = ["annotator", "viewer", "owner"];
const STANDINGS = ["screening", "active", "held-out", "refused", "removed"];
const main = document.getElementById("main");
let link = null;

const me = await start();
if (me) await load();

async function load(options) {
  const reply = await attempt(() => get("/api/people"), options);
  if (reply !== null) draw(reply.people);
  if (reply?.policy?.problem) showBanner(reply.policy.problem, { kind: "warn" }); // the process that writes answers has ended
  else if (reply?.chats_kept_back) showBanner(t("chats_kept_back", { n: reply.chats_kept_back }), { kind: "warn" });
  ready();
}

async function change(body, said) {
  const reply = await attempt(() => post("/api/people", body));
  if (reply?.link) link = { name: reply.person.name, link: reply.link };
  await load({ keepBanner: reply === null });
  if (reply !== null && said) toast(said);
}

function select(label, names, prefix, value, changed) {
  const node = el("select", { aria: { label }, on: { change: () => changed(node.value) } }, names.map((name) => el("option", { value: name, selected: name === value }, t(`${prefix}_${name}`))));
  return node;
}

function draw(people) {
  main.replaceChildren(
    el("div", { class: "page-head" }, el("h1", {}, t("page_people")), el("span", { class: "hint" }, t("people_hint"))),
    ...(link ? [made()] : []),
    el("section", { class: "card scroll", tabindex: "0", aria: { label: t("page_people") } }, el("table", {},
      el("thead", {}, el("tr", {}, ["name", "role", "standing", "labels", "today", "link"].map((name) => el("th", { class: ["labels", "today"].includes(name) ? "number" : null, scope: "col" }, t(`column_${name}`))))),
      el("tbody", {}, people.map(row)))),
    adding(),
    el("section", { class: "card" }, el("h2", {}, t("standings_title")), el("dl", { class: "keys" }, STANDINGS.map((name) => el("div", {}, el("dt", {}, t(`standing_${name}`)), el("dd", {}, t(`standing_${name}_means`)))))));
}

function row(one) {
  const update = (field) => (value) => change({ person: one.person, [field]: value }, t("changed_person", { name: one.name }));
  const mayLabel = one.role !== "viewer";
  const rename = () => {
    const box = el("input", { type: "text", required: true, maxlength: "200", value: one.name, autofocus: true, aria: { label: t("column_name") } });
    ask(t("rename"), [box], t("keep"), () => { update("name")(box.value.trim()); });
  };
  return el("tr", {}, el("td", { dir: "auto" }, el("button", { type: "button", class: "name", title: t("rename"), on: { click: rename } }, one.name)),
    el("td", {}, select(`${t("column_role")}: ${one.name}`, ROLES, "role", one.role, update("role"))),
    el("td", {}, select(`${t("column_standing")}: ${one.name}`, STANDINGS, "standing", one.standing, update("standing")),
      one.standing === "screening" && one.progress?.left === 0 && el("div", { class: "hint" }, t("waits_for_you"))),
    el("td", { class: "number" }, mayLabel ? number(one.progress?.own) : ""), el("td", { class: "number" }, mayLabel ? number(one.progress?.today) : ""),
    el("td", {}, one.standing === "removed" ? "" : el("button", { type: "button", on: { click: () => change({ person: one.person, invite: true }) } }, t("new_link"))));
}

function made() {
  const box = el("input", { type: "text", readonly: true, value: link.link, aria: { label: t("link_for", { name: link.name }) }, on: { focus: () => box.select() } });
  const copy = async () => {
    box.select();
    await navigator.clipboard?.writeText(link.link).catch(() => {}); // missing without HTTPS; then the text is selected
    toast(t("copied"));
  };
  return el("section", { class: "card link-made" }, el("strong", {}, t("link_for", { name: link.name })), box, el("div", { class: "row" }, el("button", { type: "button", class: "main", on: { click: copy } }, t("copy")), el("span", { class: "hint" }, t("link_once"))));
}

function adding() {
  const name = el("input", { type: "text", required: true, maxlength: "200", id: "new-name" });
  const role = el("select", {}, ROLES.map((one) => el("option", { value: one }, t(`role_${one}`))));
  const form = el("form", { class: "card", on: { submit: (event) => { event.preventDefault(); change({ name: name.value.trim(), role: role.value }); } } },
    el("h2", {}, t("add_person")), el("div", { class: "form" },
      el("label", { class: "field" }, el("span", {}, t("column_name")), name), el("label", { class: "field" }, el("span", {}, t("column_role")), role),
      el("button", { type: "submit", class: "main" }, t("add_and_invite"))));
  return form;
}
